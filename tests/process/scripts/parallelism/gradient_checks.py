"""What potluck.torch offers around backward, with torch's own DDP and FSDP2."""

from __future__ import annotations

import copy
import re
import unittest
import warnings

import numpy as np
import torch
import torch.distributed as dist
from harness import batches, check, close, mine, mlp, same_bits, whole
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import potluck.torch
from potluck import BF16, PowerSGD, Quantize, RandomK, TopK
from potluck.errors import Desync
from potluck.testing.world import run_world
from potluck.torch import (
    CompressionState,
    GradientInterceptor,
    GradScaler,
    LossScale,
    clip_grad_norm_,
    compression_hook,
)
from potluck.torch.hooks import own_group


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


@check(4)
def sharded_gradients_are_clipped_by_their_global_norm(run):
    meshes = [None]
    if run.world_size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    x, y = batches(1)[0]
    model = mlp()
    backward(model, x, y)
    for mesh in meshes:
        parallel = fully_shard(mlp(), mesh=mesh)
        backward(parallel, *mine(run, x, y))
        norm = clip_grad_norm_(parallel, 0.01)
        right = copy.deepcopy(model)
        for copied, parameter in zip(right.parameters(), model.parameters(), strict=True):
            copied.grad = parameter.grad.clone()
        close(norm, nn.utils.clip_grad_norm_(right.parameters(), 0.01))
        same_bits(norm)
        for found, wanted in zip(parallel.parameters(), right.parameters(), strict=True):
            close(whole(found.grad), wanted.grad)


@check(2)
def an_overflow_in_one_ranks_shard_skips_the_step_on_all(run):
    parallel = fully_shard(mlp())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scaler = GradScaler(LossScale(scale=8.0))
    x, y = mine(run, *batches(1)[0])
    for spoilt in (True, False):
        before = [whole(p).clone() for p in parallel.parameters()]
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(parallel(x), y)).backward()
        if spoilt and run.rank == 1:
            parallel[0].weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        now = [whole(p) for p in parallel.parameters()]
        same = [torch.equal(*pair) for pair in zip(before, now, strict=True)]
        assert all(same) if spoilt else not any(same)
    assert scaler.factor == 4.0


@check(2)
def gradients_of_torchs_ddp_are_intercepted_before_and_after_the_reduction(run):
    x, y = batches(1)[0]
    own = mlp()
    backward(own, *mine(run, x, y))
    model = mlp()
    backward(model, x, y)
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}):
        parallel = DistributedDataParallel(mlp(), **options)
        with GradientInterceptor(parallel) as gradients:
            with parallel.no_sync():
                backward(parallel, *mine(run, x, y))
            assert all(g.reduced is None for g in gradients.last.gradients.values())
            parallel.zero_grad()
            backward(parallel, *mine(run, x, y))
            for name, parameter in model.named_parameters():
                found = gradients.last.gradients[name]
                close(found.local, own.get_parameter(name).grad)
                close(found.reduced, parameter.grad)
    dist.barrier()


