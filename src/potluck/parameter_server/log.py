"""The log of a parameter server: the decisions of its primary, in the order in which every server
applies them. Pure.

An entry names gradients by worker and push number; the tensors are staged on the servers that hold
them. So entries are small. Terms, positions and commits are as in Raft (Ongaro and Ousterhout, "In
search of an understandable consensus algorithm", 2014, section 5.3), but nobody votes: the group
elects the primary, and an entry is committed when all live servers have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from potluck._core.wire.format import decoded
from potluck.parameter_server.layout import Layout

MAX_BEHIND = 1 << 16
"""Entries; with more, the primary answers no calls until the others have caught up."""


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One decision."""


class SetParameters(Entry, frozen=True, tag=True):
    """Parameters of ``model``, the first or new ones, which ``worker`` has staged: ``version``."""

    model: str
    layout: Layout
    worker: str
    push: int
    version: int


class Update(Entry, frozen=True, tag=True):
    """The next ``version`` of ``model``, by these gradients, (worker, push), in this order.

    ``how``: ``step`` by their mean, ``mix`` with the gradient before by ``alpha``, or ``add``.
    ``staleness``: of the gradient of an asynchronous step.
    """

    model: str
    how: str
    pushes: tuple[tuple[str, int], ...]
    rate: float
    version: int
    alpha: float = 1.0
    staleness: int | None = None


class Drop(Entry, frozen=True, tag=True):
    """The staged tensors of a push are not needed any more. ``reason``: why the push did not count;
    empty if it was never made."""

    model: str
    worker: str
    push: int
    reason: str = ""


class Grant(Entry, frozen=True, tag=True):
    """``worker`` may fetch ``version`` of ``model``, which is the present one."""

    model: str
    worker: str
    version: int


class Leave(Entry, frozen=True, tag=True):
    """``worker`` calls no more."""

    worker: str


class Save(Entry, frozen=True, tag=True):
    """Write a checkpoint of all models as they are now, with this number."""

    number: int


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


class Position(NamedTuple):
    """Position of an entry in the log, and so of the state after it: servers at one position have
    applied the same entries. Later positions are greater."""

    term: int
    """The term of the primary that decided the entry."""
    number: int


class Log:
    """The newest entries, from ``committed`` to ``last``, all of one term."""

    def __init__(self) -> None:
        self.begin(Position(0, 0))

    def begin(self, position: Position) -> None:
        """All servers have the state of ``position``."""
        self.last = self.committed = position
        self.entries: list[Entry] = []

    @property
    def is_full(self) -> bool:
        """Whether another server is too far behind."""
        return len(self.entries) > MAX_BEHIND

    def append(self, entry: Entry, term: int) -> None:
        """Add an entry of the primary of ``term``."""
        self.last = Position(term, self.last.number + 1)
        self.entries.append(entry)

    def commit(self, position: Position) -> None:
        """Forget the entries up to ``position``: all live servers have applied them."""
        if position.number >= self.committed.number:
            del self.entries[: position.number - self.committed.number]
            self.committed = position

    def missing(
        self, committed: Position, last: Position, entries: Sequence[AnyEntry]
    ) -> Sequence[AnyEntry] | None:
        """The part of ``entries``, which lead from ``committed`` to ``last``, that this log lacks;
        None if its state is not one on that way (Raft's consistency check)."""
        if self.last == committed:
            return entries
        if self.last.term == last.term and committed.number < self.last.number <= last.number:
            return entries[self.last.number - committed.number :]
        return None
