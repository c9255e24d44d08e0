"""The connections of one rank in one group: readiness, I/O, and the accounting of flow control.

A connection is the framing layer over one link: frames in, frames out, no policy. It keeps the
state of half-done transfers: a header or payload half read, a frame half written, the free slots of
link memory. It never blocks: ``read`` and ``write`` go on until the link would block, or until
``BUDGET`` bytes have moved, so that no link starves the others.

All runs on the progress loop. What a frame means is decided in ``plans.py`` and ``messages.py``.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import numpy as np

from potluck._core.engine.failures.group_errors import Awaiting, GroupState, peer_lost
from potluck._core.engine.loop.flow_control import FlowControl
from potluck._core.metrics import LinkMeter
from potluck._core.transport.link import Connector, Link
from potluck._core.wire import frames
from potluck._core.wire.frames import FRAME_BYTES, IN_LINK_MEMORY, Frame, Kind
from potluck.errors import LinkError, ProtocolError

BUDGET = 8 * 1024 * 1024
"""Bytes that one call of ``read`` or ``write`` moves at most, about. Tuned for this loop; the
native loop's is 2 MiB (docs/dev/found-out.md)."""

_MERGE_BYTES = 8 * 1024
"""Payloads up to this size are copied behind their header, so that both take one write."""

_LINK_MEMORY_BYTES = 4 * 1024
"""Payloads from this size on travel through link memory, where there is any."""


class Outgoing(NamedTuple):
    """A frame to write. The payload is not copied: its memory must stay unchanged until ``sent`` is
    called."""

    frame: Frame
    payload: memoryview
    sent: Callable[[], None] | None = None


class Sink(NamedTuple):
    """Where a payload goes, and what to do once it is there.

    ``buffer`` None means: ``complete`` reads the payload where it already lies.
    """

    buffer: memoryview | None
    complete: Callable[[memoryview], None]


class Connection:
    """This rank's end of the link to rank ``rank``."""

    def __init__(self, rank: int, link: Link, meter: LinkMeter) -> None:
        self.rank = rank
        self.link = link
        self.meter = meter
        self.control: deque[Outgoing] = deque()
        """Frames that go before any that ``write`` asks for."""
        self.has_closed = False
        """The peer will send nothing more."""
        self.is_acknowledged = False
        """The peer has read all that this side sent before its own CLOSE."""
        self.is_blocked = False
        """The link took less than offered; wait until it is writable."""
        self.has_aborted = False
        """ABORT was received, or is not to be waited for."""
        memory = link.memory
        self._slots: deque[int] = deque(range(memory.num_slots) if memory else ())
        self._unreleased: set[int] = set()
        self._writing: deque[memoryview] = deque()
        self._sent: Callable[[], None] | None = None
        self._header = memoryview(bytearray(FRAME_BYTES))
        self._part = self._header  # what is being read: a header or a payload
        self._filled = 0
        self._sink: Sink | None = None
        self._target = memoryview(b"")
        self._small = memoryview(bytearray(frames.MAX_CONTROL))
        self._scratch = memoryview(b"")

    # -- outgoing

    @property
    def is_writing(self) -> bool:
        return bool(self._writing or self.control)

    def uses_link_memory(self, nbytes: int) -> bool:
        """Whether the payload of a DATA or PIECE frame would travel through link memory."""
        memory = self.link.memory
        return memory is not None and _LINK_MEMORY_BYTES <= nbytes <= memory.slot_bytes

    def can_start(self, nbytes: int) -> bool:
        """Whether a payload of this size could start now (link memory may be out of slots)."""
        return not self._writing and (not self.uses_link_memory(nbytes) or bool(self._slots))

    def write(self, next_outgoing: Callable[[Connection], Outgoing | None]) -> bool:
        """Write ``control``, then the frames that ``next_outgoing`` gives, until the link would
        block, there are no more, or the budget is spent.

        Returns True if there may be more to write at once.
        """
        budget = BUDGET
        self.is_blocked = False
        while budget > 0:
            if not self._writing:
                outgoing = self.control.popleft() if self.control else next_outgoing(self)
                if outgoing is None:
                    return False
                budget -= self._start(outgoing)
            while self._writing:
                data = self._writing[0]
                taken = self.link.send(data)
                if taken == 0:
                    self.is_blocked = True
                    return False
                self.meter.bytes_sent += taken
                budget -= taken
                if taken == len(data):
                    self._writing.popleft()
                else:
                    self._writing[0] = data[taken:]
            sent, self._sent = self._sent, None
            if sent is not None:
                sent()
        return True

    def _start(self, outgoing: Outgoing) -> int:
        """Begin to write a frame; returns the bytes that went through link memory."""
        frame, payload, sent = outgoing
        self.meter.messages_sent += 1
        nbytes = len(payload)
        memory = self.link.memory
        if (
            memory is not None
            and frame.kind in frames.LINK_MEMORY_KINDS
            and self.uses_link_memory(nbytes)
            and self._slots
        ):
            slot = self._slots.popleft()
            # The frame that follows over the socket orders these stores: the receiver reads the
            # slot only after that frame, and the locks of the kernel's socket make the send happen
            # before the receive. So the slots need no locks.
            _copy(memory.outgoing(slot)[:nbytes], payload)
            self.meter.bytes_sent += nbytes
            self.meter.bytes_in_shared_memory += nbytes
            frame = frame._replace(flags=frame.flags | IN_LINK_MEMORY, tag=slot)
            self._writing.append(memoryview(frames.encode(frame)))
            if sent is not None:
                sent()  # the payload has been copied: its memory is free
            return nbytes
        if nbytes <= _MERGE_BYTES:
            self._writing.append(memoryview(b"".join((frames.encode(frame), payload))))
        else:
            self._writing.append(memoryview(frames.encode(frame)))
            self._writing.append(payload)
        self._sent = sent
        return 0

    # -- incoming

    def scratch(self, nbytes: int) -> memoryview:
        """Memory for one payload that is combined rather than stored, valid until its end."""
        if len(self._scratch) < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]

    def read(self, route: Callable[[Connection, Frame], Sink]) -> bool:
        """Read frames until the link would block or the budget is spent; ``route`` gives the sink
        of each payload.

        Returns True if there may be more to read at once.
        """
        budget = BUDGET
        while budget > 0:
            taken = self.link.recv_into(self._part[self._filled :])
            if taken == 0:
                return False
            budget -= taken
            self.meter.bytes_received += taken
            self._filled += taken
            if self._filled < len(self._part):
                continue
            self._filled = 0
            if self._part is self._header:
                self._begin(frames.decode(self._header), route)
            else:
                self._end()
        return True

    def _begin(self, frame: Frame, route: Callable[[Connection, Frame], Sink]) -> None:
        self.meter.messages_received += 1
        if frame.kind is Kind.SLOT_FREE:
            self._free_slot(frame.tag)
            return
        if frame.flags & IN_LINK_MEMORY:
            memory = self.link.memory
            if memory is None or frame.length > memory.slot_bytes:
                raise ProtocolError(
                    "a frame points to a link-memory slot that this link does not have"
                )
            payload = memory.incoming(frame.tag)[: frame.length]
            slot = frame.tag
            if slot in self._unreleased:
                raise ProtocolError(f"link-memory slot {slot} was used again before it was free")
            self.meter.bytes_received += frame.length
            sink = route(self, frame)
            if sink.buffer is not None:
                _copy(sink.buffer, payload)
                payload = sink.buffer
            sink.complete(payload)
            # The slot is the peer's again once SLOT_FREE has been sent. A peer that names the slot
            # before has not waited for SLOT_FREE, and may have overwritten the payload while it was
            # read here.
            self._unreleased.add(slot)
            free = Frame(Kind.SLOT_FREE, frame.epoch, tag=slot)
            self.control.append(
                Outgoing(free, memoryview(b""), lambda: self._unreleased.discard(slot))
            )
            return
        sink = route(self, frame)
        self._sink = sink
        self._target = self._small[: frame.length] if sink.buffer is None else sink.buffer
        assert len(self._target) == frame.length
        self._part = self._target
        if not frame.length:
            self._end()

    def _end(self) -> None:
        sink = self._sink
        assert sink is not None
        self._sink, self._part = None, self._header
        sink.complete(self._target)

    def _free_slot(self, slot: int) -> None:
        memory = self.link.memory
        if memory is None or not 0 <= slot < memory.num_slots or slot in self._slots:
            raise ProtocolError(f"link-memory slot {slot} was freed, which is not in use")
        self._slots.append(slot)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the interpreter lock (a slice assignment would)."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


