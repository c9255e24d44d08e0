"""All ranks end with the bits of the golden file, by method, dtype, world and route.

A redraw of the code must change none of them. ``python tests/world/test_compressed_bits.py`` writes
the file anew: only where another result is intended. PowerSGD multiplies by a matrix library, whose
last bits differ between processors: its sums are compared with those made by hand in the same run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from potluck import BF16, FP16, GradientCompressor, PowerSGD, Quantize, RandomK, TopK
from potluck._core.context import DistributedContext
from potluck.compressors.powersgd import LowRankSum
from potluck.testing.world import run_world
from potluck.torch import DDP, CompressionState, DiLoCo, compression_hook
from potluck.torch.outer import OuterStrategy
from support.process_groups import process_group

GOLDEN = Path(__file__).with_suffix(".json")
METHODS = {
    "TopK": TopK(0.1, chunk=64),
    "TopK of 4 bits": TopK(0.05, None, bits=4),
    "RandomK": RandomK(0.3),
    "RandomK of parts": RandomK(0.3, "k"),
    "Quantize(8)": Quantize(8),
    "Quantize(4)": Quantize(4),
    "FP16": FP16(),
    "BF16": BF16(),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
SHAPES = ((40, 12), (40,), (20, 40), (20,), (700,))
BUCKETS = ((4, 3), (2,), (1, 0))
"""The parameters of each bucket of torch's DDP, in the order in which it reduces them."""
STEPS = 4


