"""What two machines say to each other while one takes the cluster's secret over from the other.

The first three messages are unauthenticated, so they have fixed lengths and nothing in them is
decoded: ``Opening`` (joiner), ``Answer`` (host), ``Proof`` (joiner). All after that is sealed
under the key both have agreed on. Every message begins with ``MAGIC`` and its kind.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.errors import ProtocolError
from potluck.wire.names import Name

VERSION = 1
ELEMENT_BYTES = 33
PROOF_BYTES = 32
MAX_SEALED = 4096
PREFIX_BYTES = 8

_MAGIC = b"plpr"
OPENING, ANSWER, PROOF, SEALED, BUSY = range(1, 6)

_LENGTHS = {
    OPENING: ELEMENT_BYTES,
    ANSWER: ELEMENT_BYTES + PROOF_BYTES,
    PROOF: PROOF_BYTES,
    BUSY: 0,
}


class Newcomer(msgspec.Struct, frozen=True):
    """What the joiner tells about itself, sealed."""

    node: Annotated[str, msgspec.Meta(max_length=64)]
    name: Name


class Handover(msgspec.Struct, frozen=True):
    """The secret, and who gives it; sealed."""

    psk: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    node: Annotated[str, msgspec.Meta(max_length=64)]
    name: Name

    def __repr__(self) -> str:
        return f"Handover(node={self.node!r}, name={self.name!r})"


def encode(kind: int, body: bytes = b"") -> bytes:
    """A message of ``kind`` with its prefix."""
    expected = _LENGTHS.get(kind)
    if len(body) > MAX_SEALED or (expected is not None and len(body) != expected):
        raise ProtocolError(f"a pairing message of kind {kind} can't have {len(body)} bytes")
    return _MAGIC + bytes([VERSION, kind]) + len(body).to_bytes(2, "little") + body


def decode_prefix(prefix: bytes, *kinds: int) -> tuple[int, int]:
    """Kind and length of the message that follows; ProtocolError unless it is one of ``kinds``."""
    if prefix[:4] != _MAGIC:
        raise ProtocolError("the other side does not speak potluck's pairing protocol")
    if prefix[4] != VERSION:
        raise ProtocolError(
            f"the other side pairs by version {prefix[4]}, this one by version {VERSION}: install "
            "the same potluck on both"
        )
    kind, length = prefix[5], int.from_bytes(prefix[6:8], "little")
    expected = _LENGTHS.get(kind)
    if kind not in kinds or length > MAX_SEALED or (expected is not None and length != expected):
        raise ProtocolError(f"a pairing message of kind {kind} and {length} bytes, out of turn")
    return kind, length
