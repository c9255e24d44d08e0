"""The native selection against its twin: the same positions and the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core import native
from potluck.compressors import TopK
from potluck.compressors.topk import Sizes, select, select_in_python
from support.arrays import odd_array, same_bits

pytestmark = [
    pytest.mark.usefixtures("kernel_set"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
F4 = np.dtype(np.float32)


def values(kind: str, count: int, seed: int) -> np.ndarray:
    if kind == "odd":
        return odd_array(F4, count, offset=3 * (seed % 2), seed=seed)
    rng = np.random.default_rng(seed)
    if kind == "ties":
        return rng.integers(-2, 3, count).astype(F4)
    if kind == "zeros":
        return np.where(rng.random(count) < 0.01, rng.standard_normal(count), 0).astype(F4)
    return rng.standard_normal(count).astype(F4)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["plain", "odd", "ties", "zeros"]),
    st.one_of(st.integers(0, 600), st.integers(0, 30_000)),
    st.sampled_from([1, 7, 256, 4096, None]),
    st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_the_same_positions_and_values(
    kind: str, count: int, chunk: int | None, ratio: float, with_residual: bool, seed: int
) -> None:
    source = values(kind, count, seed)
    sizes = TopK(ratio, chunk=chunk).sizes(count)
    kept = values("plain", count, seed + 1) if with_residual else None
    twins = None if kept is None else kept.copy()
    places, taken = select(source, kept, sizes)
    expected_places, expected = select_in_python(source, twins, sizes)
    assert np.array_equal(places, expected_places)
    assert same_bits(taken, expected)
    if kept is not None:
        assert same_bits(kept, twins)


@pytest.mark.parametrize(
    "sizes", [Sizes(0, 1, 0), Sizes(10, 0, 0), Sizes(10, 11, 0), Sizes(7, 1, 0), Sizes(10, 1, 1)]
)
def test_sizes_that_do_not_fit_are_refused(sizes: Sizes) -> None:
    out = np.zeros(10, np.uint32)
    with pytest.raises(ValueError, match=r"must be between|right size"):
        native.core.select_largest(out, out, np.zeros(10, np.float32), None, *sizes)
