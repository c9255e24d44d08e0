"""The roster: all members of a group, as rank 0 tells them at a rendezvous."""

from __future__ import annotations

import struct

import msgspec

from potluck.errors import ProtocolError
from potluck.types import Member

MAX_ROSTER = 1024 * 1024
PREFIX = struct.Struct("<I")

_decoder = msgspec.msgpack.Decoder(tuple[Member, ...])


def encode_roster(members: tuple[Member, ...]) -> bytes:
    """The roster with its length in front."""
    body = msgspec.msgpack.encode(members)
    return PREFIX.pack(len(body)) + body


def roster_length(prefix: bytes) -> int:
    length: int = PREFIX.unpack(prefix)[0]
    if not 0 < length <= MAX_ROSTER:
        raise ProtocolError(f"a roster of {length} bytes; at most {MAX_ROSTER} are allowed")
    return length


def decode_roster(body: bytes) -> tuple[Member, ...]:
    try:
        members = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a malformed roster: {error}") from error
    for member in members:
        if not 0 <= member.port < 65536:
            raise ProtocolError(f"a malformed roster: {member.port} is no port")
    return members