NOTHING = memoryview(b"")


class Pending(Awaiting, Protocol):
    """An operation under way, as far as links are concerned."""

    def missing(self, departed: Set[int]) -> int | None:
        """The rank without which it can't end, if that has departed."""


@dataclass(eq=False, repr=False)
class Connections:
    """The connections of one group, by rank."""

    state: GroupState
    connector: Connector
    _: KW_ONLY
    max_early_bytes: int
    meter: Callable[[str], LinkMeter]
    pending: Callable[[], Iterable[Pending]]
    on_hold: Callable[[int], None]
    wake: Callable[[int], None]

    def __post_init__(self) -> None:
        self.by_rank: dict[int, Connection] = {}
        self.departed: set[int] = set()
        self.dirty: set[int] = set()
        """Ranks for which there may be something to write."""
        self.ready: set[int] = set()
        """Ranks from which there may be something to read."""
        self.paused: set[int] = set()
        """Ranks whose links pause for a blocked link (``Plans._must_wait``)."""
        self.selector = selectors.DefaultSelector()
        self._group = self.state.group
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
            rank, link, self.meter(f"worker {self._group.members[rank].worker}")
        )
        self.by_rank[rank] = connection
        connection.control.extend(self._unsent.pop(rank, ()))
        if link.fileno() >= 0:
            self.watch(connection)
        else:
            link.bind(lambda: self.wake(rank))
        self.ready.add(rank)

    def need(self, ranks: Iterable[int]) -> None:
        """Request links to these ranks, where there are none."""
        for rank in ranks:
            if rank not in self.by_rank and rank not in self.departed:
                self.connector.request(rank)

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
            self.connector.request(peer)
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
            flow = self._flows[rank] = FlowControl(self.max_early_bytes)
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
        self.on_hold(rank)

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
        current = next(iter(self.pending()), None)
        self.state.fail(peer_lost(self._group, rank, error, current))

    def _ended(self, connection: Connection, error: LinkError) -> None:
        self.drop(connection)
        if not connection.has_closed:
            self.lose(connection.rank, error)
            return
        self.departed.add(connection.rank)
        for item in list(self.pending()):
            self.check_departed(item)

    def check_departed(self, item: Pending) -> None:
        """End the group if ``item`` still needs something from a rank that left."""
        gone = item.missing(self.departed)
        if gone is not None:
            left = LinkError("it left the group (its context was closed)")
            self.state.fail(peer_lost(self._group, gone, left, item))
