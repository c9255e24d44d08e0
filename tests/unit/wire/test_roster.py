from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._core.types import Member
from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.gathering import ROSTER
from potluck.errors import ProtocolError

members = st.builds(
    Member,
    worker=st.text(max_size=8),
    node=st.text(max_size=64),
    host=st.text(max_size=40),
    port=st.integers(0, 65535),
    local_rank=st.integers(0, 1000),
)


def decode(body: bytes) -> tuple[Member, ...]:
    return ROSTER.decode(body)


@given(st.lists(members, max_size=40).map(tuple))
def test_a_roster_travels(roster: tuple[Member, ...]) -> None:
    data = ROSTER.encode(roster)
    length = ROSTER.length(data[:PREFIX_BYTES])
    assert length == len(data) - PREFIX_BYTES
    assert decode(data[PREFIX_BYTES:]) == roster


@pytest.mark.parametrize("port", [-1, 65536, 2**40])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    body = msgspec.msgpack.encode([{"worker": "0", "port": port}])
    with pytest.raises(ProtocolError, match=r"not a roster: .*\.port"):
        decode(body)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91\x81\xa6worker\xa1\xff", b"\x91\x81\xa1q" + b"\x91" * 16_000]
)
def test_malformed_rosters_are_protocol_errors(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a roster"):
        decode(body)
