"""The native kernels against their twins in engine/arrays/reduction.py, bit by bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core import native
from potluck._core.engine.arrays import reduction
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import code_of
from support.arrays import DTYPES, Array, odd_array, same_bits

pytestmark = pytest.mark.usefixtures("kernel_set")

lengths = st.one_of(st.integers(0, 70), st.integers(0, 10_000))
offsets = st.integers(0, 70)
seeds = st.integers(0, 2**32 - 1)


def meaningful(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    try:
        reduction.check(op, dtype)
    except TypeError:
        return False
    return True


PAIRS = [(dtype, op) for dtype in DTYPES for op in ReduceOp if meaningful(dtype, op)]
EXACT = [(dtype, op) for dtype, op in PAIRS if not (dtype.kind == "c" and op is ReduceOp.PRODUCT)]


def native_combine(op: ReduceOp, mine: Array, theirs: Array) -> None:
    native.core.combine(code_of(mine.dtype), op, mine.view(np.uint8), theirs.view(np.uint8))


def numpy_combine_many(op: ReduceOp, target: Array, sources: list[Array]) -> None:
    """From left to right; sums and products of halves in float32, rounded once, at the end."""
    is_half = target.dtype in (np.float16, ml_dtypes.bfloat16)
    is_wide = is_half and op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT)
    total = sources[0].astype(np.float32 if is_wide else target.dtype)
    for source in sources[1:]:
        reduction.combine(op, total, source)
    with np.errstate(over="ignore", invalid="ignore"):
        target[:] = total


def native_combine_many(op: ReduceOp, target: Array, sources: list[Array]) -> None:
    native.core.combine_many(
        code_of(target.dtype),
        op,
        target.view(np.uint8),
        [source.view(np.uint8) for source in sources],
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(EXACT), lengths, offsets, offsets, seeds)
def test_combine_is_numpys(
    pair: tuple[np.dtype[Any], ReduceOp], count: int, here: int, there: int, seed: int
) -> None:
    dtype, op = pair
    mine = odd_array(dtype, count, offset=here, seed=seed)
    theirs = odd_array(dtype, count, offset=there, seed=seed + 1)
    expected = mine.copy()
    reduction.combine(op, expected, theirs.copy())
    native_combine(op, mine, theirs)
    assert same_bits(mine, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(EXACT), lengths, st.integers(1, 9), offsets, seeds, st.booleans())
def test_many_sources_are_combined_from_left_to_right(
    pair: tuple[np.dtype[Any], ReduceOp],
    count: int,
    num_sources: int,
    offset: int,
    seed: int,
    in_place: bool,
) -> None:
    dtype, op = pair
    sources = [
        odd_array(dtype, count, offset=offset * i % 71, seed=seed + i) for i in range(num_sources)
    ]
    expected = np.empty_like(sources[0])
    numpy_combine_many(op, expected, [source.copy() for source in sources])
    target = sources[0] if in_place else odd_array(dtype, count, offset=offset, seed=0)
    native_combine_many(op, target, sources)
    assert same_bits(target, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind == "c"], ids=str)
def test_a_complex_product_is_numpys_to_the_last_place(dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(7)
    mine = (rng.standard_normal(1000) + 1j * rng.standard_normal(1000)).astype(dtype)
    theirs = (rng.standard_normal(1000) + 1j * rng.standard_normal(1000)).astype(dtype)
    expected = mine * theirs
    allowed = 2 * np.finfo(dtype).eps * np.abs(mine) * np.abs(theirs)
    native_combine(ReduceOp.PRODUCT, mine, theirs)
    assert np.all(np.abs(mine - expected) <= allowed)
    assert not np.array_equal(mine, theirs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([d for d in DTYPES if d.kind not in "iub"]),
    lengths,
    offsets,
    st.integers(2, 3000),
    seeds,
)
def test_a_mean_divides_as_numpy_does(
    dtype: np.dtype[Any], count: int, offset: int, world: int, seed: int
) -> None:
    array = odd_array(dtype, count, offset=offset, seed=seed)
    expected = array.copy()
    reduction.divide(expected, world)
    native.core.divide(code_of(dtype), array.view(np.uint8), world)
    assert same_bits(array, expected)


def test_a_half_sum_of_many_is_rounded_once() -> None:
    small = np.full(64, 2.0**-11, np.float16)
    one = np.ones(64, np.float16)
    target = np.empty(64, np.float16)
    native_combine_many(ReduceOp.SUM, target, [one, small, small])
    assert target[0] == np.float16(1 + 2.0**-10), "each addend alone would be rounded away"


def test_wrong_arguments_are_refused() -> None:
    floats = np.zeros(4, np.float32)
    f32, total = code_of(floats.dtype), ReduceOp.SUM
    with pytest.raises(ValueError, match="one size"):
        native.core.combine(f32, total, floats, floats[:3].copy())
    with pytest.raises(ValueError, match="no meaning"):
        native.core.combine(f32, ReduceOp.BAND, floats, floats)
    with pytest.raises(ValueError, match="no such element type"):
        native.core.combine(99, total, floats, floats)
    with pytest.raises(ValueError, match="no such operation"):
        native.core.combine(f32, "most", floats, floats)
    with pytest.raises(ValueError, match="at least one"):
        native.core.combine_many(f32, total, floats, [])
    with pytest.raises(ValueError, match="only floats"):
        native.core.divide(code_of(np.dtype(np.int8)), floats, 2)
    floats.flags.writeable = False
    with pytest.raises((BufferError, ValueError), match="read-only"):
        native.core.combine(f32, total, floats, floats)