def numbers(count: int, *seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Numbers of many magnitudes, with 12 significant bits, the same on all machines."""
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    whole = (raw >> np.uint64(52)).astype(np.float32) - 2048
    return np.ldexp(whole, -(raw & np.uint64(15)).astype(np.int32)).astype(np.float32)


def gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    found = [numbers(size, rank, step, place) / 64 for place, size in enumerate(sizes)]
    return [
        torch.from_numpy(each).reshape(shape).to(dtype)
        for each, shape in zip(found, SHAPES, strict=True)
    ]


class Given(nn.Module):
    """Parameters whose gradients are given: no arithmetic of a machine's libraries is in them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(s, dtype=dtype)) for s in SHAPES)

    def forward(self, given: list[Tensor]) -> Tensor:
        parts = [(w * g).sum().float() for w, g in zip(self.weights, given, strict=True)]
        return torch.stack(parts).sum()


def by_ddp(ctx: DistributedContext, method: Any, dtype: torch.dtype) -> Iterator[Any]:
    model = DDP(*(Given(dtype), ctx), compression=method, dense_below=50, bucket_size_mb=2e-3)
    for step in range(STEPS):
        model.zero_grad()
        model.loss_scale = 4.0 if step == 2 else 1.0
        model(gradients(ctx.rank, step, dtype)).backward()
        yield [each.grad for each in model.parameters()]
    yield model.compression.capture()


def by_hook(ctx: DistributedContext, method: Any, dtype: torch.dtype) -> Iterator[Any]:
    model = Given(dtype)
    parameters = list(model.parameters())
    with process_group(ctx) as group:
        state = CompressionState(method, dense_below=50, process_group=group, model=model)
        for step in range(STEPS):
            given = gradients(ctx.rank, step, dtype)
            futures = [
                compression_hook(state, bucket_of(parameters, given, number))
                for number in range(len(BUCKETS))
            ]
            yield [each.wait() for each in futures]
        yield state.state_dict(model)["residuals"]


def bucket_of(parameters: list[nn.Parameter], given: list[Tensor], number: int) -> Any:
    """A bucket as torch's DDP makes it: views of one flat buffer."""
    places = BUCKETS[number]
    flat = torch.cat([given[place].reshape(-1) for place in places])
    parts = torch.split(flat, [given[place].numel() for place in places])
    return SimpleNamespace(
        index=lambda: number,
        buffer=lambda: flat,
        gradients=lambda: [p.view(SHAPES[i]) for p, i in zip(parts, places, strict=True)],
        parameters=lambda: [parameters[place] for place in places],
        is_last=lambda: number == len(BUCKETS) - 1,
    )


def in_rounds(ctx: DistributedContext, method: Any, dtype: torch.dtype) -> Iterator[Any]:
    model = Given(dtype)
    outer = OuterStrategy(DiLoCo(every=2, fragments=2, compression=method), model, [], {})
    for number in range(STEPS):
        outer.begin(number)
        with torch.no_grad():
            for weight, each in zip(
                model.parameters(), gradients(ctx.rank, number, dtype), strict=True
            ):
                weight.sub_(each)
        outer.close(number, whole=False)
        outer.start(ctx, number, 1 / ctx.world_size, 60)()
        outer.apply(number, 1.0, delayed=False)
    yield outer.global_state(model.state_dict())
    yield outer.capture_residuals()


def without_a_network(ctx: DistributedContext, method: Any, dtype: torch.dtype) -> Iterator[Any]:
    compressor = GradientCompressor(method)
    for step in range(STEPS):
        for place, each in enumerate(gradients(ctx.rank, step, dtype)):
            array = each.float().numpy() if dtype == torch.bfloat16 else each.numpy()
            small = compressor.compress(array, str(place))
            yield [torch.from_numpy(small.payload), torch.from_numpy(small.decompress())]
    yield compressor.state_dict()["residuals"]


Route = Callable[[DistributedContext, Any, torch.dtype], Iterator[Any]]
ROUTES: dict[str, Route] = {
    "DDP": by_ddp,
    "hook": by_hook,
    "rounds": in_rounds,
    "GradientCompressor": without_a_network,
}


def digest(values: Any) -> str:
    """A hash of the bits of tensors and arrays, those of a dict by name."""
    hashed = blake2b(digest_size=8)
    items = sorted(values.items()) if isinstance(values, dict) else enumerate(values)
    for name, value in items:
        tensor = torch.as_tensor(value).detach().contiguous().reshape(-1)
        hashed.update(str(name).encode() + tensor.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def digests(route: Route, method: Any, dtype: torch.dtype, world_size: int) -> list[list[str]]:
    """By rank, the digests of what ``route`` yields."""
    return run_world(world_size, lambda ctx: [digest(each) for each in route(ctx, method, dtype)])


def found(name: str, world_size: int) -> dict[str, str]:
    """By method and dtype: one hash of all that all ranks have by this route."""
    hashes = {}
    for method_name, method in METHODS.items():
        for dtype_name, dtype in DTYPES.items():
            ranks = digests(ROUTES[name], method, dtype, world_size)
            if name != "GradientCompressor":  # which sums nothing
                assert all(rank[:-1] == ranks[0][:-1] for rank in ranks), "ranks' bits differ"
            key = f"{method_name}, {dtype_name}"
            hashes[key] = blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    return hashes


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("route", ROUTES)
def test_all_ranks_end_with_the_same_bits_as_ever(route: str, world_size: int) -> None:
    assert found(route, world_size) == json.loads(GOLDEN.read_text())[f"{route}, {world_size}"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_powersgd_ends_with_the_bits_of_sums_made_by_hand(dtype: torch.dtype) -> None:
    method = PowerSGD(2, start_step=1)
    ranks = run_world(2, lambda ctx: list(by_ddp(ctx, method, dtype)))
    wide = np.float64 if dtype == torch.float64 else np.float32
    matrices = {f"weights.{place}": place for place in (0, 2)}
    owed = [{n: np.zeros(SHAPES[place], wide) for n, place in matrices.items()} for _ in ranks]
    qs: dict[str, Any] = {}
    for step in range(1, STEPS):
        sums = [LowRankSum(method, qs, step) for _ in ranks]
        for rank, one in enumerate(sums):
            given = gradients(rank, step, dtype)
            for name, residual in owed[rank].items():
                residual *= {2: 4, 3: 0.25}.get(step, 1)  # of the loss scales
                residual += (given[matrices[name]] * 0.5).double().numpy().astype(wide)
                one.add(name, residual)
        for part in (LowRankSum.begin, LowRankSum.turn):
            arrays = [part(one) for one in sums]
            total = arrays[0] + arrays[1]
            for each in arrays:
                each[:] = total
        for one in sums:
            one.lose()
        for name, place in matrices.items():
            target = np.empty(SHAPES[place], wide)
            sums[0].decode(name, target)
            wanted = torch.from_numpy(target).to(dtype)
            assert all(torch.equal(rank[step][place], wanted) for rank in ranks), (step, name)
        qs = sums[0].qs()
    for mine, residuals in zip(ranks, owed, strict=True):
        for name, residual in residuals.items():
            assert np.array_equal(mine[-1][name], residual.reshape(-1))


if __name__ == "__main__":
    if sys.argv[1:] == ["powersgd"]:
        METHODS = {"PowerSGD": PowerSGD(2, start_step=1)}
        del ROUTES["rounds"]
    made = {f"{route}, {size}": found(route, size) for route in ROUTES for size in (2, 3)}
    text = json.dumps(made, indent=1) + "\n"
    if sys.argv[1:]:
        sys.stdout.write(text)
    else:
        GOLDEN.write_text(text)
