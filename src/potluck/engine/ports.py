"""All links of one rank in one group: who may be read, who has something to write, who left.

Runs on the progress loop, except ``wake_for``. What a frame means is decided elsewhere
(``plans.py``, ``messages.py``); here bytes are moved, and a link that brings more than anybody
here waits for is left unread, so that no peer can fill this rank's memory.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Protocol

from potluck.engine.connector import Connector
from potluck.engine.fate import Fate
from potluck.engine.port import Outgoing, Port, Sink
from potluck.engine.verdict import Awaiting, peer_lost
from potluck.errors import LinkError, ProtocolError
from potluck.metrics import LinkMeter
from potluck.transport.link import Link
from potluck.wire.frames import Frame, Kind

NOTHING = memoryview(b"")

_EARLY_OVERHEAD = 256
"""What an early frame counts beside its payload, so that empty ones have a bound too."""

_EARLY_LIMIT = 4
"""How many times ``max_early_bytes`` a link may take while an operation here waits for it."""


class Pending(Awaiting, Protocol):
    """An operation under way, as far as links are concerned."""

    def needs(self, peer: int) -> bool:
        """Whether something from or for ``peer`` may still be due."""

    def missing(self, departed: Set[int]) -> int | None:
        """The rank without which it can't end, if that has departed."""


