"""``NativeLoop``: the Python side of the native progress loop, with the methods of
``ProgressLoop``.

The bytes are moved by the native thread, which never waits for the interpreter. A caller that
blocks waits natively for its own operation. One Python thread, the event thread, does what only
Python can do: it has links made, makes errors, and ends operations that no thread waits for.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck._core import native
from potluck._core.background import start_thread, why
from potluck._core.engine.arrays.layout import Array, Buffers
from potluck._core.engine.failures import group_errors
from potluck._core.engine.loop.mailbox import Receiving, Sending
from potluck._core.engine.loop.plans import OnOperation
from potluck._core.engine.loop.progress import reject
from potluck._core.engine.loop.running import CompiledPlan
from potluck._core.engine.work import Work
from potluck._core.forks import Owner
from potluck._core.metrics import LinkMeter
from potluck._core.transport.link import Connector, Link
from potluck._core.types import Engine, Group
from potluck._core.wire import frames
from potluck.errors import GroupClosed, GroupError, LinkError, PotluckError, ProtocolError

if TYPE_CHECKING:
    from potluck._core._native import Ticket

_PATIENCE_S = 3600.0


def is_available() -> bool:
    """Whether the native core is here and has a loop (it needs OpenSSL)."""
    return native.available and hasattr(native.core, "ProgressLoop")


def engine_of(has_native_links: bool) -> Engine:
    """The engine that a process runs, by whether its links are the native core's."""
    return Engine.NATIVE if has_native_links and is_available() else Engine.PYTHON


@dataclass(slots=True)
class _Item:
    """An operation under way. ``keep`` holds the arrays that the native loop reads and writes."""

    loop: NativeLoop
    ident: int
    work: Work
    ticket: Ticket
    keep: Any
    plan: CompiledPlan | None

    def wait(self, timeout: float | None) -> bool:
        """Block until the operation has ended, and end its work; False after ``timeout`` s."""
        if not self.ticket.wait(-1.0 if timeout is None else timeout):
            return False
        self.loop.end_work(self.ident)
        return True

    def look(self) -> None:
        """End the work of an operation that has ended. The event thread would do it as well, but
        later if another thread has the interpreter's lock."""
        if self.ticket.state != "running":
            self.loop.end_work(self.ident)


@dataclass(frozen=True, slots=True)
class _Report:
    """An operation as the native loop describes it, for errors."""

    name: str
    waits: list[tuple[int, str]]

    def awaited(self) -> list[tuple[int, str]]:
        return self.waits

    def __str__(self) -> str:
        return self.name


