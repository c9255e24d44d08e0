"""Calls of services on the wire: a request, then its reply, each one frame.

    prefix     16 bytes: length of the head u32, of the payload's header u32, of its arrays u64
    head       msgpack: ``Request`` or ``Reply``
    payload    header and raw arrays (``payload.py``): arguments, or the result

A connection carries one call at a time: no byte follows a request before its reply. Every length
is compared with its bound before memory is taken. The connection's greeting is that of all others
(``Hello.kind`` is ``service``).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from potluck._core.wire.payload import MAX_HEADER_BYTES, Packed
from potluck.errors import ProtocolError

KIND = "service"
PREFIX_BYTES = 16
MAX_HEAD_BYTES = 64 * 1024
MAX_TEXT = 8 * 1024

_PREFIX = struct.Struct("<IIQ")
_encode = msgspec.msgpack.Encoder().encode


class Request(msgspec.Struct, frozen=True):
    """A call of ``method``; the arguments are the payload, a dict by position or name.

    An empty ``service`` asks for the names of all services of the process.
    """

    service: str
    method: str
    timeout_s: float


class Failure(msgspec.Struct, frozen=True):
    """Why a call has no result. ``unknown``: no such service or method, and nothing was run."""

    type: str
    text: str
    place: str = ""
    is_unknown: bool = False


class Reply(msgspec.Struct, frozen=True):
    """The end of a call; the payload is its result, None after a failure."""

    failure: Failure | None = None


Head = Request | Reply


class Lengths(NamedTuple):
    """What a prefix announces, in bytes."""

    head: int
    header: int
    arrays: int


def encode(head: Head, packed: Packed) -> bytes:
    """A frame up to its arrays, whose bytes (``packed.buffers``) follow."""
    body = _encode(head)
    if len(body) > MAX_HEAD_BYTES:
        raise ProtocolError(f"the head of a call takes {len(body)} bytes, above {MAX_HEAD_BYTES}")
    return _PREFIX.pack(len(body), len(packed.header), packed.nbytes) + body + packed.header


def lengths_in(frame: bytes | bytearray | memoryview, limit: int) -> Lengths:
    """What the prefix, at the beginning of ``frame``, announces; ProtocolError if a length is above
    its bound, ``limit`` for arrays."""
    head, header, arrays = _PREFIX.unpack_from(frame)
    lengths = Lengths(head, header, arrays)
    if head > MAX_HEAD_BYTES or header > MAX_HEADER_BYTES or arrays > limit:
        bounds = Lengths(MAX_HEAD_BYTES, MAX_HEADER_BYTES, limit)
        for name, length, bound in zip(Lengths._fields, lengths, bounds, strict=True):
            if length > bound:
                raise ProtocolError(
                    f"the {name} of a call takes {length} bytes; at most {bound} here"
                )
    return lengths
