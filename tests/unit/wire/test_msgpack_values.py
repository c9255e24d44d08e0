"""Counting the values of a msgpack text, beside a walk over what was packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.wire.msgpack_values import count_values
from potluck.wire.payload import pack
from support.payloads import nested, scalars

MANY = 1 << 60


def walked(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + walked(item) for item in value.values())
    if isinstance(value, tuple):
        return 2 + sum(map(walked, value))  # the extension, and the list in it
    if isinstance(value, list):
        return 1 + sum(map(walked, value))
    return 1


LEAVES = scalars(max_size=300) | st.just(np.float32(1.5)) | st.integers(0, 9).map(np.zeros)
VALUES = nested(LEAVES, max_size=20, max_leaves=60)


@given(VALUES)
def test_every_value_is_counted(value: Any) -> None:
    assert count_values(pack(value).header, MANY) == walked(value)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 70_000,
        b"x" * 70_000,
        [1] * 70_000,
        dict.fromkeys(range(70_000)),
        (1.5,) * 70_000,
        tuple(range(200)),
        ("x" * 40,),
    ],
    ids=lambda value: type(value).__name__,
)
def test_long_ones_are_counted_too(value: Any) -> None:
    assert count_values(pack(value).header, MANY) == walked(value)


def test_the_count_ends_when_there_are_more() -> None:
    assert count_values(pack([1] * 1000).header, 10) == 11


@given(st.binary(max_size=60))
def test_any_bytes_are_counted(text: bytes) -> None:
    assert count_values(text, MANY) <= len(text)


def test_a_text_that_is_cut_off_ends_the_count() -> None:
    assert count_values(b"\xdb\xff\xff\xff\xff", MANY) == 1
    assert count_values(b"\xc9\x00\x00", MANY) == 1
    assert count_values(b"", MANY) == 0
