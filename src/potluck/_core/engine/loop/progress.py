"""The progress loop: one thread that moves all bytes of one group.

User threads post operations and wait; this loop owns every link and all state of the group, so
nothing in it is locked. One turn: take what was posted, read what has come, write what may go,
fail what is overdue. Links are in ``connections.py``, collectives in ``plans.py``, point-to-point
messages in ``messages.py``.

The first failure ends the group: every operation under way and every later one raises the same
error. Every peer is informed before its link is closed (ABORT frames, passed on once by each rank),
so no rank waits for its deadline to learn what another already knows.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from potluck._core.background import start_thread, why
from potluck._core.engine import patience
from potluck._core.engine.arrays.layout import Array, Buffers
from potluck._core.engine.failures.group_errors import GroupState, abort_of, broke, error_of
from potluck._core.engine.loop.connections import Connection, Connections, Outgoing, Sink
from potluck._core.engine.loop.flow_control import FRAME_OVERHEAD
from potluck._core.engine.loop.mailbox import Receiving, Sending
from potluck._core.engine.loop.messages import Messages
from potluck._core.engine.loop.plans import OnOperation, Plans
from potluck._core.engine.loop.running import CompiledPlan, RunningPlan
from potluck._core.engine.work import Work
from potluck._core.metrics import LinkMeter
from potluck._core.system import wait_ready
from potluck._core.transport.link import Connector, Link
from potluck._core.types import Group
from potluck._core.wire import frames
from potluck._core.wire.frames import IN_LINK_MEMORY, Frame, Kind
from potluck.errors import GroupClosed, GroupError, PotluckError, ProtocolError

_FLUSH_S = 0.2
"""How long a failing group tries to tell its peers before it closes the links."""


def send_abort(state: GroupState, connections: Connections, drain_wake: Callable[[], None]) -> None:
    """Tell every linked peer why the group is over, within a bound.

    Until this returns, the callers' arrays belong to the loop: a half-written frame must be
    completed with the bytes that it began with, because a peer finds the ABORT only behind a whole
    frame. Each link is read until the peer's own ABORT or the link's end: closing it over unread
    bytes would reset the connection, and the peer would lose the reason and blame this rank.
    """
    error = state.error
    if not isinstance(error, GroupError) or isinstance(error, GroupClosed):
        return
    header, body = _abort_frame(state.group, error)
    for connection in connections.by_rank.values():
        connection.control.clear()
        connection.control.append(Outgoing(header, memoryview(body)))
    deadline = time.monotonic() + _FLUSH_S
    while connections.by_rank and (left := deadline - time.monotonic()) > 0:
        more = [
            _flush_abort(connections, connection)
            for connection in list(connections.by_rank.values())
        ]
        if connections.by_rank:
            connections.selector.select(0.0 if any(more) else left)
            drain_wake()


def reject(state: GroupState, link: Link) -> None:
    """Close a link that was made after the group ended: send the reason, and give the peer the time
    to read it."""
    until = time.monotonic() + _FLUSH_S
    scratch = memoryview(bytearray(64 * 1024))
    with contextlib.suppress(PotluckError):
        link.send(memoryview(_final_frame(state)))
        if link.fileno() >= 0:  # in-process links keep what was sent when they are closed
            while (left := until - time.monotonic()) > 0:
                wait_ready(link.fileno(), write=False, timeout_s=left)
                while link.recv_into(scratch):
                    pass
    link.close()


def _flush_abort(connections: Connections, connection: Connection) -> bool:
    """Write to the peer and read from it as far as possible; True if there is more to do at
    once."""
    try:
        more = connection.write(lambda _: None)
        if not connection.has_aborted:
            more |= connection.read(_discard) or connection.link.readable
    except PotluckError:
        connections.drop(connection)
        return False
    if connection.has_aborted and not connection.is_writing:
        connections.drop(connection)
        return False
    connections.watch(connection)
    return more


def _discard(connection: Connection, frame: Frame) -> Sink:
    """The sink of frames that come once the group is over: they are dropped."""
    if frame.kind is Kind.ABORT:
        connection.has_aborted = True
    is_small = frame.length <= frames.MAX_CONTROL
    buffer = None if is_small or frame.flags & IN_LINK_MEMORY else connection.scratch(frame.length)
    return Sink(buffer, lambda _: None)


def _final_frame(state: GroupState) -> bytes:
    error, group = state.error, state.group
    frame, body = Frame(Kind.CLOSE, group.epoch, source=group.rank), b""
    if isinstance(error, GroupError) and not isinstance(error, GroupClosed):
        frame, body = _abort_frame(group, error)
    return frames.encode(frame) + body


def _abort_frame(group: Group, error: GroupError) -> tuple[Frame, bytes]:
    body = frames.encode_abort(abort_of(error))
    return Frame(Kind.ABORT, group.epoch, length=len(body), source=group.rank), body


_log = logging.getLogger(__name__)

_CLOSE_S = 1.0
"""How long an orderly close waits for CLOSE_ACK: a stopped or dead peer must not hold it up."""

_IDLE_S = 5.0

Handler = Callable[[Connection, Frame, memoryview], None]


class ProgressLoop:
    """The data plane of one rank in one group (and in that group's sub-groups)."""

    def __init__(
        self,
        group: Group,
        connector: Connector,
        *,
        segment_bytes: int,
        max_early_bytes: int,
        on_operation: OnOperation,
        meter: Callable[[str], LinkMeter],
    ) -> None:
        self.group = group
        self.segment_bytes = segment_bytes
        self._connector = connector
        self._on_operation = on_operation
        self._state = GroupState(group)
        self._connections = Connections(
            self._state,
            connector,
            # With less than three segments of credit a sender would stop until each CREDIT comes.
            max_early_bytes=max(max_early_bytes, 3 * (segment_bytes + FRAME_OVERHEAD)),
            meter=meter,
            pending=self._wanted,
            on_hold=lambda rank: self._plans.tell_begun(rank),
            wake=self._wake_for,
        )
        self._plans = Plans(self._state, self._connections, on_operation)
        self._messages = Messages(self._state, self._connections, segment_bytes)
        self._handlers: dict[Kind, Handler] = {
            Kind.RTS: self._messages.on_rts,
            Kind.CTS: self._messages.on_cts,
            Kind.HANG_QUERY: self._plans.on_hang_query,
            Kind.HANG_REPORT: self._plans.on_hang_report,
            Kind.CREDIT: self._connections.on_credit,
            Kind.BEGUN: self._plans.on_begun,
            Kind.ABORT: self._on_abort,
            Kind.CLOSE: self._on_close,
            Kind.CLOSE_ACK: self._on_close_ack,
        }
        self._closing: float | None = None
        self._late: list[Link] = []
        # What other threads may touch, under the lock.
        self._lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken: deque[int] = deque()
        self._is_awake = False
        self._is_over = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._connections.selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = start_thread(
            self._run,
            name=f"potluck-progress-{group.rank}",
            on_broken=lambda error: self._state.fail(self._broke(error)),
        )
        connector.start(self._deliver, self._no_link)

    # -- called from any thread

    @property
    def error(self) -> BaseException | None:
        """Why the group is over, None while it is not."""
        return self._state.error

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once ``error`` is set; it must not block."""
        self._state.when_over(callback)

    def ongoing(self) -> list[Hashable]:
        """A name for each operation under way, the same for as long as it is."""
        calls = [("call", each.channel, each.sequence) for each in [*self._plans.pending()]]
        return [*calls, *(id(message) for message in self._messages.pending())]

    def start(
        self,
        plan: CompiledPlan,
        buffers: Buffers,
        work: Work,
        sequence: int,
        deadline: float,
        residual: Array | None = None,
    ) -> None:
        """Run a plan as call number ``sequence`` of its channel; ``work`` ends with the result or
        an error. ``residual`` is what the plan's codec has lost before, if that is kept."""
        running = RunningPlan(
            plan, buffers, sequence=sequence, deadline=deadline, work=work, residual=residual
        )
        self._post(lambda: self._begin(work, lambda: self._plans.begin(running)))

    def send(self, sending: Sending) -> None:
        """Send a message; its work ends when its memory may be reused."""
        self._post(lambda: self._begin(sending.work, lambda: self._messages.send(sending)))

    def receive(self, receiving: Receiving) -> None:
        """Take the first message that matches."""
        self._post(lambda: self._begin(receiving.work, lambda: self._messages.receive(receiving)))

    def leave(self, channel: int, next_sequence: int) -> None:
        """Forget a channel that this rank has left, once its calls under way have ended."""
        self._post(lambda: self._plans.leave(channel, next_sequence))

    def abort(self, error: PotluckError) -> None:
        """End the group with ``error`` on every rank."""
        self._post(lambda: self._state.fail(error))

    def close(self) -> None:
        """Leave in order: what was sent arrives, nothing new begins. Idempotent."""
        self._post(self._begin_close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self._inbox.append(command)
                self._wake()
                return
        command()  # nothing runs any more: it finds the group over and says so

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(BlockingIOError):
                self._wake_writer.send(b"\0")

    def _wake_for(self, rank: int) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self._woken.append(rank)
                self._wake()

    def _deliver(self, rank: int, link: Link) -> None:
        self._post(lambda: self._adopt(rank, link))

    def _no_link(self, rank: int, error: Exception) -> None:
        self._post(lambda: self._connections.lose(rank, error))

    # -- the loop

    def _run(self) -> None:
        try:
            # An overflow is inf, as everywhere in floating point: no warning, whatever the filters.
            with np.errstate(all="ignore"):
                while not self._should_end():
                    self._turn()
        except BaseException as error:
            self._state.fail(self._broke(error))
            raise
        finally:
            self._end()

    def _broke(self, error: BaseException) -> GroupError:
        return broke(self.group, "the progress loop", why(error))

    def _turn(self) -> None:
        connections = self._connections
        for key, _ in connections.selector.select(self._patience()):
            if key.data is None:
                self._drain_wake()
            else:
                connections.ready.add(key.data)
        while self._woken:
            connections.ready.add(self._woken.popleft())
        while self._inbox:
            # Removed only when it has run: if it breaks this loop, _end runs what is left, so that
            # the caller that waits for it gets the error.
            self._inbox[0]()
            self._inbox.popleft()
        connections.move(self._route, self._next_outgoing)
        now = time.monotonic()
        if self._closing is None and now >= patience.held_until():
            self._plans.check_deadlines(now)
            self._messages.check_deadlines(now)

    def _patience(self) -> float:
        """Seconds until there is something to do, if nothing is read or posted before."""
        if self._connections.ready or self._connections.dirty or self._inbox or self._woken:
            return 0.0
        if self._closing is not None:
            times = [self._closing]
        else:
            deadlines = (item.deadline for item in self._messages.pending())
            held_until = patience.held_until()
            times = [max(each, held_until) for each in (*self._plans.wake_times(), *deadlines)]
        if not times:
            return _IDLE_S
        return max(0.0, min(_IDLE_S, min(times) - time.monotonic()))

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        # The inbox is looked at after this line. A thread that posts before it finds the loop awake
        # and is served in this turn; a thread that posts after it wakes the loop again.
        self._is_awake = False

    def _pending(self) -> Iterable[RunningPlan | Sending | Receiving]:
        yield from self._plans.pending()
        yield from self._messages.pending()

    def _wanted(self) -> Iterable[RunningPlan | Sending | Receiving]:
        """What is under way and not given up. A rank that is leaving gives all up, so no peer that
        ends now is lost to it."""
        return self._pending() if self._closing is None else ()

    def _begin(self, work: Work, begin: Callable[[], None]) -> None:
        """Begin an operation, unless the group is over or being left."""
        if self._state.error is not None:
            work.finish(self._state.error)
        elif self._closing is not None:
            work.finish(self._state.closed())
        else:
            begin()

    def _adopt(self, rank: int, link: Link) -> None:
        if self._state.error is None:
            self._connections.adopt(rank, link)
            if self._closing is not None:  # the link was made while this rank was leaving
                self._connections.send_kind(rank, Kind.CLOSE)
        elif threading.current_thread() is self._thread:
            self._late.append(link)  # rejected at the very end: waiting callers come first
        else:
            reject(self._state, link)

    # -- frames

    def _next_outgoing(self, connection: Connection) -> Outgoing | None:
        if self._closing is not None:
            return None
        return self._messages.next_outgoing(connection) or self._plans.next_outgoing(connection)

    def _route(self, connection: Connection, frame: Frame) -> Sink:
        """Where the payload of an arriving frame goes, and what is done once it is there."""
        if frame.epoch != self.group.epoch:
            raise ProtocolError(f"a frame of epoch {frame.epoch} in epoch {self.group.epoch}")
        if frame.source != connection.rank:
            raise ProtocolError(
                f"a frame of rank {frame.source} on the link to rank {connection.rank}"
            )
        if frame.kind is Kind.DATA:
            return self._plans.route(connection, frame)
        if frame.kind is Kind.EAGER:
            return self._messages.keep_eager(connection, frame)
        if frame.kind is Kind.PIECE:
            return self._messages.route_piece(connection, frame)
        handler = self._handlers[frame.kind]
        return Sink(None, lambda payload: handler(connection, frame, payload))

    def _on_abort(self, connection: Connection, _: Frame, payload: memoryview) -> None:
        abort = frames.decode_abort(bytes(payload))
        connection.has_aborted = True
        self._state.fail(error_of(self.group, abort, next(iter(self._pending()), None)))

    def _on_close(self, connection: Connection, _: Frame, __: memoryview) -> None:
        if connection.has_closed:
            raise ProtocolError("a second CLOSE")
        connection.has_closed = True
        # Frames are read in order, so all that the peer sent before its CLOSE has been read here.
        self._connections.send_kind(connection.rank, Kind.CLOSE_ACK)

    def _on_close_ack(self, connection: Connection, _: Frame, __: memoryview) -> None:
        connection.is_acknowledged = True

    # -- the end

    def _begin_close(self) -> None:
        """Begin the close handshake: CLOSE to every peer, which answers CLOSE_ACK.

        Operations under way here are given up. A peer whose operations need this rank raises
        PeerLost when the link ends; the others go on without this rank.
        """
        if self._closing is not None or self._state.error is not None:
            return
        self._closing = time.monotonic() + _CLOSE_S
        for rank in self._connections.by_rank:
            self._connections.send_kind(rank, Kind.CLOSE)

    def _should_end(self) -> bool:
        if self._state.error is not None:
            return True
        if self._closing is None:
            return False
        connections = self._connections.by_rank.values()
        # CLOSE_ACK means that the peer has read all that was sent to it. Before that a link must
        # not be closed: with bytes unread on either side the system resets the connection, and the
        # peer would lose the last frames of operations that ended well here.
        settled = all(
            connection.is_acknowledged and not connection.is_writing for connection in connections
        )
        return settled or time.monotonic() >= self._closing

    def _end(self) -> None:
        """Send ABORT if the group failed, then end every operation, so that no caller waits for
        ever, whatever breaks here."""
        try:
            send_abort(self._state, self._connections, self._drain_wake)
        except Exception:
            _log.exception("could not tell the peers why epoch %d ended", self.group.epoch)
        self._state.fail(self._state.closed())
        with self._lock:
            self._is_over.set()
        while self._inbox:
            self._inbox.popleft()()
        for item in list(self._pending()):
            if isinstance(item, RunningPlan):
                seconds = time.monotonic() - item.started
                self._on_operation(item.compiled, seconds, self.error, item.num_beyond)
            item.work.finish(self.error)
        for connection in list(self._connections.by_rank.values()):
            self._connections.drop(connection)
        self._connector.close(self.error or self._state.closed())
        for link in self._late:
            reject(self._state, link)
        self._connections.selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
