"""The messages of pairing: a machine of a cluster (host) admits the key of a joiner.

The first three messages are unauthenticated, so they have fixed lengths and are not decoded:
``OPENING`` (joiner), ``ANSWER`` (host), ``PROOF`` (joiner). All later messages are sealed under the
agreed key, or tagged with it (``YES``: the joiner's person agrees). Every message begins with a
magic number, the version and its kind.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck._core.wire.admissions import MAX_RECORDS, Founding, Key, Record
from potluck._core.wire.format import MachineName
from potluck.errors import ProtocolError

VERSION = 2
ELEMENT_BYTES = 33
PROOF_BYTES = 32
MAX_SEALED = 4096
MAX_HANDOVER = 4 << 20
PREFIX_BYTES = 10

_MAGIC = b"plpr"
OPENING, ANSWER, PROOF, SEALED, BUSY, YES, HANDOVER = range(1, 8)

_LENGTHS = {
    OPENING: ELEMENT_BYTES,
    ANSWER: ELEMENT_BYTES + PROOF_BYTES,
    PROOF: PROOF_BYTES,
    YES: PROOF_BYTES,
    BUSY: 0,
}


class Newcomer(msgspec.Struct, frozen=True):
    """The joiner's key, sent sealed; ``signature`` is the key's, over the bytes that only this run
    of the protocol has (``Sealing.session``)."""

    key: Key
    name: MachineName
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Handover(msgspec.Struct, frozen=True):
    """The cluster's secret and its list of admitted keys, with the joiner's in it, from the host
    ``node``; sent sealed."""

    psk: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    node: Annotated[str, msgspec.Meta(max_length=64)]
    name: MachineName
    founding: Founding
    records: Annotated[tuple[Record, ...], msgspec.Meta(max_length=MAX_RECORDS)]

    def __repr__(self) -> str:
        return f"Handover(node={self.node!r}, name={self.name!r})"


def encode(kind: int, body: bytes = b"") -> bytes:
    """A message of ``kind`` with its prefix."""
    expected = _LENGTHS.get(kind)
    if len(body) > _limit(kind) or (expected is not None and len(body) != expected):
        raise ProtocolError(f"a pairing message of kind {kind} can't have {len(body)} bytes")
    return _MAGIC + bytes([VERSION, kind]) + len(body).to_bytes(4, "little") + body


def decode_prefix(prefix: bytes, *kinds: int) -> tuple[int, int]:
    """The kind and length of the message after ``prefix``; ProtocolError unless the kind is one of
    ``kinds``."""
    if prefix[:4] != _MAGIC:
        raise ProtocolError("the other machine does not use potluck's pairing protocol")
    if prefix[4] != VERSION:
        raise ProtocolError(
            f"the other machine has version {prefix[4]} of the pairing protocol, this machine "
            f"{VERSION}: install the same release of potluck on both"
        )
    kind, length = prefix[5], int.from_bytes(prefix[6:10], "little")
    expected = _LENGTHS.get(kind)
    if kind not in kinds or length > _limit(kind) or (expected is not None and length != expected):
        raise ProtocolError(f"a pairing message of kind {kind} and {length} bytes, out of turn")
    return kind, length


def _limit(kind: int) -> int:
    return MAX_HANDOVER if kind == HANDOVER else MAX_SEALED
