"""Tensors of a GPU in a context and in ``DDP``: structures, graphs, copies, means and codecs.

Ranks are threads, and only rank 0 runs backward on the GPU. What the values have to be is what the
same call gives for tensors of the host.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from potluck import DistributedContext, GradientCompressor, Quantize, TopK
from potluck.errors import Desync
from potluck.testing.world import run_world
from potluck.torch import DDP, CompressionState, clip_grad_norm_
from support.devices import DEVICE, DEVICES, needs_device
from support.process_groups import process_group
from support.worlds import NATIVE_KINDS, open_world

pytestmark = needs_device

KINDS = ("inproc", "shm", *(kind for kind in NATIVE_KINDS if kind == "native"))
HALVES = (torch.float16, torch.bfloat16)
CODECS = ("fp16", "bf16", "int8", "int4", "int2")


def normed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


NORMED = normed()


def on(rank: int) -> nn.Module:
    return copy.deepcopy(NORMED).to(DEVICES[rank])


def data(seed: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- models


def test_ranks_on_unlike_devices_have_one_structure_and_another_order_is_refused() -> None:
    def rank(ctx: DistributedContext) -> str:
        DDP(on(ctx.rank), ctx)
        names = "ab" if ctx.rank == 0 else "ba"
        layers = {name: nn.Linear(4, 4).to(DEVICES[ctx.rank]) for name in names}
        before = copy.deepcopy(layers)
        with pytest.raises(Desync) as caught:
            DDP(nn.ModuleDict(layers), ctx)
        for name in names:
            assert torch.equal(layers[name].weight, before[name].weight), "nothing is overwritten"
        assert ctx.all_reduce(torch.ones(1, device=DEVICES[ctx.rank])).item() == 2
        return str(caught.value)

    with open_world("shm", 2) as world:
        one, other = world.run(rank)
    assert one == other
    assert re.search(r"rank 0 .* has 'a.weight' .*rank 1 .* has 'b.weight'", one), one


def test_two_forwards_before_a_backward_have_the_gradient_of_both() -> None:
    """As GANs and siamese nets have; each forward broadcasts the buffers of rank 0."""

    def losses(model: nn.Module, rank: int, device: str) -> Tensor:
        first, second = (model(data(seed).to(device)) for seed in (rank, 10 + rank))
        return first.square().mean() - second.mean()

    def rank(ctx: DistributedContext) -> list[Tensor]:
        device = DEVICES[ctx.rank]
        model = DDP(on(ctx.rank), ctx)
        for _ in range(3):
            model.zero_grad()
            losses(model, ctx.rank, device).backward()
        clip_grad_norm_(model, 1e9)
        assert all(each.grad.device.type == device for each in model.parameters())
        return [each.grad.cpu() for each in model.parameters()]

    def alone(rank: int) -> list[Tensor]:
        model = copy.deepcopy(NORMED)
        losses(model, rank, "cpu").backward()
        return [each.grad for each in model.parameters()]

    found = run_world(3, rank)
    each = [alone(number) for number in range(3)]
    for grads in found:
        for mine, *parts in zip(grads, *each, strict=True):
            torch.testing.assert_close(mine, sum(parts) / 3, rtol=1e-4, atol=1e-5)


def pickled(each: Any) -> Any:
    return pickle.loads(pickle.dumps(each))  # noqa: S301 (its own bytes)


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_copy_of_the_wrapper_is_the_module_on_its_device(way: Callable[[Any], Any]) -> None:
    def rank(ctx: DistributedContext) -> None:
        device = DEVICES[ctx.rank]
        model = DDP(on(ctx.rank), ctx, compression=TopK(0.5))
        model(data(1).to(device)).square().mean().backward()
        copied = way(model)
        assert type(copied) is nn.Sequential
        assert {each.device.type for each in copied.parameters()} == {device}
        if ctx.rank == 0:  # alone: the others are not called
            copied(data(2).to(device)).sum().backward()
        model(data(3).to(device)).square().mean().backward()  # the wrapper works as before

    run_world(2, rank)


def test_weights_are_averaged_on_the_device() -> None:
    def rank(ctx: DistributedContext) -> None:
        device = DEVICES[ctx.rank]
        model = DDP(on(ctx.rank), ctx)
        average = AveragedModel(model)
        seen = []
        for seed in range(3):
            model(data(seed).to(device)).square().mean().backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1 * each.grad
                    each.grad = None
            average.update_parameters(model)
            seen.append(model.module[0].weight.detach().clone())
        assert type(average.module) is nn.Sequential
        assert average.module[0].weight.device.type == device
        torch.testing.assert_close(average.module[0].weight.detach(), sum(seen) / 3)

    run_world(2, rank)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_the_largest_numbers_is_finite(kind: str) -> None:
    def rank(ctx: DistributedContext) -> None:
        for dtype in (*HALVES, torch.float32, torch.float64):
            top = torch.finfo(dtype).max
            signs = torch.where(torch.arange(99) % 2 == 0, 1.0, -1.0)
            mine = (signs.double() * top).to(dtype).to(DEVICE).reshape(9, 11).t()
            assert not mine.is_contiguous()
            for algorithm in (None, "ring", "direct", "tree"):
                found = ctx.all_reduce(mine.clone(), "mean", algorithm=algorithm)
                assert found.device.type == DEVICE
                torch.testing.assert_close(found, mine, rtol=torch.finfo(dtype).eps * 3, atol=0)

    with open_world(kind, 3) as world:
        world.run(rank)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "inproc"])
def test_torchs_average_of_the_largest_numbers_is_finite(kind: str) -> None:
    def rank(ctx: DistributedContext) -> None:
        with process_group(ctx, has_devices=True) as group:
            for dtype in (*HALVES, torch.float32):
                top = torch.finfo(dtype).max
                for size in (15, 3_000_000):  # one piece, and several
                    tensor = torch.full((size,), top, dtype=dtype, device=DEVICE)
                    group.allreduce([tensor], dist.ReduceOp.AVG).wait()
                    assert (tensor >= 0.99 * top).all()
                    assert tensor.isfinite().all()

    with open_world(kind, 3) as world:
        world.run(rank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_codecs_give_the_bits_that_they_give_for_the_host(kind: str, dtype: torch.dtype) -> None:
    """In each operation that has one, with a residual; also where a codec takes another dtype."""
    world_size = 3

    def calls(ctx: DistributedContext, device: str) -> list[Tensor]:
        mine = torch.randn(3 * 700, generator=torch.Generator().manual_seed(ctx.rank))
        mine = mine.to(dtype).to(device)
        found = []
        for codec in CODECS if dtype is torch.float32 else ():
            for op in ("sum", "mean"):
                residual = torch.zeros(mine.shape)
                for _ in range(2):
                    found.append(ctx.all_reduce(mine.clone(), op, codec=codec, residual=residual))
                    assert found[-1].device.type == torch.device(device).type
                assert residual.count_nonzero() > 0
                found.append(residual)
                found.append(ctx.reduce_scatter(mine.reshape(3, 700), op, codec=codec))
            found.append(ctx.all_gather(mine, codec=codec))
        elsewhere = torch.zeros(2 * len(mine), device=device)[::2]
        with pytest.raises(ValueError, match=r"the residual .* contiguous, .* on the CPU"):
            ctx.all_reduce(mine.clone(), codec="int8", residual=elsewhere)
        found.append(ctx.all_reduce(mine.clone()))
        found.append(ctx.all_gather(mine))
        return [each.cpu() for each in found]

    with open_world(kind, world_size) as world:
        there, here = (world.run(lambda ctx, d=d: calls(ctx, d)) for d in (DEVICE, "cpu"))
    for mine, theirs in zip(there, here, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_a_compressor_of_arrays_says_what_to_pass_in_place_of_a_tensor() -> None:
    compressor = GradientCompressor(TopK(0.1))
    gradient = torch.randn(64, 8, device=DEVICE)
    with pytest.raises(TypeError, match=r"\.cpu\(\)\.numpy\(\)"):
        compressor.compress(gradient)
    kept = compressor.compress(gradient.cpu().numpy())
    assert np.isfinite(compressor.decompress(kept)).all()


# ---------------------------------------------------------------- what is refused


def test_sparse_and_complex_tensors_and_gradients_are_right_or_refused_by_name() -> None:
    sparse = torch.tensor([1.0, 0, 2, 0], device=DEVICE).to_sparse()
    waves = nn.Linear(2, 2, dtype=torch.complex64, device=DEVICE)
    words = nn.Embedding(3, 2, sparse=True, device=DEVICE)

    def rank(ctx: DistributedContext) -> None:
        with pytest.raises(TypeError, match=r"layout torch.sparse_coo .*to_dense"):
            ctx.all_reduce(sparse)
        each = torch.tensor([1 + 2j, 3 - 1j], device=DEVICE)
        total = ctx.all_reduce(each.clone())
        assert total.tolist() == [2 + 4j, 6 - 2j]
        assert ctx.all_gather(each.conj())[1].tolist() == [1 - 2j, 3 + 1j]
        assert ctx.all_gather(each.conj().imag)[0].tolist() == [-2.0, 1.0]
        with pytest.raises(TypeError, match=r"weight is torch.complex64; only floats"):
            DDP(copy.deepcopy(waves), ctx)
        with pytest.raises(TypeError, match=r"weight gets sparse gradients.*sparse=False"):
            DDP(copy.deepcopy(words), ctx)
        with process_group(ctx) as group:
            summed = sparse.clone()
            group.allreduce([summed]).wait()
            assert summed.to_dense().tolist() == [2.0, 0.0, 4.0, 0.0]
            assert summed.device.type == DEVICE
            with pytest.raises(TypeError, match="to_dense"):
                group.broadcast([sparse])

    with open_world("shm", 2) as world:
        world.run(rank)
    for model, text in ((waves, "complex"), (words, "sparse")):
        with pytest.raises(TypeError, match=text):
            CompressionState(Quantize(8), model=model)
