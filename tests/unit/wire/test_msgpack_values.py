"""The check of a msgpack text: the count beside a walk over what was packed; what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck._core import native
from potluck._core.wire.msgpack_values import count_in_python, count_values
from potluck._core.wire.payload import MAX_DEPTH, pack
from potluck.errors import ProtocolError
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
    assert count_values(pack(value).header, MANY, MAX_DEPTH) == walked(value)


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
    assert count_values(pack(value).header, MANY, MAX_DEPTH) == walked(value)


def test_the_count_ends_when_there_are_more() -> None:
    assert count_values(pack([1] * 1000).header, 10, MAX_DEPTH) == 11


TWINS = [count_in_python, *([native.core.count_values] if native.available else [])]
TORN, TOO_DEEP, BAD_KEY = -1, -2, -3

MSGPACK_BYTES = st.sampled_from(
    bytes.fromhex("00 02 80 81 90 91 a1 c0 c1 c4 c7 ca cc d3 d4 d9 dc dd de df ff")
)


@given(st.binary(max_size=60) | st.lists(MSGPACK_BYTES, max_size=60).map(bytes))
@example(b"\xdb\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc9\x00\x00")
@example(b"")
def test_twins_agree_on_any_bytes_and_pass_what_a_decoder_takes(text: bytes) -> None:
    counts = {count(text, MANY, MAX_DEPTH) for count in TWINS}
    assert len(counts) == 1
    count = counts.pop()
    assert count <= len(text)
    if count > 0:  # what is passed is whole for the decoder, too
        with contextlib.suppress(msgspec.ValidationError, UnicodeDecodeError):
            msgspec.msgpack.decode(text, ext_hook=lambda code, data: None)


@given(VALUES.map(lambda value: bytes(pack(value).header)), st.data())
def test_twins_agree_on_headers_that_one_byte_is_changed_in(header: bytes, data: Any) -> None:
    place = data.draw(st.integers(0, len(header) - 1))
    changed = bytearray(header)
    changed[place] = data.draw(st.integers(0, 255))
    most = data.draw(st.sampled_from([1, 5, MANY]))
    assert len({count(bytes(changed), most, 8) for count in TWINS}) == 1


@pytest.mark.parametrize("count", TWINS)
@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", TORN),
        (b"\xc1", TORN),
        (b"\x01\x01", TORN),
        (b"\x92\x01", TORN),
        (b"\xa5abc", TORN),
        (b"\xdb\xff\xff\xff\xff", TORN),
        (b"\xc9\x00\x00", TORN),
        (b"\xc7\x02\x02\x90\x90", TORN),  # a tuple whose list ends before it
        (b"\xc7\x01\x02\x91\x90", TORN),  # and one whose list goes on
        (b"\xc7\x01\x02\x01", TORN),  # and one without a list
        (b"\x91" * 9 + b"\x01", TOO_DEEP),
        (b"\x81\x01" * 9 + b"\x01", TOO_DEEP),
        (b"\x81\x90\x01", BAD_KEY),
        (b"\x81\x80\x01", BAD_KEY),
        (b"\x81\xcb\0\0\0\0\0\0\0\0\x01", BAD_KEY),
        (b"\x81\xc4\x01a\x01", BAD_KEY),
        (b"\x81\xd4\x03\x01\x01", BAD_KEY),
        (b"\x82\x01\x02\x90\x01", BAD_KEY),
        (b"\xc7\x04\x02\x91\x81\x90\x01", BAD_KEY),
    ],
)
def test_what_is_no_payload_is_told_by_its_code(count: Any, text: bytes, what: int) -> None:
    assert count(text, MANY, 8) == what


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ProtocolError, match="a key that is no str, int, bool or None"):
        count_values(b"\x81\x90\x01", MANY, 8)
    with pytest.raises(ProtocolError, match="too deep"):
        count_values(b"\x91" * 9 + b"\x01", MANY, 8)
    with pytest.raises(ProtocolError, match="no msgpack text"):
        count_values(b"\xc1", MANY, 8)
