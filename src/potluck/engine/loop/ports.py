"""All links of one rank in one group: who may be read, who has something to write, who left.

Runs on the progress loop, except ``wake_for``. What a frame means is decided elsewhere
(``plans.py``, ``messages.py``); here bytes are moved, and counted where ranks run apart
(``share.py``).
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Protocol

from potluck.engine.connector import Connector
from potluck.engine.failures.fate import Fate
from potluck.engine.failures.verdict import Awaiting, peer_lost
from potluck.engine.loop.port import Outgoing, Port, Sink
from potluck.engine.loop.share import Share
from potluck.errors import LinkError, ProtocolError
from potluck.metrics import LinkMeter
from potluck.transport.link import Link
from potluck.wire.frames import Frame, Kind

NOTHING = memoryview(b"")


class Pending(Awaiting, Protocol):
    """An operation under way, as far as links are concerned."""

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
        on_hold: Callable[[int], None],
        wake: Callable[[int], None],
    ) -> None:
        self.by_rank: dict[int, Port] = {}
        self.departed: set[int] = set()
        self.dirty: set[int] = set()
        """Ranks for which there may be something to write."""
        self.ready: set[int] = set()
        """Ranks from which there may be something to read."""
        self.held: set[int] = set()
        """Ranks that wait until a link that is full has room again."""
        self.selector = selectors.DefaultSelector()
        self._fate = fate
        self._group = fate.group
        self._connector = connector
        self._max_early_bytes = max_early_bytes
        self._meter = meter
        self._pending = pending
        self._on_hold = on_hold
        self._wake = wake
        self._watched: dict[int, int] = {}
        self._unsent: dict[int, deque[Outgoing]] = {}
        self._shares: dict[int, Share] = {}

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
                self._write(port, source, route)

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
        """Select on what this link can do next."""
        descriptor = port.link.fileno()
        if descriptor < 0:
            return
        events = selectors.EVENT_READ
        if port.is_blocked:
            events |= selectors.EVENT_WRITE
        before = self._watched.get(port.rank, 0)
        self._watched[port.rank] = events
        if before:
            self.selector.modify(descriptor, events, port.rank)
        else:
            self.selector.register(descriptor, events, port.rank)

    def _read(self, port: Port, route: Callable[[Port, Frame], Sink]) -> None:
        try:
            more = port.read(route)
        except LinkError as error:
            self._ended(port, error)
            return
        except ProtocolError as error:
            self.violated(port.rank, error)
            return
        if more or port.link.readable:
            self.ready.add(port.rank)

    def _write(
        self,
        port: Port,
        source: Callable[[Port], Outgoing | None],
        route: Callable[[Port, Frame], Sink],
    ) -> None:
        was_blocked = port.is_blocked
        try:
            if port.write(source):
                self.dirty.add(port.rank)
        except LinkError as error:
            self._read(port, route)  # its last words may name another rank, which it has lost
            if self.by_rank.get(port.rank) is port:
                self._ended(port, error)
            return
        if port.is_blocked != was_blocked:
            self.watch(port)
        if was_blocked and not port.is_blocked:
            self.dirty |= self.held
            self.held.clear()

    # -- early frames: what came before anybody here waited for it

    def keep(
        self, port: Port, frame: Frame, then: Callable[[Port, Frame, bytearray], None]
    ) -> Sink:
        """Take a payload that nobody waits for yet into memory of its own."""
        payload = bytearray(frame.length)
        return Sink(memoryview(payload), lambda _: then(port, frame, payload))

    def share(self, rank: int) -> Share:
        """How far this rank and ``rank`` may run apart."""
        share = self._shares.get(rank)
        if share is None:
            share = self._shares[rank] = Share(self._max_early_bytes)
        return share

    def use(self, rank: int, nbytes: int) -> None:
        """A frame of ``rank`` has found its use here."""
        report = self.share(rank).use(nbytes)
        if report and rank in self.by_rank:
            frame = Frame(Kind.USED, self._group.epoch, operation=report, source=self._group.rank)
            self.tell(rank, Outgoing(frame, NOTHING))

    def hold(self, rank: int, nbytes: int) -> None:
        """A frame of ``rank`` must be kept: nobody here waits for it yet."""
        self.share(rank).hold(nbytes)
        self._on_hold(rank)

    def release(self, rank: int, nbytes: int) -> None:
        """A frame of ``rank`` that had to be kept has found its use here."""
        self.share(rank).release(nbytes)
        self.use(rank, nbytes)

    def on_used(self, port: Port, frame: Frame, _: memoryview) -> None:
        """A peer has used what was sent to it (USED)."""
        self.share(port.rank).reported(frame.operation)
        self.dirty.add(port.rank)

    # -- failures

    def violated(self, rank: int, error: ProtocolError) -> None:
        """What ``rank`` sent makes no sense, so nothing after it does either."""
        port = self.by_rank.get(rank)
        if port is not None:
            port.said_abort = not port.is_garbled
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
