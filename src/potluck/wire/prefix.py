"""The length in front of a message: a little-endian u32, checked before anything is allocated."""

from __future__ import annotations

import struct

from potluck.errors import ProtocolError

PREFIX_BYTES = 4

_LENGTH = struct.Struct("<I")


def prefixed(body: bytes, limit: int, what: str) -> bytes:
    """``body`` with its length in front; ProtocolError if ``what`` is longer than ``limit``."""
    if len(body) > limit:
        raise ProtocolError(f"{what} of {len(body)} bytes; at most {limit} are allowed")
    return _LENGTH.pack(len(body)) + body


def announced_length(prefix: bytes, limit: int, what: str) -> int:
    """The bytes that follow ``prefix``; ProtocolError unless ``what`` may be so long."""
    length: int = _LENGTH.unpack(prefix)[0]
    if not 0 < length <= limit:
        raise ProtocolError(f"{what} announces {length} bytes; potluck's have 1 to {limit}")
    return length
