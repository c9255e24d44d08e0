"""FSDP2 (fully_shard), alone and on 2-D meshes, and the ZeroRedundancyOptimizer."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from harness import adam, alone, batches, check, close, mine, mlp, moved, same_parameters, whole
from harness import together as train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SMALL_BUCKETS_MB = 0.002


def shard(model: nn.Sequential, **options: object) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@check(4)
def fsdp2(run):
    model = mlp()
    parallel = shard(copy.deepcopy(model))
    assert parallel[0].weight.to_local().numel() < model[0].weight.numel()
    train(run, parallel)
    expected = alone(model)
    moved(model, expected)
    same_parameters(parallel, expected)
    full = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))
    for name, tensor in full.items():
        close(tensor, expected.state_dict()[name])


@check(2)
def fsdp2_that_keeps_parameters_after_the_forward_pass(run):
    model = mlp()
    parallel = shard(copy.deepcopy(model), reshard_after_forward=False)
    train(run, parallel)
    same_parameters(parallel, alone(model))


@check(2, 4)
def fsdp2_with_uneven_shards(run):
    """Seven rows on two or four ranks: some ranks hold fewer, one perhaps none."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4))
    parallel = shard(copy.deepcopy(model))
    train(run, parallel)
    same_parameters(parallel, alone(model))


@check(2)
def fsdp2_in_mixed_precision(run):
    """Parameters in bfloat16 for the arithmetic, gradients summed and kept in float32."""
    torch.set_default_dtype(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = mlp()
    parallel = shard(copy.deepcopy(model), mp_policy=policy)
    assert parallel(batches()[0][0]).dtype == torch.bfloat16
    train(run, parallel, torch.optim.SGD(parallel.parameters(), lr=0.1))
    assert all(p.dtype == torch.float32 for p in parallel.parameters())
    same_parameters(parallel, alone_with_sgd(model), tolerance=5e-3)


@check(2)
def fsdp2_with_gradients_in_bfloat16(run):
    torch.set_default_dtype(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = mlp()
    parallel = shard(copy.deepcopy(model), mp_policy=policy)
    train(run, parallel, torch.optim.SGD(parallel.parameters(), lr=0.1))
    same_parameters(parallel, alone_with_sgd(model), tolerance=5e-3)


def alone_with_sgd(model: nn.Module, max_norm: float | None = None) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


@check(2)
def fsdp2_clips_and_accumulates_gradients(run):
    model = mlp()
    parallel = shard(copy.deepcopy(model))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        (a, b), (c, d) = (tensor.chunk(2) for tensor in mine(run, x, y))
        parallel.set_requires_gradient_sync(False)
        (F.cross_entropy(parallel(a), c) / 2).backward()
        parallel.set_requires_gradient_sync(True)
        (F.cross_entropy(parallel(b), d) / 2).backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 0.1)
        optimizer.step()
    same_parameters(parallel, alone_with_sgd(model, max_norm=0.1))


@check(4)
def hsdp_two_replicas_of_two_shards(run):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mlp()
    parallel = shard(copy.deepcopy(model), mesh=mesh)
    assert parallel[0].weight.to_local().numel() == model[0].weight.numel() // 2
    train(run, parallel)
    same_parameters(parallel, alone(model))


@check(4)
def fsdp2_of_a_tensor_parallel_model(run):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = mlp(depth=1)
    parallel = copy.deepcopy(model)
    parallelize_module(parallel, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(parallel, mesh=mesh["data"])
    optimizer = adam(parallel)
    row = mesh.get_local_rank("data")
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(parallel(x.chunk(2)[row]), y.chunk(2)[row]).backward()
        optimizer.step()
    expected = alone(model)
    same_parameters(parallel, expected)
    close(whole(parallel(batches()[0][0])), expected(batches()[0][0]).detach())


@check(4)
def zero_optimizer(run):
    model = mlp()
    parallel = DistributedDataParallel(copy.deepcopy(model))
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.Adam, lr=0.02)
    train(run, parallel, optimizer)
    same_parameters(parallel.module, alone(model))
    sizes = [p.numel() for p in model.parameters()]
    held = sum(s["exp_avg"].numel() for s in optimizer.optim.state.values())
    assert held < sum(sizes)
    total = torch.tensor([float(held)])
    dist.all_reduce(total)
    assert total.item() == sum(sizes)  # each moment is kept once
    optimizer.consolidate_state_dict(to=0)
    if run.rank == 0:
        state = optimizer.state_dict()["state"]
        assert sorted(s["exp_avg"].numel() for s in state.values()) == sorted(sizes)


@check(4)
def zero_optimizer_overlapped_with_ddp(run):
    """torch itself leaves out the first two updates (three with a static graph): warm-up."""
    model, data = mlp(), batches(6)
    for static_graph, left_out in ((False, 2), (True, 3)):
        parallel = DistributedDataParallel(
            copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS_MB, static_graph=static_graph
        )
        optimizer = ZeroRedundancyOptimizer(
            parallel.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.02
        )
        hook = hook_with_zero_step(allreduce_hook, parallel, optimizer)
        parallel.register_comm_hook(None, hook)
        for x, y in data:
            parallel.zero_grad()
            x, y = mine(run, x, y)
            F.cross_entropy(parallel(x), y).backward()
            optimizer.step()
        same_parameters(parallel.module, alone(model, data[left_out:]))