class NativeLoop:
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
        self._meter = meter
        self._state = group_errors.GroupState(group)
        self._core = native.core.ProgressLoop(
            group.epoch, group.rank, group.world_size, segment_bytes, max_early_bytes
        )
        self._idents = itertools.count()
        self._items: dict[int, _Item] = {}
        self._links: dict[int, Link] = {}
        self._meters: dict[int, LinkMeter] = {}
        self._causes: dict[int, Exception] = {}
        self._is_over = self._is_left = False
        self._owner = Owner("this group")
        self._thread = start_thread(
            self._serve, name=f"potluck-events-{group.rank}", on_broken=self._broke
        )
        _alive.add(self)
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
        return list(self._items)

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
        ident, ticket = self._ticket(work, (buffers, residual), plan)
        self._core.start(ticket, plan.native, sequence, deadline, *buffers, residual)
        if self._is_over:  # the event thread has ended: no other thread would end it
            self.end_work(ident)

    def send(self, sending: Sending) -> None:
        """Send a message; its work ends when its memory may be reused."""
        ident, ticket = self._ticket(sending.work, sending)
        self._core.send(
            ticket,
            str(sending),
            sending.peer,
            sending.channel,
            sending.tag,
            sending.dtype,
            _address(sending.keep),
            len(sending.data),
            sending.deadline,
        )
        if self._is_over:
            self.end_work(ident)

    def receive(self, receiving: Receiving) -> None:
        """Take the first message that matches."""
        ident, ticket = self._ticket(receiving.work, receiving)
        self._core.receive(
            ticket,
            str(receiving),
            receiving.source,
            receiving.channel,
            receiving.ranks,
            receiving.tag,
            receiving.dtype,
            _address(receiving.array),
            len(receiving.data),
            receiving.deadline,
        )
        if self._is_over:
            self.end_work(ident)

    def leave(self, channel: int, next_sequence: int) -> None:
        """Forget a channel that this rank has left, once its calls under way have ended."""
        self._core.leave(channel, next_sequence)

    def abort(self, error: PotluckError) -> None:
        """End the group with ``error`` on every rank."""
        self._state.fail(error)
        self._core.stop()

    def close(self) -> None:
        """Leave in order: what was sent arrives, nothing new begins. Idempotent."""
        self._is_left = True
        self._core.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- operations

    def _ticket(
        self, work: Work, keep: Any, plan: CompiledPlan | None = None
    ) -> tuple[int, Ticket]:
        """The number and ticket of an operation that is about to begin."""
        ident = next(self._idents)
        ticket = self._core.ticket(ident)
        item = _Item(self, ident, work, ticket, keep, plan)
        self._items[ident] = item
        work.operation = item
        return ident, ticket

    def end_work(self, ident: int) -> None:
        """End the work of an operation that has ended. Only the first of several calls does so: the
        waiting thread and the event thread may both come."""
        item = self._items.pop(ident, None)
        if item is None:
            return
        state, error = item.ticket.state, None
        if state == "done":
            item.work.source = item.ticket.source
        else:
            error = self._failure()
        if item.plan is not None and state != "refused":
            ticket = item.ticket
            self._on_operation(item.plan, ticket.seconds, error, ticket.num_beyond)
        item.work.finish(error)

    def _failure(self) -> BaseException:
        """Why an operation has not ended well. The native loop refuses operations as soon as the
        group is over: their callers may ask before the event thread has heard of it."""
        if self._state.error is None and not self._is_left:
            # Without ``close`` the group is over, so that the core's failure changes no more.
            error = self._make_error()
            if error is not None:
                self._state.fail(error)
        return self._state.error or self._state.closed()

    # -- links

    def _deliver(self, rank: int, link: Link) -> None:
        assert link.stream is not None, "the connector must make native links"
        if self._is_over:
            reject(self._state, link)
            return
        ident = next(self._idents)
        self._links[ident] = link
        if rank not in self._meters:
            meter = self._meter(f"worker {self.group.members[rank].worker}")
            meter.follow(partial(self._core.take_counters, rank))
            self._meters[rank] = meter
        memory = link.memory
        slots = range(memory.num_slots) if memory else ()
        self._core.adopt(
            ident,
            rank,
            link.stream,
            link.peer,
            memory.slot_bytes if memory else 0,
            [_address(np.frombuffer(memory.outgoing(slot), np.uint8)) for slot in slots]
            if memory
            else (),
            [_address(np.frombuffer(memory.incoming(slot), np.uint8)) for slot in slots]
            if memory
            else (),
        )
        if self._is_over:
            self._reject_late()

    def _no_link(self, rank: int, error: Exception) -> None:
        self._causes.setdefault(rank, error)  # the first ends the group, as on the Python loop
        self._core.no_link(rank)

    def _reject_late(self) -> None:
        for ident in list(self._links):
            link = self._links.pop(ident, None)
            if link is not None:
                reject(self._state, link)

    # -- the event thread

    def _serve(self) -> None:
        while not self._is_over:
            for kind, subject in self._core.events(_PATIENCE_S):
                self._hear(kind, subject)

    def _broke(self, cause: BaseException) -> None:
        error = group_errors.broke(self.group, "the event thread", why(cause))
        self._state.fail(error)
        self._core.stop()
        self._core.set_abort(frames.encode_abort(group_errors.abort_of(error)), True)
        self._end()

    def _hear(self, kind: str, subject: int) -> None:
        """Handle an event of the native loop. ``subject`` is the number of the operation that
        ended or of the link that was released, or the rank to which a link is wanted; the other
        kinds have none."""
        if kind == "operation ended":
            self.end_work(subject)
        elif kind == "link wanted":
            self._connector.request(subject)
        elif kind == "link released":
            self._links.pop(subject).close()
        elif kind == "group failed":
            self._on_failed()
        elif kind == "loop ended":
            self._end()

    def _on_failed(self) -> None:
        """The group is over: make the error, for callers here and for the peers."""
        error = self._make_error()
        if error is not None:
            self._state.fail(error)
        error = self._state.error
        if isinstance(error, GroupError) and not isinstance(error, GroupClosed):
            self._core.set_abort(frames.encode_abort(group_errors.abort_of(error)), True)
        else:
            self._core.set_abort(b"", False)

    def _make_error(self) -> BaseException | None:
        kind, rank, text, name, waits, payload, number, dtype = self._core.failure()
        group = self.group
        item = None if name is None else _Report(name, waits)
        if kind == "abort received":
            try:
                return group_errors.error_of(group, frames.decode_abort(payload), item)
            except ProtocolError as error:
                return group_errors.peer_lost(group, rank, error, item)
        if kind == "overdue":
            assert item is not None
            return group_errors.overdue(group, item, rank)
        if kind == "desync":
            return group_errors.desync(group, rank, item, number)
        if kind == "mismatch":
            return group_errors.message_mismatch(group, rank, item, number, dtype)
        if kind == "broke":
            return group_errors.broke(group, "the progress loop", text)
        causes: dict[str, Callable[[], Exception]] = {
            "lost": lambda: LinkError(text),
            "violated": lambda: ProtocolError(text),
            "no link": lambda: self._causes[rank],
            "left": lambda: LinkError("it left the group (its context was closed)"),
        }
        return group_errors.peer_lost(group, rank, causes[kind](), item) if kind in causes else None

    def _end(self) -> None:
        """End all operations with the group's error, so that no caller hangs, whatever broke."""
        self._core.join()
        self._state.fail(self._state.closed())
        self._is_over = True
        for ident in list(self._items):
            self.end_work(ident)
        self._connector.close(self._state.error or self._state.closed())
        self._reject_late()
        for meter in self._meters.values():
            meter.follow(None)
        _alive.discard(self)

    def _stop_at_exit(self) -> None:
        """The process ends without close(): stop the thread, whose memory is about to be freed."""
        self._core.stop()
        self._thread.join(_EXIT_S)


_EXIT_S = 1.0
_alive: weakref.WeakSet[NativeLoop] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for loop in list(_alive):
        if loop._owner.is_here:
            loop._stop_at_exit()


def _address(array: Array) -> int:
    """Where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address
