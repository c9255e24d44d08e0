"""The log of a parameter server: what its first server has decided, in the order in which every
server carries it out. Pure.

An entry names gradients by worker and push number; the tensors are staged on the servers where
they lie. So entries are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from potluck._core.wire.format import decoded
from potluck.parameter_server.layout import Layout


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One decision."""


class SetParameters(Entry, frozen=True, tag=True):
    """The first parameters of ``model``, or others: those that ``worker`` has staged, as
    ``version``."""

    model: str
    layout: Layout
    worker: str
    push: int
    version: int


class Update(Entry, frozen=True, tag=True):
    """The next ``version`` of ``model``, by these gradients, (worker, push), in this order.

    ``how``: ``step`` by their mean, ``mix`` with the gradient before by ``alpha``, or ``add``.
    ``staleness`` is that of the one gradient of an asynchronous step.
    """

    model: str
    how: str
    pushes: tuple[tuple[str, int], ...]
    rate: float
    version: int
    alpha: float = 1.0
    staleness: int | None = None


class Drop(Entry, frozen=True, tag=True):
    """What ``worker`` staged as ``push`` is used no more. ``reason``: why that push did not count;
    empty if it was never made."""

    model: str
    worker: str
    push: int
    reason: str = ""


class Grant(Entry, frozen=True, tag=True):
    """``worker`` fetches the present version of ``model``, whose number is ``version``."""

    model: str
    worker: str
    version: int


class Leave(Entry, frozen=True, tag=True):
    """``worker`` calls no more."""

    worker: str


class Save(Entry, frozen=True, tag=True):
    """Write a checkpoint of all models as they are now."""


class Close(Entry, frozen=True, tag=True):
    """All workers have left, and the last checkpoint is written."""


AnyEntry = SetParameters | Update | Drop | Grant | Leave | Save | Close

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyEntry])


def encode(entries: Sequence[Entry]) -> bytes:
    """``entries`` as bytes."""
    return _encoder.encode(entries)


def decode(data: bytes) -> list[AnyEntry]:
    """The inverse of ``encode``. ProtocolError for other bytes."""
    return decoded(_decoder, data, "the log of a parameter server")