class Ports:
    """The ports of one group, by rank."""

    def __init__(
        self,
        fate: Fate,
        connector: Connector,
        *,
        max_early_bytes: int,
        meter: Callable[[str], LinkMeter],
        pending: Callable[[], Iterable[Pending]],
        wake: Callable[[int], None],
    ) -> None:
        self.by_rank: dict[int, Port] = {}
        self.departed: set[int] = set()
        self.dirty: set[int] = set()
        """Ranks for which there may be something to write."""
        self.ready: set[int] = set()
        """Ranks from which there may be something to read."""
        self.selector = selectors.DefaultSelector()
        self._fate = fate
        self._group = fate.group
        self._connector = connector
        self._max_early_bytes = max_early_bytes
        self._meter = meter
        self._pending = pending
        self._wake = wake
        self._watched: dict[int, int] = {}
        self._unsent: dict[int, deque[Outgoing]] = {}

    # -- links come and go

    def adopt(self, rank: int, link: Link) -> None:
        """A link to ``rank`` is there."""
        if rank in self.by_rank or rank in self.departed:
            link.close()
            return
        port = Port(rank, link, self._meter(f"worker {self._group.members[rank].worker}"))
        self.by_rank[rank] = port
        port.control.extend(self._unsent.pop(rank, ()))
        if link.fileno() >= 0:
            self.watch(port)
        else:
            link.bind(lambda: self._wake(rank))
        self.ready.add(rank)

    def need(self, ranks: Iterable[int]) -> None:
        """Links to these ranks are wanted."""
        for rank in ranks:
            if rank not in self.by_rank and rank not in self.departed:
                self._connector.request(rank)

    def drop(self, port: Port) -> None:
        """Close a link at once."""
        if self.by_rank.pop(port.rank, None) is None:
            return
        if self._watched.pop(port.rank, 0):
            self.selector.unregister(port.link.fileno())
        port.link.close()

    # -- bytes

    def move(
        self,
        route: Callable[[Port, Frame], Sink],
        source: Callable[[Port], Outgoing | None],
    ) -> None:
        """Read what has come and write what may go, a bounded amount per link."""
        ready, self.ready = self.ready, set()
        for rank in ready:
            port = self.by_rank.get(rank)
            if port is not None:
                self._read(port, route)
                self.dirty.add(rank)
        dirty, self.dirty = self.dirty, set()
        for rank in dirty:
            port = self.by_rank.get(rank)
            if port is not None:
                self._write(port, source)

    def tell(self, peer: int, outgoing: Outgoing) -> None:
        """Send a frame before all data; a link is made if there is none."""
        port = self.by_rank.get(peer)
        if port is None:
            self._connector.request(peer)
            self._unsent.setdefault(peer, deque()).append(outgoing)
            return
        port.control.append(outgoing)
        self.dirty.add(peer)

    def say(self, rank: int, kind: Kind) -> None:
        """Send a frame that is nothing but its kind."""
        self.tell(rank, Outgoing(Frame(kind, self._group.epoch, source=self._group.rank), NOTHING))

    def watch(self, port: Port) -> None:
        """Select on what this link can do next. A paused link is not read."""
        descriptor = port.link.fileno()
        if descriptor < 0:
            return
        events = 0 if port.is_paused else selectors.EVENT_READ
        if port.is_blocked:
            events |= selectors.EVENT_WRITE
        before = self._watched.get(port.rank, 0)
        self._watched[port.rank] = events
        if before and events:
            self.selector.modify(descriptor, events, port.rank)
        elif events:
            self.selector.register(descriptor, events, port.rank)
        elif before:
            self.selector.unregister(descriptor)

    def _read(self, port: Port, route: Callable[[Port, Frame], Sink]) -> None:
        try:
            more = port.read(route)
        except LinkError as error:
            self._ended(port, error)
            return
        except ProtocolError as error:
            self.violated(port.rank, error)
            return
        if port.is_paused:
            self.watch(port)
        elif more or port.link.readable:
            self.ready.add(port.rank)

    def _write(self, port: Port, source: Callable[[Port], Outgoing | None]) -> None:
        was_blocked = port.is_blocked
        try:
            if port.write(source):
                self.dirty.add(port.rank)
        except LinkError as error:
            self._ended(port, error)
            return
        if port.is_blocked != was_blocked:
            self.watch(port)

    # -- early frames: what came before anybody here waited for it

    def keep(
        self, port: Port, frame: Frame, then: Callable[[Port, Frame, bytearray], None]
    ) -> Sink:
        """Take a payload that nobody waits for yet into memory of its own."""
        payload = bytearray(frame.length)
        self.account(port, frame.length)
        return Sink(memoryview(payload), lambda _: then(port, frame, payload))

    def account(self, port: Port, nbytes: int) -> None:
        """A frame of ``nbytes`` from this link is kept until an operation wants it."""
        port.early_bytes += nbytes + _EARLY_OVERHEAD
        port.is_paused = self._must_wait(port)

    def release(self, peer: int, nbytes: int) -> None:
        """A kept frame of ``nbytes`` is used up."""
        port = self.by_rank.get(peer)
        if port is not None:
            port.early_bytes -= nbytes + _EARLY_OVERHEAD
            if port.is_paused:
                self.resume()

    def resume(self) -> None:
        """Something has begun or ended: perhaps a paused link may be read again."""
        for port in self.by_rank.values():
            if port.is_paused and not self._must_wait(port):
                port.is_paused = False
                self.watch(port)
                self.ready.add(port.rank)

    def _must_wait(self, port: Port) -> bool:
        """Whether to leave what this link brings where it is, for now.

        What an operation here waits for may lie behind the frames of later ones, so then more of
        those are taken: up to a limit, for a peer must not fill this rank's memory.
        """
        if port.early_bytes < self._max_early_bytes:
            return False
        if port.early_bytes >= _EARLY_LIMIT * self._max_early_bytes:
            return True
        return not any(item.needs(port.rank) for item in self._pending())

    # -- failures

    def violated(self, rank: int, error: ProtocolError) -> None:
        """What ``rank`` sent makes no sense, so nothing after it does either."""
        port = self.by_rank.get(rank)
        if port is not None:
            port.said_abort = True
        self.lose(rank, error)

    def lose(self, rank: int, error: Exception) -> None:
        """There is no use in the link to ``rank`` any more, or no way to have one."""
        current = next(iter(self._pending()), None)
        self._fate.fail(peer_lost(self._group, rank, error, current))

    def _ended(self, port: Port, error: LinkError) -> None:
        self.drop(port)
        if not port.said_goodbye:
            self.lose(port.rank, error)
            return
        self.departed.add(port.rank)
        for item in list(self._pending()):
            self.check_departed(item)

    def check_departed(self, item: Pending) -> None:
        """An operation that still needs something from a rank that left can't end."""
        gone = item.missing(self.departed)
        if gone is not None:
            left = LinkError("it left the group (its context was closed)")
            self._fate.fail(peer_lost(self._group, gone, left, item))
