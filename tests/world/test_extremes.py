"""Sums and means of extreme values by every method, dtype and world size, within bounds of exact
ones: what is finite stays finite, and all ranks end with the same bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from potluck._core.codecs import NAMES, codec_of
from potluck._core.context import DistributedContext
from potluck._core.context.compressed import OverContext
from potluck.compressors import Compressor, RandomK, TopK
from support.worlds import NATIVE_KINDS, open_world

Array = NDArray[Any]
Exact = NDArray[np.longdouble]

DTYPES = [
    np.dtype(each)
    for each in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64)
]
KINDS = ["inproc", "shm", *(kind for kind in NATIVE_KINDS if kind in ("native", "mixed"))]
SIZES = (1, 2, 3, 8)
ALGORITHMS = (None, "ring", "tree", "direct", "centralized", "doubling", "hierarchical")
COUNT = 300
"""A block of integers and a part of one."""


class Limits(NamedTuple):
    """Of a real dtype."""

    largest: float
    unit: float
    tiny: float


def limits_of(dtype: np.dtype[Any]) -> Limits:
    info = ml_dtypes.finfo(np.zeros(0, dtype).real.dtype)
    return Limits(float(info.max), float(info.eps), float(info.smallest_subnormal))


def patterns(dtype: np.dtype[Any], world_size: int) -> dict[str, Array]:
    """By name: a row for each rank."""
    limits, shape = limits_of(dtype), (world_size, COUNT)
    normal = float(ml_dtypes.finfo(np.zeros(0, dtype).real.dtype).tiny)
    random = np.random.default_rng(world_size)
    exponents = random.uniform(np.log2(limits.tiny), np.log2(limits.largest), shape)
    signs = random.choice([-1.0, 1.0], shape)
    with np.errstate(under="ignore"):
        reals: dict[str, NDArray[Any]] = {
            "zero": np.zeros(shape),
            "subnormal": signs * limits.tiny * random.integers(1, 4, shape),
            "smallest normal": np.full(shape, normal),
            "largest": np.full(shape, limits.largest),
            "largest of each sign": signs * limits.largest,
            "mixed scales": signs * 2.0**exponents,
            "one large among small": np.where(
                np.arange(COUNT) == 7, limits.largest, signs * normal
            ),
            "all equal": np.full(shape, 1 / 3),
            "ordinary": random.normal(size=shape),
        }
        if dtype.kind == "c":
            return {name: (x + 1j * x[:, ::-1]).astype(dtype) for name, x in reals.items()}
        return {name: each.astype(dtype) for name, each in reals.items()}


def in_few(rows: dict[str, Array]) -> dict[str, Array]:
    """In a large world, where a call costs much, those with sums that may overflow in one array,
    and all others in another one: a call differs by nothing else that is in its array."""
    if len(rows["zero"]) < 8:
        return rows
    large = {"largest", "largest of each sign", "mixed scales", "one large among small"}
    groups = [[name for name in rows if (name in large) == is_large] for is_large in (False, True)]
    return {
        ", ".join(names): np.concatenate([rows[name] for name in names], axis=1) for names in groups
    }


def parts_of(array: Array) -> Exact:
    """Complex numbers as pairs."""
    real = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    return real.astype(np.longdouble)


def check_real(found: Array, rows: Array, op: str, case: object) -> None:
    """A mean is finite, and so is a sum unless the magnitudes together overflow. Each addition, and
    the division, is rounded once, relative to the magnitudes."""
    world_size = len(rows)
    limits, exact = limits_of(rows.dtype), parts_of(rows)
    total, spread = exact.sum(axis=0), np.abs(exact).sum(axis=0)
    if op == "mean":
        total, spread = total / world_size, spread / world_size
    within = np.full(total.shape, True) if op == "mean" else spread <= limits.largest
    result = parts_of(found)
    assert np.isfinite(result[within]).all(), case
    bound = world_size * (limits.unit * spread + 4 * limits.tiny)
    assert (np.abs(result - total) <= bound)[within].all(), case


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_means_by_every_algorithm(kind: str, world_size: int) -> None:
    given = [
        (dtype, name, rows)
        for dtype in DTYPES
        for name, rows in in_few(patterns(dtype, world_size)).items()
    ]

    def rank(ctx: DistributedContext) -> list[Array]:
        return [
            ctx.all_reduce(rows[ctx.rank].copy(), op, algorithm=algorithm)
            for _, _, rows in given
            for op in ("sum", "mean")
            for algorithm in ALGORITHMS
        ]

    with open_world(kind, world_size) as world, np.errstate(all="ignore"):
        by_rank = iter(zip(*world.run(rank), strict=True))
    for dtype, name, rows in given:
        for op in ("sum", "mean"):
            for algorithm in ALGORITHMS:
                first, *others = next(by_rank)
                case = (dtype, name, op, algorithm)
                assert all(each.tobytes() == first.tobytes() for each in others), case
                with np.errstate(all="ignore"):
                    check_real(first, rows, op, case)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shm"])
def test_sums_and_means_by_every_codec(kind: str, world_size: int) -> None:
    """A contribution is encoded once and the sum once; what is beyond the range is finite."""
    given = patterns(np.dtype(np.float32), world_size)
    cases = [(name, codec, op) for name in given for codec in NAMES for op in ("sum", "mean")]

    def rank(ctx: DistributedContext) -> list[tuple[Array, Array]]:
        found = []
        for name, codec, op in cases:
            residual = np.zeros(COUNT, np.float32)
            array = ctx.all_reduce(given[name][ctx.rank].copy(), op, codec=codec, residual=residual)
            assert np.isfinite(residual).all(), (name, codec, op)
            found.append(array)
        return found

    with open_world(kind, world_size) as world:
        by_rank = world.run(rank)
    for (name, codec_name, op), *results in zip(cases, *by_rank, strict=True):
        case, codec, rows = (name, codec_name, op), codec_of(codec_name), parts_of(given[name])
        assert len({each.tobytes() for each in results}) == 1, case
        assert np.isfinite(results[0]).all(), case
        magnitudes = np.abs(rows).sum(axis=0)
        largest = np.array([float(np.abs(row).max()) for row in rows])
        if world_size == 1 or largest.sum() >= codec.largest:
            continue
        total = rows.sum(axis=0)
        bound = sum(map(codec.error_bound, largest)) + codec.error_bound(float(largest.sum()))
        bound = bound + world_size * limits_of(np.dtype(np.float32)).unit * magnitudes
        if op == "mean":
            total, bound = total / world_size, bound / world_size + 2.0**-24 * (codec.code == 1)
        assert (np.abs(parts_of(results[0]) - total) <= bound + 2.0**-99).all(), case


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("strategy", [TopK(1.0), TopK(1.0, bits=8), RandomK(1.0)], ids=repr)
def test_sums_by_strategies_that_send_all(
    strategy: Compressor, world_size: int, dtype: type[np.floating[Any]]
) -> None:
    """float64 beyond float32's range becomes the largest float32."""
    given = patterns(np.dtype(dtype), world_size)

    def rank(ctx: DistributedContext) -> list[tuple[Array, Array]]:
        found = []
        for rows in given.values():
            array, residual = rows[ctx.rank].copy(), np.zeros(COUNT, dtype)
            strategy.exchange(OverContext(ctx), array, residual, 0).wait()
            assert np.isfinite(residual).all()
            found.append(array)
        return found

    with open_world("inproc", world_size) as world, np.errstate(all="ignore"):
        by_rank = world.run(rank)
    single = limits_of(np.dtype(np.float32))
    for (name, rows), *results in zip(given.items(), *by_rank, strict=True):
        assert len({each.tobytes() for each in results}) == 1, name
        exact = parts_of(rows)
        spread = np.abs(exact).sum(axis=0)
        if spread.max() > single.largest:
            if dtype == np.float64 and not isinstance(strategy, RandomK):
                assert np.isfinite(results[0]).all(), name
            continue
        share = 1 / 127 if getattr(strategy, "bits", None) else world_size * single.unit
        bound = share * np.maximum(spread, spread.max() if share > 1e-3 else 0) + 2.0**-99
        assert (np.abs(parts_of(results[0]) - exact.sum(axis=0)) <= bound).all(), name