@check(4)
def what_the_compression_hook_loses_is_sent_with_later_gradients(run):
    torch.set_default_dtype(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # a user would see them in each training
        for strategy in (
            Quantize(bits=8),
            TopK(0.3, chunk=64),
            RandomK(0.5),
            PowerSGD(2, start_step=0),
        ):
            losses_of_the_hook(run, strategy)


def losses_of_the_hook(run, strategy):
    x, y = batches(1)[0]
    model = mlp()
    backward(model, x, y)
    wanted = [p.grad for p in model.parameters()]
    errors = {}
    for feedback in (False, True):
        parallel = DistributedDataParallel(mlp(), bucket_cap_mb=2e-3)
        state = CompressionState(strategy, error_feedback=feedback)
        parallel.register_comm_hook(state, compression_hook)
        sums = [torch.zeros_like(p) for p in parallel.parameters()]
        for _ in range(32):  # the same gradient again and again: what is lost adds up, or not
            parallel.zero_grad()
            backward(parallel, *mine(run, x, y))
            same_bits(torch.cat([p.grad.flatten() for p in parallel.parameters()]))
            for total, parameter in zip(sums, parallel.parameters(), strict=True):
                total += parameter.grad / 32
        pairs = zip(sums, wanted, strict=True)
        errors[feedback] = max((a - b).abs().max().item() for a, b in pairs)
    # RandomK alone is unbiased without error feedback: there, too, the mean comes nearer.
    most = errors[False] * (1 if isinstance(strategy, RandomK) else 0.5)
    assert 0 < errors[True] < most, (strategy, errors)


@check(4)
def powersgd_gives_what_torchs_own_hook_gives(run):
    """In float64, with the Q that torch draws: the same up to rounding, by our hook and by our DDP.
    What each keeps differs by parts whose sum over the ranks is zero, so from then on, too."""
    found, order = {}, []
    for theirs in (True, False):
        parallel = DistributedDataParallel(mlp())
        if theirs:
            state = PowerSGDState(None, 2, start_powerSGD_iter=2, random_seed=3)

            def hook(state, bucket, parallel=parallel):
                places = {id(p): place for place, p in enumerate(parallel.parameters())}
                order[:] = [places[id(p)] for p in bucket.parameters()]
                return powerSGD_hook(state, bucket)

            parallel.register_comm_hook(state, hook)
        else:
            state = CompressionState(PowerSGD(2, start_step=2))
            parallel.register_comm_hook(state, with_the_q_of_torch)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for x, y in batches(8):
            optimizer.zero_grad()
            backward(parallel, *mine(run, x, y))
            optimizer.step()
        found[theirs] = [p.detach().clone() for p in parallel.parameters()]
        for parameter in found[theirs]:
            same_bits(parameter)
    plain = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in batches(8):
        optimizer.zero_grad()
        backward(plain, *mine(run, x, y))
        optimizer.step()
    by_ddp = by_potlucks_ddp(run.world_size, order)
    for theirs, ours, ddp, without in zip(
        found[True], found[False], by_ddp, plain.parameters(), strict=True
    ):
        close(ours, theirs)
        close(ddp, theirs)
        if ours.dim() == 2 and ours.numel() == 24 * 24:
            assert (ours - without).abs().max() > 1e-4, "nothing was compressed"


def by_potlucks_ddp(world_size, order):
    """The same training by potluck.torch.DDP, in threads of this process: the parameters.
    ``order``: of the parameters in torch's only bucket."""
    start, data, strategy = mlp(), batches(8), PowerSGD(2, start_step=2)
    assert sorted(order) == list(range(len(list(start.parameters())))), "torch made one bucket"

    def train(ctx):
        model = potluck.torch.DDP(copy.deepcopy(start), ctx, compression=strategy, dense_below=0)
        names = [name for name, _ in model.module.named_parameters()]
        parameters = list(model.parameters())
        drawn = the_q_of_torch([parameters[place] for place in order], strategy)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step, (x, y) in enumerate(data):
            if step == 2:
                qs = {names[place]: drawn.get(parameters[place]) for place in order}
                model.compression.restore_shared({n: q for n, q in qs.items() if q is not None})
            optimizer.zero_grad()
            backward(model, x.chunk(world_size)[ctx.rank], y.chunk(world_size)[ctx.rank])
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    found = run_world(world_size, train)
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))
    return found[0]


def the_q_of_torch(parameters, strategy):
    """By parameter: the first Q that torch's hook draws with ``random_seed=3``, for the matrices
    of a bucket in their order."""
    generator = torch.Generator().manual_seed(int(np.random.RandomState(3).randint(1_000_000_000)))
    return {
        parameter: torch.randn(1, parameter[0].numel(), 2, generator=generator)[0].numpy()
        for parameter in parameters
        if strategy.applies_to(tuple(parameter.shape))
    }


def with_the_q_of_torch(state, bucket):
    if state.step == 2:
        state.residuals.qs |= the_q_of_torch(bucket.parameters(), state.compressor)
    return compression_hook(state, bucket)


