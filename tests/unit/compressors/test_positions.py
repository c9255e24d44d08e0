"""Positions take a number of bytes that their number decides, and come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.compressors.topk import pack_positions, positions_bytes, unpack_positions


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 300_000),
    share=st.floats(0, 1),
    seed=st.integers(0, 999),
    late=st.booleans(),
)
def test_positions_come_back(count: int, share: float, seed: int, late: bool) -> None:
    num = int(count * share**6) if count > 1000 else int(count * share)
    if late:  # all at the end: as many words that skip as there can be
        places = np.arange(count - num, count, dtype=np.uint32)
    else:
        rng = np.random.default_rng(seed)
        places = np.sort(rng.choice(count, num, replace=False)).astype(np.uint32)
    packed = pack_positions(places, count)
    assert packed.size == positions_bytes(count, num)
    assert np.array_equal(unpack_positions(packed, count, num), places)


def test_the_sizes() -> None:
    assert positions_bytes(1_000_000, 10_000) == 10_000 + 3921
    assert positions_bytes(1_000_000, 1000) == 2 * (1000 + 15)
    assert positions_bytes(10, 0) == 0


def test_bytes_that_are_no_positions_are_refused() -> None:
    packed = pack_positions(np.array([3, 500], np.uint32), 1000)
    with pytest.raises(ValueError, match="are not the code of 2 positions among 1000 elements"):
        unpack_positions(np.full_like(packed, 255), 1000, 2)
    beyond = pack_positions(np.array([998, 999], np.uint32), 1000)
    beyond[0] += 1
    with pytest.raises(ValueError, match="are not the code"):
        unpack_positions(beyond, 1000, 2)
