"""The collectives under way on one rank: segments in, segments out, each checked before it counts.

A frame carries the number and the fingerprint of its call. A frame that comes before this rank has
made the call, or before its memory is ready, is kept (``early``); a frame that the plan does not
receive next from this peer ends the group, and one with another fingerprint does so with Desync on
every rank. Runs on the progress loop. What a plan allows next is decided in ``running.py``.

Hang detection: which rank holds up an operation that does not end. The neighbour that a rank waits
for is seldom to blame: it may itself wait for another. So ranks ask each other which of them have
made the call.

- *Stalled*: an operation that has run for ``STALL_S`` sends HANG_QUERY with its call's fingerprint
  to the ranks that it waits for. A rank in another call sees the mismatch and raises Desync.
  Without this query two ranks in different calls could wait for each other and never exchange a
  frame.
- *Overdue*: an operation past its deadline sends HANG_QUERY with ``segment`` 1 to all members. A
  receiver that is in the call sends the query on over its own links, because not every pair of
  ranks has a link; the answers (HANG_REPORT: has rank r made this call?) return the same way.

A rank that reports that it has not called is the blocking rank. A rank without a report after
``ANSWER_S`` is one too, but only then: a busy rank answers late, a dead or stopped rank never.
``HangDetector`` keeps what was reported; it sends nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from potluck._core.engine.call import Call
from potluck._core.engine.failures.group_errors import GroupState, desync, overdue
from potluck._core.engine.loop.connections import NOTHING, Connection, Connections, Outgoing, Sink
from potluck._core.engine.loop.running import CompiledPlan, RunningPlan, Segment, as_bytes
from potluck._core.wire.dtypes import code_of
from potluck._core.wire.frames import IN_LINK_MEMORY, Frame, Kind
from potluck.errors import ProtocolError

STALL_S = 0.25
ANSWER_S = 1.0
_MAX_CHECKS = 64

Key = tuple[int, int]
"""Channel and number of an operation."""


@dataclass(slots=True)
class HangCheck:
    """What is known of one operation: ``reports[rank]`` is whether that rank has made the call."""

    askers: set[int] = field(default_factory=set)
    reports: dict[int, bool] = field(default_factory=dict)

    def blocking_rank(self, ranks: Iterable[int], awaited: Iterable[int], *, final: bool) -> int:
        """The rank that holds the operation up, -1 if none is known (yet).

        ``ranks`` are all other members, ``awaited`` those that this rank waits for. ``final``: the
        time for answers is over, so a missing report counts against its rank.
        """
        for rank, has_called in self.reports.items():
            if not has_called:
                return rank
        if not final:
            return -1
        # Of several silent ranks one that this rank waits for comes first: its silence is known to
        # matter, another's may only come of a broken way between.
        silent = [rank for rank in ranks if rank not in self.reports]
        return next((rank for rank in awaited if rank in silent), silent[0] if silent else -1)


class HangDetector:
    """The latest checks, at most 64: a peer may ask about operations that do not exist."""

    def __init__(self) -> None:
        self._by_key: dict[Key, HangCheck] = {}

    def get(self, key: Key) -> HangCheck | None:
        return self._by_key.get(key)

    def open(self, key: Key) -> tuple[HangCheck, bool]:
        """The check of operation ``key``, and whether it is new."""
        check = self._by_key.get(key)
        if check is not None:
            return check, False
        if len(self._by_key) >= _MAX_CHECKS:
            del self._by_key[next(iter(self._by_key))]
        check = self._by_key[key] = HangCheck()
        return check, True


_MAX_UNREAD = 1024
"""How many reports may wait to be read by a peer that queries more, and how many of the peers'
queries about calls that this rank has not made are kept."""

_NUM_REMEMBERED = 16
"""How many ended calls of a channel are kept, to say what a late frame disagrees with."""

_NUM_LEFT = 256
"""How many channels that this rank has left are known, for queries and frames of peers that lag."""

OnOperation = Callable[[CompiledPlan, float, BaseException | None, int], None]
"""Told of every collective that ended: the seconds it took, and its error."""


class Plans:
    """The plans of one rank that run now, over all channels of its group."""

    def __init__(
        self, state: GroupState, connections: Connections, on_operation: OnOperation
    ) -> None:
        self._state = state
        self._group = state.group
        self._connections = connections
        self._on_operation = on_operation
        self._running: dict[Key, RunningPlan] = {}
        self._next_sequence: dict[int, int] = {}
        """By channel: the number of the next call."""
        self._left: dict[int, int] = {}
        """The same of channels that this rank has left: the latest."""
        self._ended: dict[int, deque[tuple[int, Call]]] = {}
        self._early: dict[Key, dict[int, deque[tuple[Frame, bytearray]]]] = {}
        self._queries: dict[Key, dict[int, int]] = {}
        self._hangs = HangDetector()

    def begin(self, running: RunningPlan) -> None:
        """Run a plan; its work ends with the result, or with the group."""
        running.started = time.monotonic()
        key = (running.channel, running.sequence)
        self._running[key] = running
        if running.sequence >= self._left.get(running.channel, running.sequence + 1):
            del self._left[running.channel]  # entered again: calls from before have lower numbers
        self._next_sequence[running.channel] = running.sequence + 1
        self._connections.need((*running.send_peers, *running.receive_peers))
        # Frames of this call that came before the call: compared now, applied by _advance as the
        # plan allows. Their credit returns, since a plan bounds what may still come for it.
        for peer, queue in self._early.pop(key, {}).items():
            for frame, payload in queue:
                self._connections.release(peer, frame.length)
                if not self._keep_waiting(running, peer, frame, payload):
                    return
        for peer, theirs in self._queries.pop(key, {}).items():
            if theirs != running.call.fingerprint:
                self._state.fail(desync(self._group, peer, running, theirs))
                return
        self._connections.dirty.update(running.send_peers)
        self._advance(running)
        if self._connections.departed and key in self._running:
            self._connections.check_departed(running)
        for peer in running.receive_peers:
            self.tell_begun(peer)

    def leave(self, channel: int, next_sequence: int) -> None:
        """This rank has left ``channel`` (of a sub-group), whose next call would have this number.
        What is known of it goes when its calls under way have ended. A later call means that the
        rank has entered it again."""
        self._left.pop(channel, None)
        self._left[channel] = next_sequence
        if len(self._left) > _NUM_LEFT:
            del self._left[next(iter(self._left))]
        if not self._is_running(channel):
            self._forget(channel)

    def _is_running(self, channel: int) -> bool:
        return any(running.channel == channel for running in self._running.values())

    def _forget(self, channel: int) -> None:
        self._next_sequence.pop(channel, None)
        self._ended.pop(channel, None)
        self._connections.forget(channel)

    def _was_called(self, frame: Frame) -> bool:
        """Whether this rank has made the call that ``frame`` names."""
        next_sequence = self._next_sequence.get(frame.channel, 0)
        return frame.sequence < max(next_sequence, self._left.get(frame.channel, 0))

    def _note_begun(self, peer: int, frame: Frame) -> None:
        """``peer`` has begun a call, which is of no use if this rank has made it and left."""
        is_over = frame.sequence < self._left.get(frame.channel, 0)
        if not is_over or self._is_running(frame.channel):
            self._connections.flow(peer).has_begun(frame.channel, frame.sequence)

    def check_deadlines(self, now: float) -> None:
        """Ask about operations that stall, and end the group over one that is overdue."""
        for running in self._oldest():
            if not running.has_queried and now >= running.started + STALL_S:
                running.has_queried = True
                self._query(running, [peer for peer, _ in running.awaited()], pass_on=False)
        late = self._next_overdue()
        if late is not None and now >= late.deadline:
            self._diagnose(late, now)

    def wake_times(self) -> Iterator[float]:
        """When ``check_deadlines`` has something to do (monotonic seconds)."""
        for running in self._oldest():
            if not running.has_queried:
                yield running.started + STALL_S
        late = self._next_overdue()
        if late is not None:
            yield late.deadline

    def _oldest(self) -> list[RunningPlan]:
        """The first operation of each channel. Later operations of the channel may be waiting for
        it only, so they are not queried."""
        first: dict[int, RunningPlan] = {}
        for running in self._running.values():
            first.setdefault(running.channel, running)
        return list(first.values())

    def _next_overdue(self) -> RunningPlan | None:
        """The operation whose deadline comes next; an overdue one that was queried comes first."""
        return min(
            self._running.values(),
            key=lambda running: (not running.is_overdue, running.deadline),
            default=None,
        )

    def pending(self) -> Iterable[RunningPlan]:
        """The operations under way, the oldest first."""
        return self._running.values()

    # -- segments out

    def next_outgoing(self, connection: Connection) -> Outgoing | None:
        """The next segment that may go over this link, None if there is none now."""
        peer, flow = connection.rank, self._connections.flow(connection.rank)
        if self._state.error is not None:
            return None
        # The oldest operation first, so that it ends first. One that can send nothing on this link
        # now does not hold up the later ones (rule 3).
        for running in self._running.values():
            segment = running.next_send(peer)
            if segment is None:
                continue
            nbytes = running.wire_bytes(segment)
            if not connection.can_start(nbytes):
                continue
            if not flow.may_send(running.channel, running.sequence, nbytes):
                continue
            if self._must_wait(running, peer):
                continue
            flow.sent(nbytes)
            running.issue(peer, segment)
            return Outgoing(
                Frame(
                    Kind.DATA,
                    self._group.epoch,
                    running.channel,
                    segment.chunk,
                    running.sequence,
                    segment.number,
                    nbytes,
                    running.call.fingerprint,
                    self._group.rank,
                    code_of(segment.data.dtype),
                ),
                running.payload(segment),
                partial(self._sent, running, segment),
            )
        return None

    def _must_wait(self, running: RunningPlan, peer: int) -> bool:
        """Flow balancing: whether ``peer``'s link must pause for one that lags behind.

        A rank's links share one network interface. If one link runs ahead, the slowest is left
        alone at the end, and one link alone can't fill the wire. So a link that is more than one
        segment ahead of a *blocked* link pauses until that link has room. Only blocked links
        count: a link that merely has nothing to send yet must not hold up the others (rule 3).
        """
        for other in running.send_peers:
            connection = self._connections.by_rank.get(other)
            if connection is not None and connection.is_blocked and running.is_ahead(peer, other):
                self._connections.paused.add(peer)
                return True
        return False

    def _sent(self, running: RunningPlan, segment: Segment) -> None:
        running.sent(segment)
        self._advance(running)

    def _advance(self, running: RunningPlan) -> None:
        """Apply early frames that have become due; wake the links; end what is complete."""
        key = (running.channel, running.sequence)
        moved = True
        while moved and running.early and self._state.error is None:
            moved = False
            for peer in list(running.early):
                moved |= self._apply_early(running, peer)
        self._connections.dirty.update(running.send_peers)
        if running.is_complete and self._running.pop(key, None) is not None:
            self._ended.setdefault(running.channel, deque(maxlen=_NUM_REMEMBERED)).append(
                (running.sequence, running.call)
            )
            if running.channel in self._left and not self._is_running(running.channel):
                self._forget(running.channel)
            running.conclude()
            seconds = time.monotonic() - running.started
            self._on_operation(running.compiled, seconds, None, running.num_beyond)
            running.work.finish()

    # -- segments in

    def route(self, connection: Connection, frame: Frame) -> Sink:
        """Where the payload of a DATA frame goes."""
        # A peer that sends frames of a call has begun it, so frames of that call need no credit.
        self._note_begun(connection.rank, frame)
        running = self._running.get((frame.channel, frame.sequence))
        if running is None:
            if frame.sequence < self._next_sequence.get(frame.channel, 0):
                self._on_late(connection, frame)
            self._connections.hold(connection.rank, frame.length)
            return self._connections.keep(connection, frame, self._on_early)
        # The call has begun here, so its frames need no credit: what this frame has cost returns at
        # once, even if the payload must be kept as an early frame. The plan bounds what can still
        # come for the call. A sender that stopped for lack of credit here could deadlock.
        self._connections.consume(connection.rank, frame.length)
        segment = self._expected(running, connection.rank, frame)
        if segment is None or connection.rank in running.early or not running.is_ready(segment):
            return self._connections.keep(connection, frame, self._on_waiting)
        if frame.flags & IN_LINK_MEMORY:
            buffer = None
        elif running.is_stored(segment):
            buffer = as_bytes(segment.data)
        else:
            buffer = connection.scratch(frame.length)
        in_place = buffer is not None and running.is_stored(segment)

        def complete(payload: memoryview) -> None:
            running.arrived(connection.rank, segment)
            running.apply(segment, None if in_place else payload)
            self._advance(running)

        return Sink(buffer, complete)

    def _on_early(self, connection: Connection, frame: Frame, payload: bytearray) -> None:
        """A frame has been read whose operation had not begun when its header came."""
        key = (frame.channel, frame.sequence)
        if key not in self._running:
            self._early.setdefault(key, {}).setdefault(connection.rank, deque()).append(
                (frame, payload)
            )
            return
        self._connections.release(connection.rank, frame.length)
        self._on_waiting(connection, frame, payload)

    def _on_waiting(self, connection: Connection, frame: Frame, payload: bytearray) -> None:
        """A frame has been read whose memory was not ready when its header came."""
        running = self._running.get((frame.channel, frame.sequence))
        if running is None:
            self._on_late(connection, frame)
        elif self._keep_waiting(running, connection.rank, frame, payload):
            self._advance(running)

    def _keep_waiting(
        self, running: RunningPlan, peer: int, frame: Frame, payload: bytearray
    ) -> bool:
        """Keep a frame until the plan comes to it; False (and a failed group) if it never will.

        Only the frame that the plan receives next from this peer is kept. So all that a peer can
        make this rank keep for a call is what the plan receives from it.
        """
        segment = self._expected(running, peer, frame)
        if segment is None:
            return False
        running.arrived(peer, segment)
        running.early.setdefault(peer, deque()).append((segment, payload))
        return True

    def _apply_early(self, running: RunningPlan, peer: int) -> bool:
        queue = running.early[peer]
        moved = False
        while queue and running.is_ready(queue[0][0]):
            running.apply(*queue.popleft())
            moved = True
        if not queue:
            del running.early[peer]
        return moved

    def _expected(self, running: RunningPlan, peer: int, frame: Frame) -> Segment | None:
        """The segment that ``frame`` must be, as the next one of ``peer`` in the plan; None (and a
        failed group) if it is another one."""
        if frame.fingerprint != running.call.fingerprint:
            self._state.fail(desync(self._group, peer, running, frame.fingerprint))
            return None
        segment = running.next_receive(peer)
        if (
            segment is None
            or (frame.chunk, frame.segment) != (segment.chunk, segment.number)
            or frame.length != running.wire_bytes(segment)
            or frame.dtype != code_of(segment.data.dtype)
        ):
            # Equal fingerprints, so equal calls: the peer's engine is broken, not its script.
            what = f"segment {frame.segment} of chunk {frame.chunk}, which is not due"
            self._connections.violated(peer, ProtocolError(f"it sent {what}"))
            return None
        return segment

    def tell_begun(self, peer: int) -> None:
        """Tell ``peer`` which calls have begun here (BEGUN) if it may soon lack credit for them."""
        if peer not in self._connections.by_rank or not self._connections.flow(peer).is_filling:
            return
        for running in self._running.values():
            if peer in running.receive_peers and peer not in running.told_begun:
                running.told_begun.add(peer)
                frame = Frame(
                    Kind.BEGUN,
                    self._group.epoch,
                    running.channel,
                    sequence=running.sequence,
                    source=self._group.rank,
                )
                self._connections.send_control(peer, Outgoing(frame, NOTHING))

    def on_begun(self, connection: Connection, frame: Frame, _: memoryview) -> None:
        """A peer has begun a call (BEGUN): that call's frames need no credit any more."""
        self._note_begun(connection.rank, frame)
        self._connections.dirty.add(connection.rank)

    # -- disagreements

    def _on_late(self, connection: Connection, frame: Frame) -> None:
        """A frame of an operation that has ended here: the peer must have made another call."""
        if not self._disagrees(connection.rank, frame):
            raise ProtocolError(f"a frame of operation #{frame.sequence}, which has ended")

    def _disagrees(self, peer: int, frame: Frame) -> bool:
        """Whether ``frame`` is of another call than this rank's (then the group has failed)."""
        running = self._running.get((frame.channel, frame.sequence))
        calls = [(frame.sequence, running.call)] if running else self._ended.get(frame.channel, ())
        for number, call in calls:
            if number == frame.sequence and call.fingerprint != frame.fingerprint:
                mine = f"{call} #{number}"
                self._state.fail(desync(self._group, peer, mine, frame.fingerprint))
                return True
        return False

    # -- operations that do not end

    def _query(self, running: RunningPlan, peers: Iterable[int], *, pass_on: bool) -> None:
        frame = Frame(
            Kind.HANG_QUERY,
            self._group.epoch,
            running.channel,
            sequence=running.sequence,
            segment=int(pass_on),
            fingerprint=running.call.fingerprint,
            source=self._group.rank,
        )
        for peer in set(peers):
            if peer in self._connections.by_rank:
                self._connections.send_control(peer, Outgoing(frame, NOTHING))

    def _diagnose(self, running: RunningPlan, now: float) -> None:
        """``running`` is overdue: find the blocking rank, and end the group with its name."""
        check, _ = self._hangs.open((running.channel, running.sequence))
        is_first, running.is_overdue = not running.is_overdue, True
        others = [rank for rank in running.peers if rank != self._group.rank]
        awaited = [peer for peer, _ in running.awaited()]
        blocking_rank = check.blocking_rank(
            others, awaited, final=now >= running.deadline and not is_first
        )
        # The first time no rank has been asked yet: ask, and move the deadline by the time for
        # answers. From then on the group ends with the first report of a rank that has not made the
        # call; or once every rank has reported that it has (all are in the call, and slow); or at
        # the moved deadline, and then a silent rank is to blame.
        if blocking_rank < 0 and is_first:
            running.deadline = now + ANSWER_S
            self._query(running, others, pass_on=True)
        elif blocking_rank >= 0 or now >= running.deadline or check.reports.keys() >= set(others):
            self._state.fail(overdue(self._group, running, blocking_rank))

    def on_hang_query(self, connection: Connection, frame: Frame, _: memoryview) -> None:
        """A peer names the call that it waits in, and may ask which ranks have made it
        (HANG_QUERY)."""
        if self._disagrees(connection.rank, frame):
            return
        key = (frame.channel, frame.sequence)
        running = self._running.get(key)
        has_called = self._was_called(frame)
        # The peer's call only stalls. _disagrees has compared it with this rank's call; if this
        # rank has not made it yet, the fingerprint is kept for begin(). No answer is sent.
        if not frame.segment:
            if not has_called and (key in self._queries or len(self._queries) < _MAX_UNREAD):
                self._queries.setdefault(key, {})[connection.rank] = frame.fingerprint
            return
        if len(connection.control) >= _MAX_UNREAD:
            raise ProtocolError(
                f"it sends hang queries and reads no report ({len(connection.control)} wait)"
            )
        check, is_new = self._hangs.open(key)
        self._report(connection.rank, key, self._group.rank, has_called)
        # Reports of other ranks that have come already: the peer may have no link to those ranks.
        for rank, called in check.reports.items():
            self._report(connection.rank, key, rank, called)
        check.askers.add(connection.rank)
        # A query is passed on once for each operation, or queries would circle for ever.
        if is_new and running is not None:
            others = set(running.peers) - {self._group.rank, connection.rank}
            self._query(running, others, pass_on=True)

    def on_hang_report(self, connection: Connection, frame: Frame, _: memoryview) -> None:
        """A peer reports whether some rank has made a call (HANG_REPORT)."""
        key = (frame.channel, frame.sequence)
        check = self._hangs.get(key)
        rank, has_called = frame.chunk, bool(frame.segment)
        if check is None or rank in check.reports or rank >= self._group.world_size:
            return
        if rank == self._group.rank:
            return
        # The first report about a rank counts. It is passed on to all askers but the one that sent
        # it, so each report crosses a link at most once in each direction, and the exchange ends.
        check.reports[rank] = has_called
        for asker in check.askers - {connection.rank}:
            self._report(asker, key, rank, has_called)
        running = self._running.get(key)
        if running is not None and running.is_overdue:
            self._diagnose(running, time.monotonic())

    def _report(self, peer: int, key: Key, rank: int, has_called: bool) -> None:
        frame = Frame(
            Kind.HANG_REPORT,
            self._group.epoch,
            key[0],
            sequence=key[1],
            chunk=rank,
            segment=int(has_called),
            source=self._group.rank,
        )
        if peer in self._connections.by_rank:
            self._connections.send_control(peer, Outgoing(frame, NOTHING))
