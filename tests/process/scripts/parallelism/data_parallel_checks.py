"""torch's own DistributedDataParallel, each of its ways, and communication hooks on it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from harness import adam, alone, batches, check, mine, mlp, moved, same_bits, same_parameters
from harness import together as train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SMALL_BUCKETS_MB = 0.002


class TwoHeads(nn.Module):
    """A trunk and two heads, of which each forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp()
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x))


@check(4)
def ddp(run):
    model = mlp()
    parallel = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS_MB)
    train(run, parallel)
    moved(model, parallel.module)
    same_parameters(parallel.module, alone(model))


@check(2)
def ddp_starts_from_the_parameters_and_buffers_of_rank_0(run):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor += run.rank
    parallel = DistributedDataParallel(model)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    for tensor, _ in pairs:
        same_bits(tensor)
    train(run, parallel)
    for x, _ in batches():  # the buffers of rank 0 are everybody's before each forward pass
        parallel(mine(run, x)[0] + run.rank)
        parallel.eval()
        parallel(x)
    mean = model[1].running_mean.clone()
    parallel.train()
    parallel(batches()[0][0])
    same_bits(mean)


@check(4)
def ddp_with_unused_parameters(run):
    """Ranks use different heads; on one the parameters of a head are never seen."""
    model = TwoHeads()
    parallel = DistributedDataParallel(
        copy.deepcopy(model), find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS_MB
    )
    optimizer, reference = adam(parallel), copy.deepcopy(model)
    reference_optimizer = adam(reference)
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        part, target = mine(run, x, y)
        F.cross_entropy(parallel(part, (run.rank + number) % 2), target).backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        parts = zip(x.chunk(run.world_size), y.chunk(run.world_size), strict=True)
        for rank, (part, target) in enumerate(parts):
            loss = F.cross_entropy(reference(part, (rank + number) % 2), target)
            (loss / run.world_size).backward()
        reference_optimizer.step()
    same_parameters(parallel.module, reference)


class Recomputed(nn.Module):
    """Activation checkpointing around layers that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return self.last(x)


@check(2)
def ddp_with_a_static_graph(run):
    torch.manual_seed(2)
    model = Recomputed()
    parallel = DistributedDataParallel(copy.deepcopy(model), static_graph=True)
    train(run, parallel)
    same_parameters(parallel.module, alone(model))


@check(4)
def ddp_with_gradients_as_views_of_buckets(run):
    model = mlp()
    parallel = DistributedDataParallel(
        copy.deepcopy(model), gradient_as_bucket_view=True, bucket_cap_mb=SMALL_BUCKETS_MB
    )
    train(run, parallel)
    # The gradients of a bucket are parts of one storage.
    storages = {p.grad.untyped_storage().data_ptr() for p in parallel.parameters()}
    assert len(storages) < len(list(parallel.parameters()))
    same_parameters(parallel.module, alone(model))


@check(4)
def ddp_join_with_uneven_inputs(run):
    """Rank r has r + 1 batches; who has no more answers the others with zeros."""
    model = mlp()
    parallel = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=SMALL_BUCKETS_MB)
    optimizer = adam(parallel)
    data = batches(run.world_size)
    with parallel.join():
        for x, y in data[: run.rank + 1]:
            optimizer.zero_grad()
            F.cross_entropy(parallel(x + run.rank), y).backward()
            optimizer.step()
    reference = copy.deepcopy(model)
    reference_optimizer = adam(reference)
    for number, (x, y) in enumerate(data):
        reference_optimizer.zero_grad()
        for rank in range(number, run.world_size):
            (F.cross_entropy(reference(x + rank), y) / run.world_size).backward()
        reference_optimizer.step()
    # After the join all have the parameters of a rank that trained to the end.
    same_parameters(parallel.module, reference)


@check(2)
def ddp_accumulates_without_synchronisation(run):
    model = mlp()
    parallel = DistributedDataParallel(copy.deepcopy(model))
    optimizer = adam(parallel)
    for x, y in batches(2):
        optimizer.zero_grad()
        (a, b), (c, d) = (tensor.chunk(2) for tensor in mine(run, x, y))
        with parallel.no_sync():
            (F.cross_entropy(parallel(a), c) / 2).backward()
        (F.cross_entropy(parallel(b), d) / 2).backward()
        optimizer.step()
    same_parameters(parallel.module, alone(model, batches(2)))


def hooked(run, hook, state=None, bucket_cap_mb=SMALL_BUCKETS_MB):
    torch.set_default_dtype(torch.float32)
    model = mlp()
    parallel = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=bucket_cap_mb)
    parallel.register_comm_hook(state, hook)
    train(run, parallel, torch.optim.SGD(parallel.parameters(), lr=0.1))
    for parameter in parallel.parameters():
        same_bits(parameter)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
    moved(model, parallel.module)
    return parallel.module, reference


@check(4)
def ddp_with_torchs_all_reduce_hook(run):
    same_parameters(*hooked(run, default_hooks.allreduce_hook), tolerance=1e-6)


@check(4)
def ddp_with_bfloat16_on_the_wire(run):
    """torch lets its bf16 hook, known by its name, only through to NCCL; it needs no more."""

    def hook(state, bucket):
        return default_hooks.bf16_compress_hook(state, bucket)

    same_parameters(*hooked(run, hook), tolerance=2e-3)


@check(2)
def ddp_with_float16_on_the_wire(run):
    same_parameters(*hooked(run, default_hooks.fp16_compress_hook), tolerance=3e-4)


@check(2)
def ddp_with_powersgd(run):
    """Rank 24 is that of the whole matrices: nothing is lost but rounding.

    One bucket, as on Gloo: the hook calls collectives when others have ended, and with several
    buckets each rank does so in its own order.
    """
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=24, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    same_parameters(
        *hooked(run, powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=25), tolerance=1e-5
    )


@check(2)
def ddp_with_a_hook_of_ones_own(run):
    """A hook that waits for a second collective when the first has come.

    One bucket: with several, ranks would call the second collectives in different orders.
    """

    def clipped(state, bucket):
        summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def settle(future):
            mean = future.value()[0] / run.world_size
            counted = torch.ones(1)
            dist.all_reduce(counted)
            assert counted.item() == run.world_size
            return mean

        return summed.then(settle)

    same_parameters(*hooked(run, clipped, bucket_cap_mb=25), tolerance=1e-6)


@check(2)
def an_exception_in_a_hook_is_raised_by_backward(run):
    def broken(state, bucket):
        raise ValueError("the hook's own mistake")

    parallel = DistributedDataParallel(mlp())
    parallel.register_comm_hook(None, broken)
    x, y = mine(run, *batches()[0])
    try:
        F.cross_entropy(parallel(x), y).backward()
    except (RuntimeError, ValueError) as error:
        assert "the hook's own mistake" in str(error)
    else:
        raise AssertionError("backward passed over the hook's exception")