@check(2)
def the_hooks_state_goes_on_where_it_was_saved(run):
    x, y = mine(run, *batches(1)[0])
    for strategy in (PowerSGD(2, start_step=1), TopK(0.3, chunk=64)):
        parallel = DistributedDataParallel(mlp(), bucket_cap_mb=2e-3)  # several buckets
        state = CompressionState(strategy)
        parallel.register_comm_hook(state, compression_hook)
        for _ in range(3):
            parallel.zero_grad()
            backward(parallel, x, y)
        kept = state.state_dict(parallel)
        assert kept["residuals"].keys() == dict(mlp().named_parameters()).keys()
        assert any(each.any() for each in kept["residuals"].values())
        other = DistributedDataParallel(mlp(), bucket_cap_mb=1e-3)  # other buckets
        again = CompressionState(strategy)
        again.load_state_dict(kept, other)
        other.register_comm_hook(again, compression_hook)
        for model in (parallel, other):
            model.zero_grad()
            backward(model, x, y)
        if isinstance(strategy, PowerSGD):  # TopK's chunks are those of a bucket
            pairs = zip(parallel.parameters(), other.parameters(), strict=True)
            assert all(torch.equal(one.grad, two.grad) for one, two in pairs)
        else:
            assert all(torch.isfinite(each.grad).all() for each in other.parameters())
        for wrong in ({"step": 1}, kept | {"residuals": {"nothing": torch.zeros(3)}}):
            try:
                again.load_state_dict(wrong, other)
            except ValueError as error:
                assert "not the state of" in str(error) or "no such parameter" in str(error)
            else:
                raise AssertionError("nothing was raised")
        for unpaid in (
            CompressionState(strategy, error_feedback=False),
            CompressionState(lambda name, parameter: None, model=other),
            CompressionState(strategy, dense_below=10**6),
        ):
            with unittest.TestCase().assertLogs("potluck", "WARNING") as told:
                unpaid.load_state_dict(kept, other)
            assert "others are dropped: no error feedback keeps them" in told.output[0]
            assert not unpaid.state_dict(other)["residuals"]


@check(2)
def the_hook_forgets_the_matrices_of_a_backward_that_raised(run):
    """torch's DDP takes no other backward then, so a script wraps the module anew, and keeps the
    state."""

    def fails(gradient):
        raise ArithmeticError("of the script")

    def wrapped(module):
        return DistributedDataParallel(module, bucket_cap_mb=2e-3)  # several buckets

    x, y = mine(run, *batches(1)[0])
    found = []
    for disturbed in (False, True):
        state = CompressionState(PowerSGD(2, start_step=1), error_feedback=False)
        parallel = wrapped(mlp())
        parallel.register_comm_hook(state, compression_hook)
        backward(parallel, x, y)  # all in one bucket, and sent as it is
        parallel.zero_grad()
        if disturbed:
            handle = parallel.module[0].weight.register_hook(fails)
            backward_fails(parallel, x, y, "of the script")
            assert state._sums is not None, "no bucket came before the error"
            handle.remove()
            backward_fails(parallel, x, y, "Expected to have finished reduction in the prior")
        parallel = wrapped(parallel.module)
        parallel.register_comm_hook(state, compression_hook)
        parallel.zero_grad()
        backward(parallel, x, y)
        assert state.step == 2
        for parameter in parallel.parameters():
            same_bits(parameter.grad)
        found.append([parameter.grad for parameter in parallel.parameters()])
    assert all(map(torch.equal, *found))


def backward_fails(model, x, y, text):
    try:
        backward(model, x, y)
    except (ArithmeticError, RuntimeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError("nothing was raised")


@check(2)
def the_compression_hook_chooses_by_parameter_size_and_step(run):
    def policy(name, parameter):
        return {"0.weight": TopK(0.3, chunk=64), "2.weight": PowerSGD(2, start_step=3)}.get(name)

    def lossy(make, bucket_cap_mb):
        parallel = DistributedDataParallel(mlp(), bucket_cap_mb=bucket_cap_mb)
        parallel.register_comm_hook(make(parallel), compression_hook)
        plain = DistributedDataParallel(mlp())
        found = []
        for x, y in batches(4):
            for model in (parallel, plain):
                model.zero_grad()
                backward(model, *mine(run, x, y))
            names = set()
            for (name, one), other in zip(
                parallel.module.named_parameters(), plain.parameters(), strict=True
            ):
                same_bits(one.grad)
                if (one.grad - other.grad).abs().max() > 1e-6:
                    names.add(name)
            found.append(names)
        return found

    half = TopK(0.5, chunk=8)
    everything = {name for name, _ in mlp().named_parameters()}
    weights = {name for name, p in mlp().named_parameters() if p.numel() >= 100}
    assert weights < everything
    for cap in (25, 2e-3):  # one bucket with all, and several
        found = lossy(lambda model: CompressionState(policy, model=model), cap)
        assert found == [{"0.weight"}] * 3 + [{"0.weight", "2.weight"}], found
        found = lossy(lambda model: CompressionState(half, dense_below=100, warmup_steps=2), cap)
        assert found == [set(), set(), weights, weights], found


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 0.5 - 1j, 0.3j], dtype=torch.complex128))

    def forward(self, x):
        return (x * self.phase).sum(1).abs()


