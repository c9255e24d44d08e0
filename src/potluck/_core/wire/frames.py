"""The frame: 48 bytes that precede every payload between two ranks.

=============  ====  ========================================================================
field          type  meaning
=============  ====  ========================================================================
magic          2s    ``PL``
version        u8    protocol version
kind           u8    see ``Kind``
epoch          u32   the group this frame belongs to; any other epoch is refused
channel        u32   0 for the group itself, else a sub-group of it
chunk          u32   DATA: the plan's chunk; HANG_REPORT: the rank it is about
sequence       u64   collectives: the number of the call on this channel; point-to-point: of the
                     message; CREDIT: the bytes of credit
segment        u32   DATA, PIECE: which; HANG_QUERY: 1 to report and pass on; HANG_REPORT: 1 if
                     the rank has called
length         u32   bytes of payload, also when they lie in link memory
fingerprint    u64   DATA, HANG_QUERY: of the call; see ``engine/fingerprint.py``
source         u16   sending rank, in the whole group's numbering
dtype          u8    element type code
flags          u8    bit 0: the payload lies in link-memory slot ``tag``, not in the stream
tag            i32   p2p: the message's tag; otherwise see flags; SLOT_FREE: the slot
=============  ====  ========================================================================

All integers are little-endian, and so are payloads.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import msgspec

from potluck._core.wire.format import decoded
from potluck.errors import ProtocolError

_FRAME = struct.Struct("<2sBBIIIQIIQHBBi")
FRAME_BYTES = _FRAME.size
_MAGIC = b"PL"
_VERSION = 1

MAX_PAYLOAD = 16 * 1024 * 1024
"""The limit of a frame's payload in bytes, checked before memory is allocated."""

EAGER_BYTES = 64 * 1024
"""Point-to-point messages up to this size are sent eagerly; larger messages send an RTS first."""

MAX_CONTROL = 16 * 1024
"""The limit of the payload of ABORT and RTS frames in bytes."""

IN_LINK_MEMORY = 1


class Kind(IntEnum):
    DATA = 1
    """A segment of a collective."""
    EAGER = 2
    """A whole small point-to-point message."""
    RTS = 3
    """Request to send: announces a large point-to-point message."""
    CTS = 4
    """Clear to send: the receive that matches an RTS was called."""
    PIECE = 5
    """A segment of a large point-to-point message."""
    SLOT_FREE = 6
    """A link-memory slot is free again."""
    ABORT = 7
    """The group is over; the payload has the error."""
    CLOSE = 8
    """The last frame of the sender, which closes the link once this is acknowledged."""
    CLOSE_ACK = 9
    """Acknowledges CLOSE: all earlier frames were read."""
    HANG_QUERY = 10
    """The sender waits in this call; see ``engine/failures/hang_detection.py``."""
    HANG_REPORT = 11
    """Says whether a rank has made this call."""
    CREDIT = 12
    """Returns flow control credit; see ``engine/loop/flow_control.py``."""
    BEGUN = 13
    """The sender has begun this collective."""


LINK_MEMORY_KINDS = frozenset({Kind.DATA, Kind.PIECE})
"""The kinds whose payload may lie in link memory: ``tag`` then names the slot."""

_KINDS = {int(kind): kind for kind in Kind}
_BOUNDS = {
    Kind.DATA: MAX_PAYLOAD,
    Kind.EAGER: EAGER_BYTES,
    Kind.RTS: MAX_CONTROL,
    Kind.PIECE: MAX_PAYLOAD,
    Kind.ABORT: MAX_CONTROL,
}


class Frame(NamedTuple):
    kind: Kind
    epoch: int
    channel: int = 0
    chunk: int = 0
    sequence: int = 0
    segment: int = 0
    length: int = 0
    fingerprint: int = 0
    source: int = 0
    dtype: int = 0
    flags: int = 0
    tag: int = 0


class Abort(msgspec.Struct, frozen=True):
    """The payload of an ABORT frame: why the group is over. ``error`` is the name of the error
    class that every rank raises."""

    error: str
    text: str
    rank: int
    operation: str = ""
    certain: bool = False


class Rts(msgspec.Struct, frozen=True):
    """The payload of an RTS frame: the size of the message."""

    nbytes: int


_abort = msgspec.msgpack.Decoder(Abort)
_rts = msgspec.msgpack.Decoder(Rts)


def encode(frame: Frame) -> bytes:
    kind, epoch, channel, chunk, sequence, segment, length, fingerprint, source, *rest = frame
    return _FRAME.pack(
        _MAGIC, _VERSION, kind, epoch, channel, chunk, sequence, segment, length,
        fingerprint, source, *rest,
    )  # fmt: skip


def decode(header: bytes | bytearray | memoryview) -> Frame:
    """The frame in 48 bytes; ProtocolError for bytes that potluck never sends."""
    magic, version, number, *fields = _FRAME.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError(f"not a potluck frame: it begins with {bytes(header[:4])!r}")
    if version != _VERSION:
        raise ProtocolError(f"a frame of protocol {version}; this is protocol {_VERSION}")
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"a frame of unknown kind {number}")
    frame = Frame(kind, *fields)
    if frame.length > _BOUNDS.get(kind, 0):
        raise ProtocolError(
            f"a {kind.name} frame announces {frame.length} bytes; at most {_BOUNDS.get(kind, 0)}"
            " are allowed"
        )
    if frame.flags & ~IN_LINK_MEMORY:
        raise ProtocolError(f"a frame with unknown flags {frame.flags:#x}")
    if frame.flags & IN_LINK_MEMORY and kind not in LINK_MEMORY_KINDS:
        raise ProtocolError(f"a {kind.name} frame whose payload lies in link memory")
    return frame


def encode_abort(abort: Abort) -> bytes:
    body = msgspec.msgpack.encode(abort)
    if len(body) <= MAX_CONTROL:
        return body
    short = abort.text.encode()[: MAX_CONTROL // 2].decode(errors="ignore") + " ..."
    return msgspec.msgpack.encode(msgspec.structs.replace(abort, text=short, operation=""))


def decode_abort(body: bytes) -> Abort:
    return decoded(_abort, body, "the payload of an ABORT frame")


def encode_rts(rts: Rts) -> bytes:
    return msgspec.msgpack.encode(rts)


def decode_rts(body: bytes) -> Rts:
    return decoded(_rts, body, "the payload of an RTS frame")
