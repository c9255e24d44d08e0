"""The progress loop: one thread that moves all bytes of one group.

User threads post operations and wait; this loop owns every link and all state of the group, so
nothing here is locked. One turn: take what was posted, read what has come, write what may go,
fail what is overdue. What a plan allows next is decided in ``running.py``, how a frame crosses a
link in ``port.py``, who gets a point-to-point message in ``mailbox.py``.

The first failure ends the group: every operation under way and every later one raises the same
error, and every peer is told (ABORT frames, passed on once by each rank), so no rank waits for
its deadline to learn what another already knows.
"""

from __future__ import annotations

import contextlib
import logging
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from potluck.engine.call import Call
from potluck.engine.connector import Connector
from potluck.engine.inquest import ANSWER_S, STALL_S, Inquests, Key
from potluck.engine.mailbox import Arrived, Mailbox, Receiving, Sending, mismatch
from potluck.engine.port import Outgoing, Port, Sink
from potluck.engine.running import RunningPlan, Segment, as_bytes, from_bytes
from potluck.engine.verdict import (
    abort_of,
    desync,
    error_of,
    overdue,
    peer_lost,
)
from potluck.errors import GroupClosed, GroupError, LinkError, PotluckError, ProtocolError
from potluck.metrics import LinkMeter
from potluck.transport.link import Link
from potluck.types import Group
from potluck.wire import frames
from potluck.wire.dtypes import code_of
from potluck.wire.frames import EAGER_BYTES, IN_WINDOW, Frame, Kind

_log = logging.getLogger(__name__)

_FLUSH_S = 0.2
"""How long a failing group tries to tell its peers before it closes the links."""

_FAREWELL_S = 1.0
"""How long an orderly close waits for every peer to have everything."""

_EARLY_OVERHEAD = 256
"""What an early frame counts beside its payload, so that empty ones have a bound too."""

_EARLY_LIMIT = 4
"""How many times ``max_early_bytes`` a link may take while an operation here waits for it."""

_MAX_UNREAD = 1024
"""How many answers may wait for a peer that asks for more."""

_NUM_REMEMBERED = 16
"""How many ended calls of a channel are kept, to say what a late frame disagrees with."""

_NOTHING = memoryview(b"")

Pending = RunningPlan | Sending | Receiving


