from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.types import Member
from potluck.wire.roster import MAX_ROSTER, PREFIX, decode_roster, encode_roster, roster_length

members = st.builds(
    Member,
    worker=st.text(max_size=8),
    node=st.text(max_size=64),
    host=st.text(max_size=40),
    port=st.integers(0, 65535),
    local_rank=st.integers(0, 1000),
)


@given(st.lists(members, max_size=40).map(tuple))
def test_a_roster_travels(roster: tuple[Member, ...]) -> None:
    data = encode_roster(roster)
    length = roster_length(data[: PREFIX.size])
    assert length == len(data) - PREFIX.size
    assert decode_roster(data[PREFIX.size :]) == roster


def test_lengths_are_bounded_before_anything_is_read() -> None:
    for length in (0, MAX_ROSTER + 1, 2**32 - 1):
        with pytest.raises(ProtocolError, match=f"a roster of {length} bytes"):
            roster_length(PREFIX.pack(length))


@pytest.mark.parametrize("port", [-1, 65536, 2**40])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    body = msgspec.msgpack.encode([{"worker": "0", "port": port}])
    with pytest.raises(ProtocolError, match="no port"):
        decode_roster(body)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91\x81\xa6worker\xa1\xff", b"\x91\x81\xa1q" + b"\x91" * 16_000]
)
def test_malformed_rosters_are_protocol_errors(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode_roster(body)


@given(st.binary(max_size=100))
def test_random_bytes_raise_nothing_else(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_roster(body)
