"""Point-to-point messages: matching sends with receives.

The two protocols of MPI libraries. *Eager*: a message of up to ``EAGER_BYTES`` is sent at once, and
waits here if no receive matches it yet. *Rendezvous*: a larger message sends RTS (request to send)
first, and its bytes only when a matching receive has answered CTS (clear to send), so that an
unexpected message takes no more than a small buffer. A small message whose receiver has no credit
left takes the rendezvous protocol too. Between two ranks messages with the same tag arrive in the
order in which they were sent. Runs on the progress loop; touches no link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass

from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.loop.running import as_bytes
from potluck._core.engine.work import Work
from potluck._core.wire.frames import Frame

ANY_SOURCE = -1


@dataclass(slots=True, eq=False)
class Sending:
    """A large message that waits for its CTS, or moves."""

    peer: int
    channel: int
    tag: int
    dtype: int
    number: int
    data: memoryview
    work: Work
    deadline: float
    keep: Array
    offset: int = 0
    is_clear: bool = False

    def missing(self, departed: Set[int]) -> int | None:
        return self.peer if self.peer in departed else None

    def awaited(self) -> list[tuple[int, str]]:
        return [(self.peer, f"send of {len(self.data)} bytes, tag {self.tag}")]

    def __str__(self) -> str:
        return self.work.call


@dataclass(slots=True, eq=False)
class Receiving:
    """A posted receive; ``matched`` is the engine rank it receives from, once known.

    ``ranks`` are the channel's members: the caller knows them by their place there.
    """

    source: int
    channel: int
    ranks: tuple[int, ...]
    tag: int
    dtype: int
    array: Array
    data: memoryview
    work: Work
    deadline: float
    matched: int = ANY_SOURCE
    offset: int = 0
    num_pieces: int = 0

    def missing(self, departed: Set[int]) -> int | None:
        source = self.source if self.matched < 0 else self.matched
        if source >= 0:
            return source if source in departed else None
        left = set(self.ranks) - departed  # this rank is always among them
        return min(set(self.ranks) & departed) if len(left) <= 1 < len(self.ranks) else None

    def awaited(self) -> list[tuple[int, str]]:
        source = self.source if self.matched < 0 else self.matched
        return [(source, f"receive of {len(self.data)} bytes, tag {self.tag}")]

    def __str__(self) -> str:
        return self.work.call


@dataclass(slots=True, eq=False)
class Arrived:
    """An unexpected message, one that came before its receive: its bytes, or only its RTS."""

    source: int
    frame: Frame
    nbytes: int
    payload: bytearray | None


class Mailbox:
    """Posted receives and early messages of one rank, over all channels."""

    def __init__(self) -> None:
        self.sending: dict[int, Sending] = {}
        self.cleared: dict[int, deque[Sending]] = {}
        self.receiving: dict[tuple[int, int], Receiving] = {}
        self.posted: list[Receiving] = []
        self._unexpected: list[Arrived] = []

    def post(self, receive: Receiving) -> Arrived | None:
        """A receive was called: the message that already waits for it, if one does."""
        for index, arrived in enumerate(self._unexpected):
            if _matches(receive, arrived):
                return self._unexpected.pop(index)
        self.posted.append(receive)
        return None

    def arrive(self, arrived: Arrived) -> Receiving | None:
        """A message came: the receive that waits for it, if one does; else it is kept."""
        for index, receive in enumerate(self.posted):
            if _matches(receive, arrived):
                return self.posted.pop(index)
        self._unexpected.append(arrived)
        return None

    def pending(self) -> list[Sending | Receiving]:
        return [*self.sending.values(), *self.posted, *self.receiving.values()]


def fits(receive: Receiving, arrived: Arrived) -> bool:
    """Whether the message has the size and dtype of the array that waits for it."""
    return arrived.nbytes == len(receive.data) and arrived.frame.dtype == receive.dtype


def sending(
    peer: int, channel: int, tag: int, dtype: int, number: int, array: Array, work: Work,
    deadline: float,
) -> Sending:  # fmt: skip
    return Sending(peer, channel, tag, dtype, number, as_bytes(array), work, deadline, keep=array)


def _matches(receive: Receiving, arrived: Arrived) -> bool:
    frame = arrived.frame
    return (
        frame.channel == receive.channel
        and frame.tag == receive.tag
        and receive.source in (ANY_SOURCE, arrived.source)
        and arrived.source in receive.ranks
    )
