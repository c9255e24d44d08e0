"""Payloads: what goes in comes out; what does not belong is refused with its place."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
import weakref
from collections import OrderedDict
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.wire.payload import (
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    MAX_VALUES,
    decoded_bytes,
    pack,
    unpack,
)
from potluck.errors import ProtocolError
from support.payloads import nested, scalars

LIMIT = 1 << 20


def travelled(value: Any, limit: int = LIMIT) -> Any:
    packed = pack(value)
    there = unpack(packed.header, limit)
    assert there.nbytes == packed.nbytes
    for room, buffer in zip(there.buffers, packed.buffers, strict=True):
        room[:] = buffer
    return there.value


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    else:
        assert one == other or (one != one and other != other)


ARRAYS = st.builds(
    lambda shape, dtype: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["float16", "float64", "bool", "uint8", "complex128", ml_dtypes.bfloat16]),
)
VALUES = nested(scalars(max_size=5) | ARRAYS, max_size=4, max_leaves=12)


@given(VALUES)
def test_every_payload_arrives_as_it_was(value: Any) -> None:
    same(travelled(value), value)


def test_scalars_tensors_and_arrays_that_are_not_contiguous() -> None:
    base = np.arange(24.0).reshape(4, 6)
    same(travelled(base[::2, 1]), np.ascontiguousarray(base[::2, 1]))
    same(travelled(base.T), np.ascontiguousarray(base.T))
    same(travelled(base.astype(">f8")), base)
    same(travelled(np.float32(1.5)), np.float32(1.5))
    same(travelled(np.array(3)), np.array(3))
    for tensor in (torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(0, 4), torch.tensor(2.0)):
        same(travelled([tensor]), [tensor])


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.zeros(1000, np.float32)
    [buffer] = pack({"a": array}).buffers
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": [1, 2, 3, {1}]}, r'payload\["a"\]\[3\] is of type set'),
        ([np.array(["x"])], r"payload\[0\]: arrays of dtype"),
        ({"x": (None, object())}, r'payload\["x"\]\[1\] is of type object'),
        ({(1, 2): 3}, r"payload has the key \(1, 2\) of type tuple"),
        (2**64, "payload is an integer of more than 64 bits"),
        ([OrderedDict()], r"payload\[0\] is of type OrderedDict"),
        (np.ma.masked_array([1.0]), "payload is a masked array"),
        (torch.ones(2, 2).to_sparse(), "payload is a tensor of layout torch.sparse_coo"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_does_not_belong_is_refused_with_its_place(value: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        pack(value)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_subclass_of_an_array_travels_as_a_plain_one() -> None:
    packed = pack(np.matrix([[1.0, 2.0], [3.0, 4.0]]))
    assert packed.nbytes == 32
    assert [len(buffer) for buffer in packed.buffers] == [32]


def test_a_nesting_without_end_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match=f"more than {MAX_DEPTH} deep"):
        pack(value)


def test_arrays_beyond_the_limit_take_no_memory() -> None:
    header = bytearray(pack(np.zeros(1)).header)
    header[-8:] = (2**61).to_bytes(8, "little")
    for limit in (LIMIT, 2**62):
        with pytest.raises(ProtocolError, match=r"at most|header"):
            unpack(header, limit)
    with pytest.raises(ProtocolError, match="16 bytes; at most 15"):
        travelled([np.zeros(1), np.zeros(1)], limit=15)


def test_more_values_than_the_bound_are_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match="payload has more than 1048576 values: send numbers as"):
        pack([0] * MAX_VALUES)
    assert travelled([0] * (MAX_VALUES - 1)) == [0] * (MAX_VALUES - 1)
    for size in (MAX_VALUES, MAX_HEADER_BYTES - 5):
        maps = b"\xdd" + size.to_bytes(4, "big") + b"\x80" * size
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match="more than 1048576 values"):
                unpack(maps, LIMIT)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_long_text_is_one_value() -> None:
    value = {"text": "x" * (3 << 20), "bytes": bytes(3 << 20)}
    same(travelled(value), value)


@pytest.mark.parametrize(
    "value",
    [
        [{}] * 50_000,
        [{1: 2}] * 50_000,
        [[]] * 50_000,
        [()] * 50_000,
        [0.5] * 50_000,
        [f"{n:05}" for n in range(50_000)],
        {f"{n}": n for n in range(50_000)},
        "\U0001f600" + "x" * 100_000,
        [np.float32(1)] * 50_000,
    ],
    ids=["dicts", "dicts of one", "lists", "tuples", "floats", "texts", "keys", "emoji", "scalars"],
)
def test_what_a_header_decodes_to_is_bounded(value: Any) -> None:
    header = pack(value).header
    tracemalloc.start()
    try:
        kept = unpack(header, LIMIT)
        assert tracemalloc.get_traced_memory()[0] <= decoded_bytes(len(header))
    finally:
        tracemalloc.stop()
    assert kept.nbytes == 0


def test_arrays_that_came_end_with_their_last_reference() -> None:
    value = travelled([np.zeros(10)])
    left = weakref.ref(value[0])
    del value
    assert left() is None


@given(st.binary(max_size=60))
def test_any_bytes_are_a_payload_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        unpack(data, LIMIT)


def test_a_deep_header_is_a_protocol_error() -> None:
    for deep in (b"\x91" * 100_000, b"".join([b"\xc9\x00\x00\xff\xff\x02"] * 5000)):
        with pytest.raises(ProtocolError):
            unpack(deep, LIMIT)