class ProgressLoop:
    """The data plane of one rank in one group (and in that group's sub-groups)."""

    def __init__(
        self,
        group: Group,
        connector: Connector,
        *,
        segment_bytes: int,
        max_early_bytes: int,
        on_operation: Callable[[RunningPlan, float, BaseException | None], None],
        meter: Callable[[str], LinkMeter],
    ) -> None:
        self.group = group
        self.segment_bytes = segment_bytes
        self._connector = connector
        self._max_early_bytes = max_early_bytes
        self._on_operation = on_operation
        self._meter = meter
        self._error: BaseException | None = None
        self._ports: dict[int, Port] = {}
        self._departed: set[int] = set()
        self._running: dict[tuple[int, int], RunningPlan] = {}
        self._posted: dict[int, int] = {}
        self._ended: dict[int, deque[tuple[int, Call]]] = {}
        self._early: dict[tuple[int, int], dict[int, deque[tuple[Frame, bytearray]]]] = {}
        self._asked: dict[Key, dict[int, int]] = {}
        self._inquests = Inquests()
        self._mailbox = Mailbox()
        self._message = 0
        self._dirty: set[int] = set()
        self._ready: set[int] = set()
        self._woken: deque[int] = deque()
        self._watched: dict[int, int] = {}
        self._unsent: dict[int, deque[Outgoing]] = {}
        self._closing: float | None = None
        self._late: list[Link] = []
        self._inbox: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._is_awake = False
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread = threading.Thread(
            target=self._run, name=f"potluck-progress-{group.rank}", daemon=True
        )
        self._thread.start()
        connector.start(self._deliver, self._no_link)

    # -- called from any thread

    @property
    def error(self) -> BaseException | None:
        """Why the group is over, None while it is not."""
        return self._error

    def start(self, running: RunningPlan) -> None:
        """Run a plan; its work ends with the result or an error."""
        self._post(lambda: self._begin(running), running.work)

    def send(self, sending: Sending) -> None:
        self._post(lambda: self._begin_send(sending), sending.work)

    def receive(self, receiving: Receiving) -> None:
        self._post(lambda: self._begin_receive(receiving), receiving.work)

    def abort(self, error: PotluckError) -> None:
        """End the group with ``error`` on every rank."""
        self._post(lambda: self._fail(error), None)

    def close(self) -> None:
        """Leave in order: what was sent arrives, nothing new begins. Idempotent."""
        self._post(self._begin_close, None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[], None], work: Any) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self._inbox.append(command)
                self._wake()
                return
        if work is not None:
            work.finish(self._error)

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(BlockingIOError):
                self._wake_writer.send(b"\0")

    def _deliver(self, rank: int, link: Link) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self._inbox.append(lambda: self._adopt(rank, link))
                self._wake()
                return
        self._turn_away(link)

    def _turn_away(self, link: Link) -> None:
        """A link came too late: say why, and let the peer read that before the link is gone."""
        error = self._error
        assert error is not None
        until = time.monotonic() + _FLUSH_S
        scratch = memoryview(bytearray(64 * 1024))
        with contextlib.suppress(PotluckError):
            link.send(memoryview(self._last_words(error)))
            if link.fileno() >= 0:  # in-process links keep what was sent when they are closed
                poll = select.poll()
                poll.register(link.fileno(), select.POLLIN)
                while (left := until - time.monotonic()) > 0:
                    poll.poll(left * 1000)
                    while link.recv_into(scratch):
                        pass
        link.close()

    def _last_words(self, error: BaseException) -> bytes:
        if not isinstance(error, GroupError) or isinstance(error, GroupClosed):
            return frames.encode(Frame(Kind.GOODBYE, self.group.epoch, source=self.group.rank))
        body = frames.encode_abort(abort_of(error))
        frame = Frame(Kind.ABORT, self.group.epoch, length=len(body), source=self.group.rank)
        return frames.encode(frame) + body

    def _no_link(self, rank: int, error: Exception) -> None:
        self._post(lambda: self._fail(peer_lost(self.group, rank, error, self._current())), None)

    # -- the loop

    def _run(self) -> None:
        try:
            # An overflow is inf, as everywhere in floating point: no warning, whatever the filters.
            with np.errstate(all="ignore"):
                while not self._should_end():
                    self._turn()
        except BaseException as error:
            _log.exception("the progress loop of %s broke", self.group.describe(self.group.rank))
            self._set_error(
                GroupError(
                    f"potluck's progress loop on {self.group.describe(self.group.rank)} broke: "
                    f"{type(error).__name__}: {error}; please report this",
                    rank=self.group.rank,
                    epoch=self.group.epoch,
                )
            )
        finally:
            self._end()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            rank = key.data
            if rank is None:
                self._drain_wake()
            else:
                self._ready.add(rank)
        while self._woken:
            self._ready.add(self._woken.popleft())
        while self._inbox:
            self._inbox.popleft()()
        ready, self._ready = self._ready, set()
        for rank in ready:
            port = self._ports.get(rank)
            if port is not None:
                self._read(port)
                self._dirty.add(rank)
        dirty, self._dirty = self._dirty, set()
        for rank in dirty:
            port = self._ports.get(rank)
            if port is not None:
                self._write(port)
        self._check_deadlines()

    def _patience(self) -> float:
        if self._ready or self._dirty or self._inbox or self._woken:
            return 0.0
        deadlines = [item.deadline for item in self._pending()]
        stalls = (each.started + STALL_S for each in self._running.values() if not each.has_asked)
        deadlines.extend(stalls)
        if self._closing is not None:
            deadlines.append(self._closing)
        if not deadlines:
            return 5.0
        return max(0.0, min(5.0, min(deadlines) - time.monotonic()))

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        # Only now: whoever posted before this line is served in this turn, later ones wake again.
        self._is_awake = False

    def _pending(self) -> Iterable[Pending]:
        yield from self._running.values()
        yield from self._mailbox.pending()

    def _current(self) -> Pending | None:
        return next(iter(self._pending()), None)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for item in list(self._pending()):
            if isinstance(item, RunningPlan):
                if not item.has_asked and now >= item.started + STALL_S:
                    item.has_asked = True
                    self._ask(item, [peer for peer, _ in item.awaited()], pass_on=False)
                if now >= item.deadline:
                    self._inquire(item, now)
            elif now >= item.deadline:
                self._fail(overdue(self.group, item))

    # -- links

    def _adopt(self, rank: int, link: Link) -> None:
        if self._error is not None:
            self._late.append(link)
            return
        if rank in self._ports or rank in self._departed:
            link.close()
            return
        port = Port(rank, link, self._meter(f"worker {self.group.members[rank].worker}"))
        self._ports[rank] = port
        port.control.extend(self._unsent.pop(rank, ()))
        if link.fileno() >= 0:
            self._watch(port)
        else:
            link.bind(lambda: self._wake_for(rank))
        self._ready.add(rank)
        if self._closing is not None:  # it came while this rank was leaving: say so in order
            self._say(rank, Kind.GOODBYE)

    def _wake_for(self, rank: int) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self._woken.append(rank)
                self._wake()

    def _need(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._ports and rank not in self._departed:
                self._connector.request(rank)

    def _drop(self, port: Port) -> None:
        if self._ports.pop(port.rank, None) is None:
            return
        if self._watched.pop(port.rank, 0):
            self._selector.unregister(port.link.fileno())
        port.link.close()

    def _read(self, port: Port) -> None:
        try:
            more = port.read(self._route)
        except LinkError as error:
            self._link_ended(port, error)
            return
        except ProtocolError as error:
            self._violated(port.rank, error)
            return
        if port.is_paused:
            self._watch(port)
        elif more or port.link.readable:
            self._ready.add(port.rank)

    def _violated(self, rank: int, error: ProtocolError) -> None:
        """What ``rank`` sent makes no sense, so nothing after it does either."""
        port = self._ports.get(rank)
        if port is not None:
            port.said_abort = True
        self._fail(peer_lost(self.group, rank, error, self._current()))

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

    def _resume(self) -> None:
        """Something has begun or ended: perhaps a paused link may be read again."""
        for port in self._ports.values():
            if port.is_paused and not self._must_wait(port):
                port.is_paused = False
                self._watch(port)
                self._ready.add(port.rank)

    def _write(self, port: Port) -> None:
        was_blocked = port.is_blocked
        try:
            if port.write(self._next_outgoing):
                self._dirty.add(port.rank)
        except LinkError as error:
            self._link_ended(port, error)
            return
        if port.is_blocked != was_blocked:
            self._watch(port)

    def _watch(self, port: Port) -> None:
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
            self._selector.modify(descriptor, events, port.rank)
        elif events:
            self._selector.register(descriptor, events, port.rank)
        elif before:
            self._selector.unregister(descriptor)

    def _link_ended(self, port: Port, error: LinkError) -> None:
        self._drop(port)
        if not port.said_goodbye:
            self._fail(peer_lost(self.group, port.rank, error, self._current()))
            return
        self._departed.add(port.rank)
        for item in list(self._pending()):
            self._check_departed(item)

    def _check_departed(self, item: Pending) -> None:
        """An operation that still needs something from a rank that left can't end."""
        needed = [peer for peer in self._departed if item.needs(peer)]
        if isinstance(item, Receiving) and item.source < 0 and item.matched < 0:
            others = set(item.ranks) - {self.group.rank}
            needed = sorted(others)[:1] if others <= self._departed else []
        if needed:
            gone = LinkError("it left the group (its context was closed)")
            self._fail(peer_lost(self.group, needed[0], gone, item))

    # -- collectives

    def _begin(self, running: RunningPlan) -> None:
        if self._refuse(running.work):
            return
        running.started = time.monotonic()
        key = (running.channel, running.sequence)
        self._running[key] = running
        self._posted[running.channel] = running.sequence + 1
        self._need((*running.send_peers, *running.receive_peers))
        for peer, queue in self._early.pop(key, {}).items():
            if queue[0][0].fingerprint != running.call.fingerprint:
                self._fail(desync(self.group, peer, running))
                return
            running.early[peer] = queue
        for peer, fingerprint in self._asked.pop(key, {}).items():
            self._release(peer, 0)
            if fingerprint != running.call.fingerprint:
                self._fail(desync(self.group, peer, running))
                return
        self._dirty.update(running.send_peers)
        self._advance(running)
        if self._departed and key in self._running:
            self._check_departed(running)
        self._resume()

    def _refuse(self, work: Any) -> bool:
        if self._error is None and self._closing is not None:
            work.finish(self._closed_error())
            return True
        if self._error is not None:
            work.finish(self._error)
            return True
        return False

    def _advance(self, running: RunningPlan) -> None:
        """Apply early frames that have become due; wake the links; end what is complete."""
        key = (running.channel, running.sequence)
        moved = True
        while moved and running.early and self._error is None:
            moved = False
            for peer in list(running.early):
                moved |= self._apply_early(running, peer)
        self._dirty.update(running.send_peers)
        if running.is_complete and self._running.pop(key, None) is not None:
            self._ended.setdefault(running.channel, deque(maxlen=_NUM_REMEMBERED)).append(
                (running.sequence, running.call)
            )
            running.conclude()
            self._on_operation(running, time.monotonic() - running.started, None)
            running.work.finish()

    def _apply_early(self, running: RunningPlan, peer: int) -> bool:
        queue = running.early[peer]
        moved = False
        while queue:
            frame, payload = queue[0]
            segment = self._due(running, peer, frame)
            if segment is None or not running.is_ready(segment):
                break
            queue.popleft()
            running.received(peer, segment, from_bytes(payload, segment.data.dtype))
            self._release(peer, len(payload))
            moved = True
        if not queue:
            del running.early[peer]
        return moved

    def _release(self, peer: int, nbytes: int) -> None:
        port = self._ports.get(peer)
        if port is not None:
            port.early_bytes -= nbytes + _EARLY_OVERHEAD
            if port.is_paused:
                self._resume()

    def _due(self, running: RunningPlan, peer: int, frame: Frame) -> Segment | None:
        """The segment that ``frame`` must be; None (and a failed group) if it is another one."""
        if frame.fingerprint != running.call.fingerprint:
            self._fail(desync(self.group, peer, running))
            return None
        segment = running.next_receive(peer)
        if (
            segment is None
            or (frame.chunk, frame.segment) != (segment.chunk, segment.number)
            or frame.length != segment.data.nbytes
            or frame.dtype != code_of(segment.data.dtype)
        ):
            # Equal fingerprints, so equal calls: the peer's engine is broken, not its script.
            what = f"segment {frame.segment} of chunk {frame.chunk}, which is not due"
            self._violated(peer, ProtocolError(f"it sent {what}"))
            return None
        return segment

    def _next_outgoing(self, port: Port) -> Outgoing | None:
        peer = port.rank
        granted = self._mailbox.granted.get(peer)
        if granted:
            return self._next_piece(port, granted)
        if self._error is not None:
            return None
        for running in self._running.values():
            segment = running.next_send(peer)
            if segment is None or not port.can_take(segment.data.nbytes):
                continue
            running.issue(peer, segment)
            return Outgoing(
                Frame(
                    Kind.DATA,
                    self.group.epoch,
                    running.channel,
                    segment.chunk,
                    running.sequence,
                    segment.number,
                    segment.data.nbytes,
                    running.call.fingerprint,
                    self.group.rank,
                    code_of(segment.data.dtype),
                ),
                as_bytes(segment.data),
                partial(self._sent, running, segment),
            )
        return None

    def _sent(self, running: RunningPlan, segment: Segment) -> None:
        running.sent(segment)
        self._advance(running)

    # -- arriving frames

    def _route(self, port: Port, frame: Frame) -> Sink:
        if frame.epoch != self.group.epoch:
            raise ProtocolError(f"a frame of epoch {frame.epoch} in epoch {self.group.epoch}")
        if frame.source != port.rank:
            raise ProtocolError(f"a frame of rank {frame.source} on the link to rank {port.rank}")
        if frame.kind is Kind.DATA:
            return self._route_data(port, frame)
        if frame.kind is Kind.EAGER:
            return self._keep(port, frame, self._on_eager)
        if frame.kind is Kind.PIECE:
            return self._route_piece(port, frame)
        handlers: dict[Kind, Callable[[Port, Frame, memoryview], None]] = {
            Kind.REQUEST: self._on_request,
            Kind.GRANT: self._on_grant,
            Kind.ABORT: self._on_abort,
            Kind.GOODBYE: self._on_goodbye,
            Kind.FAREWELL: self._on_farewell,
            Kind.ASK: self._on_ask,
            Kind.TELL: self._on_tell,
        }
        handler = handlers[frame.kind]
        return Sink(None, lambda payload: handler(port, frame, payload))

    def _keep(
        self, port: Port, frame: Frame, then: Callable[[Port, Frame, bytearray], None]
    ) -> Sink:
        """Take a payload that nobody waits for yet into memory of its own."""
        payload = bytearray(frame.length)
        self._account(port, frame.length)
        return Sink(memoryview(payload), lambda _: then(port, frame, payload))

    def _account(self, port: Port, nbytes: int) -> None:
        port.early_bytes += nbytes + _EARLY_OVERHEAD
        port.is_paused = self._must_wait(port)

    def _route_data(self, port: Port, frame: Frame) -> Sink:
        running = self._running.get((frame.channel, frame.operation))
        if running is None or port.rank in running.early:
            if running is None and frame.operation < self._posted.get(frame.channel, 0):
                self._on_late(port, frame)
            return self._keep(port, frame, self._on_early)
        segment = self._due(running, port.rank, frame)
        if segment is None or not running.is_ready(segment):
            return self._keep(port, frame, self._on_early)
        if frame.flags & IN_WINDOW:
            buffer = None
        elif running.combines(segment):
            buffer = port.scratch(frame.length)
        else:
            buffer = as_bytes(segment.data)
        in_place = buffer is not None and not running.combines(segment)

        def complete(payload: memoryview) -> None:
            theirs = None if in_place else from_bytes(payload, segment.data.dtype)
            running.received(port.rank, segment, theirs)
            self._advance(running)

        return Sink(buffer, complete)

    def _on_late(self, port: Port, frame: Frame) -> None:
        """A frame of an operation that has ended here: the peer must have made another call."""
        if not self._disagrees(port.rank, frame):
            raise ProtocolError(f"a frame of operation #{frame.operation}, which has ended")

    def _disagrees(self, peer: int, frame: Frame) -> bool:
        """Whether ``frame`` is of another call than this rank's (then the group has failed)."""
        running = self._running.get((frame.channel, frame.operation))
        calls = [(frame.operation, running.call)] if running else self._ended.get(frame.channel, ())
        for number, call in calls:
            if number == frame.operation and call.fingerprint != frame.fingerprint:
                self._fail(desync(self.group, peer, f"{call} #{number}"))
                return True
        return False

    def _on_early(self, port: Port, frame: Frame, payload: bytearray) -> None:
        key = (frame.channel, frame.operation)
        running = self._running.get(key)
        if running is None:
            self._early.setdefault(key, {}).setdefault(port.rank, deque()).append((frame, payload))
            return
        running.early.setdefault(port.rank, deque()).append((frame, payload))
        self._advance(running)

    # -- operations that do not end

    def _ask(self, running: RunningPlan, peers: Iterable[int], *, pass_on: bool) -> None:
        frame = Frame(
            Kind.ASK,
            self.group.epoch,
            running.channel,
            operation=running.sequence,
            segment=int(pass_on),
            fingerprint=running.call.fingerprint,
            source=self.group.rank,
        )
        for peer in set(peers):
            if peer in self._ports:
                self._tell(peer, Outgoing(frame, _NOTHING))

    def _inquire(self, running: RunningPlan, now: float) -> None:
        """``running`` is overdue: ask who holds it up, and end the group when that is known."""
        inquest, _ = self._inquests.open((running.channel, running.sequence))
        is_first, running.is_overdue = not running.is_overdue, True
        others = [rank for rank in running.peers if rank != self.group.rank]
        awaited = [peer for peer, _ in running.awaited()]
        culprit = inquest.culprit(others, awaited, final=now >= running.deadline and not is_first)
        if culprit < 0 and is_first:
            running.deadline = now + ANSWER_S
            self._ask(running, others, pass_on=True)
        elif culprit >= 0 or now >= running.deadline or inquest.heard.keys() >= set(others):
            self._fail(overdue(self.group, running, culprit))

    def _on_ask(self, port: Port, frame: Frame, _: memoryview) -> None:
        if self._disagrees(port.rank, frame):
            return
        key = (frame.channel, frame.operation)
        running = self._running.get(key)
        has_called = frame.operation < self._posted.get(frame.channel, 0)
        if not frame.segment:
            if not has_called and port.rank not in self._asked.setdefault(key, {}):
                self._account(port, 0)
                self._asked[key][port.rank] = frame.fingerprint
            return
        if len(port.control) >= _MAX_UNREAD:
            raise ProtocolError(f"it asks and asks, and reads no answer ({len(port.control)} wait)")
        inquest, is_new = self._inquests.open(key)
        self._answer(port.rank, key, self.group.rank, has_called)
        for rank, called in inquest.heard.items():
            self._answer(port.rank, key, rank, called)
        inquest.askers.add(port.rank)
        if is_new and running is not None:
            others = set(running.peers) - {self.group.rank, port.rank}
            self._ask(running, others, pass_on=True)

    def _answer(self, peer: int, key: Key, rank: int, has_called: bool) -> None:
        frame = Frame(
            Kind.TELL,
            self.group.epoch,
            key[0],
            operation=key[1],
            chunk=rank,
            segment=int(has_called),
            source=self.group.rank,
        )
        if peer in self._ports:
            self._tell(peer, Outgoing(frame, _NOTHING))

    def _on_tell(self, port: Port, frame: Frame, _: memoryview) -> None:
        key = (frame.channel, frame.operation)
        inquest = self._inquests.get(key)
        rank, has_called = frame.chunk, bool(frame.segment)
        if inquest is None or rank in inquest.heard or rank >= self.group.world_size:
            return
        if rank == self.group.rank:
            return
        inquest.heard[rank] = has_called
        for asker in inquest.askers - {port.rank}:
            self._answer(asker, key, rank, has_called)
        running = self._running.get(key)
        if running is not None and running.is_overdue:
            self._inquire(running, time.monotonic())

    # -- point to point

    def _begin_send(self, sending: Sending) -> None:
        if self._refuse(sending.work):
            return
        self._need((sending.peer,))
        self._message += 1
        frame = Frame(
            Kind.EAGER,
            self.group.epoch,
            sending.channel,
            operation=self._message,
            length=len(sending.data),
            source=self.group.rank,
            dtype=sending.dtype,
            tag=sending.tag,
        )
        sending.number = self._message
        self._mailbox.sending[self._message] = sending
        if self._departed:
            self._check_departed(sending)
            if self._error is not None:
                return
        if len(sending.data) <= EAGER_BYTES:
            number = self._message
            self._tell(sending.peer, Outgoing(frame, sending.data, lambda: self._end_send(number)))
        else:
            body = frames.encode_request(frames.Request(len(sending.data)))
            frame = frame._replace(kind=Kind.REQUEST, length=len(body))
            self._tell(sending.peer, Outgoing(frame, memoryview(body)))
        self._resume()

    def _tell(self, peer: int, outgoing: Outgoing) -> None:
        port = self._ports.get(peer)
        if port is None:
            self._connector.request(peer)
            self._unsent.setdefault(peer, deque()).append(outgoing)
            return
        port.control.append(outgoing)
        self._dirty.add(peer)

    def _end_send(self, number: int) -> None:
        sending = self._mailbox.sending.pop(number, None)
        if sending is not None:
            sending.work.finish()

    def _next_piece(self, port: Port, granted: deque[Sending]) -> Outgoing | None:
        sending = granted[0]
        start = sending.offset
        data = sending.data[start : start + self.segment_bytes]
        if not port.can_take(len(data)):
            return None
        sending.offset += len(data)
        is_last = sending.offset == len(sending.data)
        if is_last:
            granted.popleft()
        frame = Frame(
            Kind.PIECE,
            self.group.epoch,
            sending.channel,
            operation=sending.number,
            segment=start // self.segment_bytes,
            length=len(data),
            source=self.group.rank,
            dtype=sending.dtype,
        )
        number = sending.number
        return Outgoing(frame, data, (lambda: self._end_send(number)) if is_last else None)

    def _begin_receive(self, receiving: Receiving) -> None:
        if self._refuse(receiving.work):
            return
        if receiving.source >= 0:
            self._need((receiving.source,))
        arrived = self._mailbox.post(receiving)
        if arrived is not None:
            self._match(receiving, arrived)
        elif self._departed:
            self._check_departed(receiving)
        self._resume()

    def _on_eager(self, port: Port, frame: Frame, payload: bytearray) -> None:
        self._arrive(Arrived(port.rank, frame, len(payload), payload))

    def _on_request(self, port: Port, frame: Frame, payload: memoryview) -> None:
        nbytes = frames.decode_request(bytes(payload)).nbytes
        self._account(port, 0)
        self._arrive(Arrived(port.rank, frame, nbytes, None))

    def _arrive(self, arrived: Arrived) -> None:
        receiving = self._mailbox.arrive(arrived)
        if receiving is not None:
            self._match(receiving, arrived)

    def _match(self, receiving: Receiving, arrived: Arrived) -> None:
        receiving.matched = arrived.source
        reason = mismatch(receiving, arrived)
        if reason is not None:
            self._mailbox.posted.append(receiving)
            self._fail(desync(self.group, arrived.source, receiving, reason))
            return
        self._release(arrived.source, len(arrived.payload or b""))
        if arrived.payload is not None:
            receiving.data[:] = arrived.payload
            self._end_receive(receiving)
            return
        self._mailbox.receiving[arrived.source, arrived.frame.operation] = receiving
        self._tell(
            arrived.source,
            Outgoing(
                Frame(
                    Kind.GRANT,
                    self.group.epoch,
                    receiving.channel,
                    operation=arrived.frame.operation,
                    source=self.group.rank,
                ),
                _NOTHING,
            ),
        )

    def _on_grant(self, port: Port, frame: Frame, _: memoryview) -> None:
        sending = self._mailbox.sending.get(frame.operation)
        if sending is None or sending.peer != port.rank or sending.is_granted:
            raise ProtocolError(f"a GRANT for message #{frame.operation}, which was not announced")
        sending.is_granted = True
        self._mailbox.granted.setdefault(port.rank, deque()).append(sending)
        self._dirty.add(port.rank)

    def _route_piece(self, port: Port, frame: Frame) -> Sink:
        key = (port.rank, frame.operation)
        receiving = self._mailbox.receiving.get(key)
        if (
            receiving is None
            or frame.segment != receiving.num_pieces
            or receiving.offset + frame.length > len(receiving.data)
        ):
            raise ProtocolError(f"a piece of message #{frame.operation} that is not due")

        def complete(_: memoryview) -> None:
            receiving.offset += frame.length
            receiving.num_pieces += 1
            if receiving.offset == len(receiving.data):
                del self._mailbox.receiving[key]
                self._end_receive(receiving)

        start = receiving.offset
        return Sink(receiving.data[start : start + frame.length], complete)

    def _end_receive(self, receiving: Receiving) -> None:
        receiving.work.source = receiving.ranks.index(receiving.matched)
        receiving.work.finish()

    # -- the end

    def _on_abort(self, port: Port, _: Frame, payload: memoryview) -> None:
        abort = frames.decode_abort(bytes(payload))
        port.said_abort = True
        self._fail(error_of(self.group, abort, self._current()))

    def _on_goodbye(self, port: Port, _: Frame, __: memoryview) -> None:
        if port.said_goodbye:
            raise ProtocolError("a second GOODBYE")
        port.said_goodbye = True
        self._say(port.rank, Kind.FAREWELL)

    def _say(self, rank: int, kind: Kind) -> None:
        frame = Frame(kind, self.group.epoch, source=self.group.rank)
        self._tell(rank, Outgoing(frame, _NOTHING))

    def _on_farewell(self, port: Port, _: Frame, __: memoryview) -> None:
        port.is_acknowledged = True

    def _begin_close(self) -> None:
        if self._closing is not None or self._error is not None:
            return
        if any(True for _ in self._pending()):
            self._fail(self._closed_error())
            return
        self._closing = time.monotonic() + _FAREWELL_S
        for rank in self._ports:
            self._say(rank, Kind.GOODBYE)

    def _closed_error(self) -> GroupClosed:
        return GroupClosed(
            f"the group of epoch {self.group.epoch} was closed on this rank",
            rank=self.group.rank,
            epoch=self.group.epoch,
        )

    def _should_end(self) -> bool:
        if self._error is not None:
            return True
        if self._closing is None:
            return False
        settled = all(port.is_acknowledged and not port.is_writing for port in self._ports.values())
        return settled or time.monotonic() >= self._closing

    def _set_error(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error

    def _fail(self, error: PotluckError) -> None:
        """End the group: the first failure wins, and every peer hears of it."""
        if self._error is not None:
            return
        self._set_error(error)

    def _flush_abort(self, error: BaseException) -> None:
        """Tell every linked peer why, within a bound; works end only after this.

        Until then user buffers are still ours, so frames half written stay what they were. Each
        link is read until the peer's own ABORT or its end: closing it over unread bytes would
        reset the connection, and the peer would lose the reason and blame this rank.
        """
        if not isinstance(error, GroupError) or isinstance(error, GroupClosed):
            return
        body = frames.encode_abort(abort_of(error))
        frame = Frame(Kind.ABORT, self.group.epoch, length=len(body), source=self.group.rank)
        deadline = time.monotonic() + _FLUSH_S
        for port in self._ports.values():
            port.control.clear()
            port.control.append(Outgoing(frame, memoryview(body)))
            port.is_paused = False
        while self._ports and (left := deadline - time.monotonic()) > 0:
            more = [self._part(port) for port in list(self._ports.values())]
            if self._ports:
                self._selector.select(0.0 if any(more) else left)
                self._drain_wake()

    def _part(self, port: Port) -> bool:
        """Go on with telling the peer and hearing it; True if there is more to do at once."""
        try:
            more = port.write(lambda _: None)
            if not port.said_abort:
                more |= port.read(self._discard) or port.link.readable
        except PotluckError:
            self._drop(port)
            return False
        if port.said_abort and not port.is_writing:
            self._drop(port)
            return False
        self._watch(port)
        return more

    def _discard(self, port: Port, frame: Frame) -> Sink:
        """Where a frame goes once the group is over."""
        if frame.kind is Kind.ABORT:
            port.said_abort = True
        is_small = frame.length <= frames.MAX_CONTROL
        buffer = None if is_small or frame.flags & IN_WINDOW else port.scratch(frame.length)
        return Sink(buffer, lambda _: None)

    def _end(self) -> None:
        """Tell the peers, then let every waiting caller go: whatever breaks here, nobody hangs."""
        try:
            if self._error is not None:
                self._flush_abort(self._error)
        except Exception:
            _log.exception("could not tell the peers why epoch %d ended", self.group.epoch)
        with self._lock:
            if self._error is None:
                self._error = self._closed_error()
            self._is_over.set()
        while self._inbox:
            self._inbox.popleft()()
        for item in list(self._pending()):
            if isinstance(item, RunningPlan):
                self._on_operation(item, time.monotonic() - item.started, self._error)
            item.work.finish(self._error)
        for port in list(self._ports.values()):
            self._drop(port)
        self._connector.close(self._error)
        for link in self._late:
            self._turn_away(link)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
