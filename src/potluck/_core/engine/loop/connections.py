"""The connections of one rank in one group: readiness, I/O, and the accounting of flow control.

Runs on the progress loop. What a frame means is decided in ``plans.py`` and ``messages.py``.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Protocol

from potluck._core.engine.failures.group_errors import Awaiting, GroupState, peer_lost
from potluck._core.engine.loop.connection import Connection, Outgoing, Sink
from potluck._core.engine.loop.flow_control import FlowControl
from potluck._core.metrics import LinkMeter
from potluck._core.transport.link import Connector, Link
from potluck._core.wire.frames import Frame, Kind
from potluck.errors import LinkError, ProtocolError

NOTHING = memoryview(b"")


class Pending(Awaiting, Protocol):
    """An operation under way, as far as links are concerned."""

    def missing(self, departed: Set[int]) -> int | None:
        """The rank without which it can't end, if that has departed."""


class Connections:
    """The connections of one group, by rank."""

    def __init__(
        self,
        state: GroupState,
        connector: Connector,
        *,
        max_early_bytes: int,
        meter: Callable[[str], LinkMeter],
        pending: Callable[[], Iterable[Pending]],
        on_hold: Callable[[int], None],
        wake: Callable[[int], None],
    ) -> None:
        self.by_rank: dict[int, Connection] = {}
        self.departed: set[int] = set()
        self.dirty: set[int] = set()
        """Ranks for which there may be something to write."""
        self.ready: set[int] = set()
        """Ranks from which there may be something to read."""
        self.paused: set[int] = set()
        """Ranks whose links pause for a blocked link (``Plans._must_wait``)."""
        self.selector = selectors.DefaultSelector()
        self._state = state
        self._group = state.group
        self._connector = connector
        self._max_early_bytes = max_early_bytes
        self._meter = meter
        self._pending = pending
        self._on_hold = on_hold
        self._wake = wake
        self._watched: dict[int, int] = {}
        self._unsent: dict[int, deque[Outgoing]] = {}
        self._flows: dict[int, FlowControl] = {}

    # -- links

    def adopt(self, rank: int, link: Link) -> None:
        """Use a new link. A second link to a rank is closed at once."""
        if rank in self.by_rank or rank in self.departed:
            link.close()
            return
        connection = Connection(
            rank, link, self._meter(f"worker {self._group.members[rank].worker}")
        )
        self.by_rank[rank] = connection
        connection.control.extend(self._unsent.pop(rank, ()))
        if link.fileno() >= 0:
            self.watch(connection)
        else:
            link.bind(lambda: self._wake(rank))
        self.ready.add(rank)

    def need(self, ranks: Iterable[int]) -> None:
        """Request links to these ranks, where there are none."""
        for rank in ranks:
            if rank not in self.by_rank and rank not in self.departed:
                self._connector.request(rank)

    def drop(self, connection: Connection) -> None:
        """Close a link at once."""
        if self.by_rank.pop(connection.rank, None) is None:
            return
        if self._watched.pop(connection.rank, 0):
            self.selector.unregister(connection.link.fileno())
        connection.link.close()

    # -- bytes

    def move(
        self,
        route: Callable[[Connection, Frame], Sink],
        next_outgoing: Callable[[Connection], Outgoing | None],
    ) -> None:
        """Read and write on all links that are ready, a bounded amount per link."""
        ready, self.ready = self.ready, set()
        for rank in ready:
            connection = self.by_rank.get(rank)
            if connection is not None:
                self._read(connection, route)
                self.dirty.add(rank)
        dirty, self.dirty = self.dirty, set()
        for rank in dirty:
            connection = self.by_rank.get(rank)
            if connection is not None:
                self._write(connection, next_outgoing, route)

    def send_control(self, peer: int, outgoing: Outgoing) -> None:
        """Send a frame before all data frames; a link is requested if there is none."""
        connection = self.by_rank.get(peer)
        if connection is None:
            self._connector.request(peer)
            self._unsent.setdefault(peer, deque()).append(outgoing)
            return
        connection.control.append(outgoing)
        self.dirty.add(peer)

    def send_kind(self, rank: int, kind: Kind) -> None:
        """Send a control frame that has no fields but its kind."""
        self.send_control(
            rank, Outgoing(Frame(kind, self._group.epoch, source=self._group.rank), NOTHING)
        )

    def watch(self, connection: Connection) -> None:
        """Select on what this link can do next."""
        descriptor = connection.link.fileno()
        if descriptor < 0:
            return
        events = selectors.EVENT_READ
        if connection.is_blocked:
            events |= selectors.EVENT_WRITE
        before = self._watched.get(connection.rank, 0)
        self._watched[connection.rank] = events
        if before:
            self.selector.modify(descriptor, events, connection.rank)
        else:
            self.selector.register(descriptor, events, connection.rank)

    def _read(self, connection: Connection, route: Callable[[Connection, Frame], Sink]) -> None:
        try:
            more = connection.read(route)
        except LinkError as error:
            self._ended(connection, error)
            return
        except ProtocolError as error:
            self.violated(connection.rank, error)
            return
        if more or connection.link.readable:
            self.ready.add(connection.rank)

    def _write(
        self,
        connection: Connection,
        next_outgoing: Callable[[Connection], Outgoing | None],
        route: Callable[[Connection, Frame], Sink],
    ) -> None:
        was_blocked = connection.is_blocked
        try:
            if connection.write(next_outgoing):
                self.dirty.add(connection.rank)
        except LinkError as error:
            # The peer's ABORT may lie unread: it may name another rank, whose loss is the cause.
            self._read(connection, route)
            if self.by_rank.get(connection.rank) is connection:
                self._ended(connection, error)
            return
        if connection.is_blocked != was_blocked:
            self.watch(connection)
        # A blocked link has room again: the links that paused for it may go on.
        if was_blocked and not connection.is_blocked:
            self.dirty |= self.paused
            self.paused.clear()

    # -- early frames, and the credit for them (flow_control.py)

    def keep(
        self,
        connection: Connection,
        frame: Frame,
        then: Callable[[Connection, Frame, bytearray], None],
    ) -> Sink:
        """The sink of a payload that no operation takes yet: memory of its own."""
        payload = bytearray(frame.length)
        return Sink(memoryview(payload), lambda _: then(connection, frame, payload))

    def flow(self, rank: int) -> FlowControl:
        """The flow control of the link to ``rank``."""
        flow = self._flows.get(rank)
        if flow is None:
            flow = self._flows[rank] = FlowControl(self._max_early_bytes)
        return flow

    def forget(self, channel: int) -> None:
        """Forget what peers have begun on ``channel``."""
        for flow in self._flows.values():
            flow.forget(channel)

    def consume(self, rank: int, nbytes: int) -> None:
        """A frame of ``rank`` has been used: return its credit, if enough has gathered."""
        credit = self.flow(rank).consume(nbytes)
        if credit and rank in self.by_rank:
            frame = Frame(Kind.CREDIT, self._group.epoch, sequence=credit, source=self._group.rank)
            self.send_control(rank, Outgoing(frame, NOTHING))

    def hold(self, rank: int, nbytes: int) -> None:
        """A frame of ``rank`` must be kept: no operation here takes it yet."""
        self.flow(rank).hold(nbytes)
        self._on_hold(rank)

    def release(self, rank: int, nbytes: int) -> None:
        """A frame of ``rank`` that was kept has been used."""
        self.flow(rank).release(nbytes)
        self.consume(rank, nbytes)

    def on_credit(self, connection: Connection, frame: Frame, _: memoryview) -> None:
        """The peer returns credit (CREDIT): frames that waited for credit may go."""
        self.flow(connection.rank).add_credit(frame.sequence)
        self.dirty.add(connection.rank)

    # -- failures

    def violated(self, rank: int, error: ProtocolError) -> None:
        """``rank`` has broken the protocol, so that nothing after it on its link can be trusted."""
        connection = self.by_rank.get(rank)
        if connection is not None:
            connection.has_aborted = True
        self.lose(rank, error)

    def lose(self, rank: int, error: Exception) -> None:
        """The link to ``rank`` is lost, or can't be had: end the group."""
        current = next(iter(self._pending()), None)
        self._state.fail(peer_lost(self._group, rank, error, current))

    def _ended(self, connection: Connection, error: LinkError) -> None:
        self.drop(connection)
        if not connection.has_closed:
            self.lose(connection.rank, error)
            return
        self.departed.add(connection.rank)
        for item in list(self._pending()):
            self.check_departed(item)

    def check_departed(self, item: Pending) -> None:
        """End the group if ``item`` still needs something from a rank that left."""
        gone = item.missing(self.departed)
        if gone is not None:
            left = LinkError("it left the group (its context was closed)")
            self._state.fail(peer_lost(self._group, gone, left, item))
