"""The mean of finite values is finite, whatever the algorithm, links, engine and dtype; ordinary
values have the bits of the sum, divided."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck._core import native
from potluck._core.context import DistributedContext
from potluck._core.engine.arrays import reduction
from potluck._core.wire.dtypes import code_of
from support.process_groups import process_group
from support.worlds import NATIVE_KINDS, open_world

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BF16, np.dtype(np.float32), np.dtype(np.float64)]
KINDS = ("inproc", "shm", *(kind for kind in NATIVE_KINDS if kind != "native+shm"))
ALGORITHMS = ("ring", "tree", "direct", "centralized", "doubling", "hierarchical")
SIZES = (2, 3, 5)


def largest(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).max)


def extremes(dtype: np.dtype[Any], world_size: int, seed: int) -> Array:
    """A row for each rank: near the largest number, of either sign, tiny and ordinary ones."""
    random = np.random.default_rng(seed)
    top, tiny = largest(dtype), float(ml_dtypes.finfo(dtype).smallest_subnormal)
    rows = random.choice([top, 0.99 * top, 0.6 * top, 1.0, 3e-3, tiny, 0.0], (world_size, 97))
    signs = np.where(np.arange(97) % 3, 1.0, random.choice([-1.0, 1.0], (world_size, 97)))
    rows[:, :3] = top
    return (rows * signs).astype(dtype)


def exact_mean(rows: Array) -> NDArray[np.longdouble]:
    return np.asarray(rows, np.longdouble).sum(axis=0) / len(rows)


def means(ctx: DistributedContext, rows: Array, algorithm: str | None) -> list[Array]:
    """The mean by each operation that has one; what must stay unchanged is checked."""
    mine = rows[ctx.rank]
    found = [ctx.all_reduce(mine.copy(), "mean", algorithm=algorithm)]
    if algorithm not in ("doubling", "hierarchical"):
        root = ctx.world_size - 1
        kept = mine.copy()
        reduced = ctx.reduce(kept, root, "mean", algorithm=algorithm)
        if ctx.rank != root:
            assert kept.tobytes() == mine.tobytes(), "only the root's array changes"
        found.append(ctx.broadcast(reduced.copy(), root))
    if algorithm in (None, "ring", "direct"):
        parts = np.stack([mine] * ctx.world_size)
        part = ctx.reduce_scatter(
            parts, "mean", algorithm=algorithm if algorithm != "tree" else None
        )
        assert parts.tobytes() == np.stack([mine] * ctx.world_size).tobytes()
        found.append(part)
    return found


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_algorithm_and_dtype(kind: str, world_size: int) -> None:
    cases = [(dtype, algorithm) for dtype in DTYPES for algorithm in (None, *ALGORITHMS)]
    given = [extremes(dtype, world_size, seed) for seed, (dtype, _) in enumerate(cases)]

    def rank(ctx: DistributedContext) -> list[list[Array]]:
        return [means(ctx, r, algorithm) for r, (_, algorithm) in zip(given, cases, strict=True)]

    with open_world(kind, world_size) as world:
        by_rank = world.run(rank)
    for rows, case, *results in zip(given, cases, *by_rank, strict=True):
        exact = exact_mean(rows)
        spread = np.abs(np.asarray(rows, np.longdouble)).sum(axis=0) / world_size
        unit = float(ml_dtypes.finfo(rows.dtype).eps)
        tiny = float(ml_dtypes.finfo(rows.dtype).smallest_subnormal)
        for place, found in enumerate(zip(*results, strict=True)):
            for each in found:
                # A ring adds the parts of a reduce_scatter in another order for each rank.
                assert each.tobytes() == found[0].tobytes() or place == 2
                assert np.isfinite(each.astype(np.float64)).all(), (case, place)
                error = np.abs(np.asarray(each, np.longdouble) - exact)
                assert (error <= world_size * (unit * spread + 4 * tiny)).all(), (case, place)


@pytest.mark.skipif("native" not in KINDS, reason="needs the native loop")
@pytest.mark.parametrize("world_size", SIZES)
def test_the_loops_in_python_and_cpp_give_the_same_bits(world_size: int) -> None:
    cases = [(dtype, algorithm) for dtype in DTYPES for algorithm in ALGORITHMS]
    given = [extremes(dtype, world_size, seed) for seed, (dtype, _) in enumerate(cases)]

    def rank(ctx: DistributedContext) -> list[list[Array]]:
        return [means(ctx, r, algorithm) for r, (_, algorithm) in zip(given, cases, strict=True)]

    found = []
    for kind in ("tls", "native", "mixed"):
        with open_world(kind, world_size) as world:
            found.append(world.run(rank))
    for others in found[1:]:
        for first, other in zip(found[0], others, strict=True):
            for case, mine, theirs in zip(cases, first, other, strict=True):
                assert [x.tobytes() for x in mine] == [x.tobytes() for x in theirs], case


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_of_ordinary_values_the_bits_are_those_of_the_sum_divided(
    kind: str, world_size: int
) -> None:
    random = np.random.default_rng(world_size)
    factors = 10.0 ** random.uniform(-20, 20, 3000)
    rows = random.normal(size=(world_size, 3000)) * factors

    def rank(ctx: DistributedContext) -> None:
        for dtype in (BF16, np.dtype(np.float32), np.dtype(np.float64)):
            mine = rows[ctx.rank].astype(dtype)
            for algorithm in (None, *ALGORITHMS):
                total = ctx.all_reduce(mine.copy(), "sum", algorithm=algorithm)
                mean = ctx.all_reduce(mine.copy(), "mean", algorithm=algorithm)
                expected = (total / dtype.type(world_size)).astype(dtype)
                assert mean.tobytes() == expected.tobytes(), (dtype, algorithm)

    with open_world(kind, world_size) as world:
        world.run(rank)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_float16_is_rounded_once_and_keeps_tiny_values(kind: str, world_size: int) -> None:
    rows = np.random.default_rng(world_size).normal(size=(world_size, 999)) * 1e-5
    halves = rows.astype(np.float16)
    total = halves.astype(np.float32).sum(axis=0)
    if kind == "shm":  # the sum is rounded, and then its quotient
        expected = total.astype(np.float16) / np.float16(world_size)
    else:
        expected = (total / np.float32(world_size)).astype(np.float16)

    def rank(ctx: DistributedContext) -> None:
        for algorithm in (None, *ALGORITHMS) if kind != "shm" else (None,):
            found = ctx.all_reduce(halves[ctx.rank].copy(), "mean", algorithm=algorithm)
            steps = found.view(np.int16).astype(int) - expected.view(np.int16)
            # Sums of float32 in another order may be on the other side of a tie.
            assert np.abs(steps).max() <= (1 if world_size > 2 else 0)
            assert np.count_nonzero(steps) <= 3

    with open_world(kind, world_size) as world:
        world.run(rank)


@pytest.mark.parametrize("kind", KINDS)
def test_infinities_and_nans_stay_visible(kind: str) -> None:
    def rank(ctx: DistributedContext) -> None:
        for dtype in DTYPES:
            rows = np.ones((3, 4), dtype)
            rows[1] = [np.inf, -np.inf, np.nan, largest(dtype)]
            for algorithm in (None, "ring", "direct"):
                found = ctx.all_reduce(rows[ctx.rank].copy(), "mean", algorithm=algorithm)
                assert found[:2].astype(float).tolist() == [np.inf, -np.inf]
                assert np.isnan(found[2].astype(float))
                assert np.isfinite(found[3].astype(float))

    with open_world(kind, 3) as world:
        world.run(rank)


LINKS = [kind for kind in ("inproc", "native", "mixed") if kind in KINDS]


@pytest.mark.parametrize("algorithm", ["direct", "hierarchical"])
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", LINKS)
def test_coded_means_are_finite(kind: str, world_size: int, algorithm: str) -> None:
    """fp16 holds 65504, the others float32's range; a value is encoded twice. Between nodes fp16
    encodes their sums."""

    def rank(ctx: DistributedContext) -> list[bytes]:
        found = []
        for codec, top, share in (
            ("fp16", 60000.0 if algorithm == "direct" else 12000.0, 2.0**-9),
            ("bf16", 3e38, 2.0**-6),
            ("int8", 3e38, 0.02),
            ("int4", 3e38, 0.2),
        ):
            array = np.full(600, top, np.float32)
            array[::2] = -top
            mean = ctx.all_reduce(array, "mean", codec=codec, algorithm=algorithm)
            assert np.isfinite(mean).all(), codec
            assert (np.abs(np.abs(mean) / np.float32(top) - 1) <= share).all(), codec
            found.append(mean.tobytes())
        parts = np.full((ctx.world_size, 300), 3e38, np.float32)
        assert np.isfinite(ctx.reduce_scatter(parts, "mean", codec="int8")).all()
        return found

    with open_world(kind, world_size) as world:
        results = world.run(rank)
    assert all(each == results[0] for each in results)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", LINKS)
def test_the_residual_of_a_coded_mean_is_in_the_units_of_the_array(
    kind: str, world_size: int
) -> None:
    """All means together, times the ranks, and what the residuals still owe, are all inputs."""
    rounds = 8

    def rank(ctx: DistributedContext) -> list[Array]:
        random = np.random.default_rng(ctx.rank)
        results = []
        for codec in ("fp16", "bf16", "int8", "int2"):
            residual, given, taken = np.zeros(700, np.float32), np.zeros(700), np.zeros(700)
            for _ in range(rounds):
                array = random.normal(size=700).astype(np.float32)
                given += array
                mean = ctx.all_reduce(array, "mean", codec=codec, residual=residual)
                taken += mean.astype(np.float64) * ctx.world_size
            assert np.abs(residual).max() > 1e-5, "something was lost, and is kept"
            results.append(given - residual - taken / ctx.world_size)
        return results

    with open_world(kind, world_size) as world:
        by_rank = world.run(rank)
    for left in zip(*by_rank, strict=True):
        np.testing.assert_allclose(sum(left), 0, atol=1e-4)


def test_torchs_average_too() -> None:
    def rank(ctx: DistributedContext) -> None:
        with process_group(ctx) as group:
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                top = torch.finfo(dtype).max
                tensor = torch.full((5, 3), top, dtype=dtype).t()  # not contiguous
                group.allreduce([tensor], dist.ReduceOp.AVG).wait()
                assert tensor.isfinite().all()
                assert (tensor >= 0.99 * top).all()

    for kind in ("shm", *(k for k in KINDS if k == "native")):
        with open_world(kind, 3) as world:
            world.run(rank)


@pytest.mark.skipif(not native.available, reason="needs the native core")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 600),
    st.sampled_from([0.25, 0.3125, 0.375, 0.5, 2.0, 3.0, 8.0]),
    st.integers(0, 2**32 - 1),
)
def test_the_twins_divide_alike_and_keep_what_is_finite(
    dtype: np.dtype[Any], count: int, divisor: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    array = random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    array[: count // 2] = (random.uniform(-1, 1, count // 2) * largest(dtype)).astype(dtype)
    with np.errstate(all="ignore"):
        twin, before = array.copy(), array.astype(np.float64)
        reduction.divide(twin, divisor)
    native.core.divide(code_of(dtype), array.view(np.uint8), divisor)
    bits = f"u{dtype.itemsize}"
    same = array.view(bits) == twin.view(bits)
    assert (same | np.isnan(before)).all()
    if divisor < 1:
        assert np.isfinite(array[np.isfinite(before)].astype(np.float64)).all()


def test_a_scale_is_a_power_of_two_with_room_for_all() -> None:
    for world in (2, 3, 4, 5, 7, 8, 9, 64, 1000):
        scale = reduction.scale_of(np.dtype(np.float32), world)
        assert np.frexp(scale)[0] == 0.5
        assert 2 * world <= scale < 4 * world
    assert reduction.scale_of(np.dtype(np.float32), 1) == 1
    assert reduction.scale_of(np.dtype(np.complex64), 4) == 8