@check(2)
def complex_and_sparse_gradients_are_averaged(run):
    x = torch.arange(24.0).view(8, 3) / 7 + 1
    alone, parallel, sharded = Waves(), DistributedDataParallel(Waves()), Waves()
    fully_shard(sharded)
    alone(x).mean().backward()
    for model in (parallel, sharded):
        model(*mine(run, x)).mean().backward()
    same_bits(torch.view_as_real(parallel.module.phase.grad))
    torch.testing.assert_close(parallel.module.phase.grad, alone.phase.grad)
    torch.testing.assert_close(sharded.phase.grad.full_tensor(), alone.phase.grad)
    words = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    words(torch.tensor([run.rank, 1])).sum().backward()
    found = words.module.weight.grad.to_dense()
    assert found.tolist() == [[0.5, 0.5], [1.5, 1.5], [0, 0], [0, 0], [0, 0]]


@check(2)
def ranks_whose_compression_hooks_differ_are_told(run):
    for differs in (
        lambda: CompressionState(RandomK(0.5, "k", seed=run.rank)),
        lambda: CompressionState(Quantize(8), error_feedback=bool(run.rank)),
        lambda: CompressionState(Quantize(8), dense_below=run.rank),
        lambda: CompressionState(lambda n, p: Quantize(4 * (1 + run.rank)), model=mlp()),
    ):
        try:
            differs().agree(torch.device("cpu"))
        except Desync as error:
            assert re.search("rank 0 has '.*' .* and rank 1 has '", str(error)), error
        else:
            raise AssertionError("nothing was raised")
    CompressionState(Quantize(8)).agree(torch.device("cpu"))


@check(2)
def the_compression_hook_names_gradients_that_are_not_finite(run):
    for strategy in (BF16(), RandomK(0.5), TopK(0.3, chunk=64), PowerSGD(2, start_step=0)):
        parallel = DistributedDataParallel(mlp())
        state = CompressionState(strategy, model=parallel)
        parallel.register_comm_hook(state, compression_hook)
        x, y = mine(run, *batches(1)[0])
        handle = parallel.module[2].weight.register_hook(lambda gradient: gradient * torch.inf)
        backward(parallel, x, y)
        assert state.num_nonfinite == {"2.weight": mlp()[2].weight.numel()}, strategy
        handle.remove()
        parallel.zero_grad()
        backward(parallel, x, y)
        assert all(torch.isfinite(each.grad).all() for each in parallel.parameters())


@check(2)
def the_compression_hook_takes_all_floats_and_says_what_it_can_not_do(run):
    def reason(make):
        try:
            make()
        except (TypeError, ValueError) as error:
            return str(error)
        raise AssertionError("nothing was raised")

    assert "it must be one such as" in reason(lambda: CompressionState("int8"))
    gloo = dist.new_group(backend="gloo")
    assert "init_process_group('potluck')" in reason(lambda: own_group(gloo, BF16()))
    assert "pass model=" in reason(lambda: CompressionState(lambda name, p: BF16()))
    waves = nn.Module()
    waves.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    waves.register_parameter("gain", nn.Parameter(torch.ones(3)))
    words = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    text = "phase is torch.complex64, and only real gradients can be compressed"
    assert text in reason(lambda: CompressionState(TopK(0.5), model=waves))
    CompressionState(lambda n, p: None if n == "phase" else TopK(0.5), model=waves)
    assert "0.weight gets sparse gradients" in reason(
        lambda: CompressionState(TopK(0.5), model=words)
    )
    unnamed = CompressionState(TopK(0.5))  # without a model, in the first backward on all ranks
    parameters = [p for p in waves.parameters() if run.rank or not p.is_complex()]
    try:
        unnamed.agree(torch.device("cpu"), parameters)
    except TypeError as error:
        assert run.rank == 1
        assert "parameter 0 is torch.complex64" in str(error)
    except Desync as error:
        assert run.rank == 0
        assert "rank 1 refused the compression of gradients: TypeError" in str(error)
    else:
        raise AssertionError("nothing was raised")
    chosen = reason(lambda: CompressionState(lambda name, p: 8, model=mlp()))
    assert "compression chose 8 for 0.weight" in chosen
    assert "dense_below is -1" in reason(lambda: CompressionState(BF16(), dense_below=-1))
    assert "warmup_steps must be an int" in reason(
        lambda: CompressionState(BF16(), warmup_steps=1.0)
    )
    doubles = DistributedDataParallel(mlp())
    doubles.register_comm_hook(CompressionState(BF16()), compression_hook)
    backward(doubles, *mine(run, *batches(1)[0]))
    model = mlp()
    backward(model, *batches(1)[0])
    for parameter, wanted in zip(doubles.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=0.02, atol=1e-3)
        same_bits(parameter.grad)
