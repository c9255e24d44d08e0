"""``GroupMemory``: all shared memory of one rank in one group, and the native engine that uses it.

A call through shared memory runs in the thread that waits for it. A call that no thread waits for
runs on the native progress thread, which never takes the interpreter's lock. Python hears of an
ended call only if it failed or has callbacks: from one thread here (``potluck-shm``). The bytes are
moved in ``native/core/shm/*``; how the memory of a channel is set up is in ``channel.py``.

When the group is over, every channel is stopped, so that no caller waits for a rank that will not
come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from potluck._core import native
from potluck._core.background import start_thread, why
from potluck._core.collectives.plan import Algorithm
from potluck._core.engine.failures.group_errors import (
    broke,
    closed_before,
    desync,
    overdue,
    peer_lost,
)
from potluck._core.engine.fingerprint import OPERATIONS, REDUCTIONS
from potluck._core.engine.work import Work, again
from potluck._core.metrics import Metrics, SharedMemoryCounts
from potluck._core.types import Group
from potluck.errors import GroupClosed, GroupError, LinkError, PeerLost, PotluckError

_log = logging.getLogger(__name__)

MAX_BYTES = 8 * 1024 * 1024
"""The share of one worker: the most bytes that it adds to its node's shared memory, over all
channels of one group."""

_PATIENCE_S = 5.0
"""How long a call that was stopped waits for the error that ended the group."""

_SWEEP = 8
"""Ended calls are removed from ``_inflight`` at least this many at a time."""


class Failure(NamedTuple):
    """What keeps a call through shared memory from ending well."""

    outcome: str
    """``stopped`` with the group, ``timeout``, ``desync`` (the peer made another call), ``left``
    (the peer closed its context) or ``closed`` (it closed the sub-group of this channel)."""
    peer: int
    """The rank of the group at fault; -1: none in particular."""
    has_begun: bool
    """Whether the peer has begun the call too."""
    fingerprint: int
    """After a desync: of the peer's call."""

    @classmethod
    def of(
        cls, peers: Sequence[int], outcome: str, peer: int, has_begun: bool, fingerprint: int
    ) -> Failure:
        """What the native core says, whose ranks are those of a channel."""
        return cls(outcome, peers[peer] if peer >= 0 else -1, has_begun, fingerprint)


class Loop(Protocol):
    """The part of the group's progress loop that shared memory uses."""

    @property
    def error(self) -> BaseException | None: ...

    def abort(self, error: PotluckError) -> None: ...

    def when_over(self, callback: Callable[[], None]) -> None: ...


class _Open(NamedTuple):
    """A channel in use."""

    on_close: Callable[[], None]
    counts: SharedMemoryCounts
    peers: tuple[int, ...]
    nbytes: int
    """Of this worker's share."""


class StalledCall:
    """A call through shared memory that can't end, and the peer that it waits for, for errors."""

    def __init__(self, call: str, peer: int) -> None:
        self._call = call
        self._peer = peer

    def awaited(self) -> list[tuple[int, str]]:
        return [(self._peer, "its part, through shared memory")] if self._peer >= 0 else []

    def __str__(self) -> str:
        return self._call


class GroupMemory:
    """All memory that one rank of a group shares, by channel."""

    def __init__(self, group: Group, loop: Loop, metrics: Metrics) -> None:
        self._group = group
        self._loop = loop
        self._metrics = metrics
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_closed = False
        self._engine: Any = None
        self._thread: threading.Thread | None = None
        self._open: dict[Any, _Open] = {}
        self._leaving: list[Any] = []
        self._left_bytes = MAX_BYTES
        self._inflight: dict[int, SharedMemoryWork] = {}
        self._ids = 0
        self._sweep_at = _SWEEP
        loop.when_over(self._on_over)

    def take(self, nbytes: int) -> bool:
        """Take ``nbytes`` of this worker's share; False if less is left."""
        self._drop_left()
        with self._lock:
            if self._is_closed or nbytes > self._left_bytes:
                return False
            self._left_bytes -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Return ``nbytes`` to this worker's share, which no channel has used."""
        with self._lock:
            self._left_bytes += nbytes

    @property
    def left_bytes(self) -> int:
        """The bytes that are left of this worker's share."""
        return self._left_bytes

    def open(
        self,
        memory: Any,
        on_close: Callable[[], None],
        peers: tuple[int, ...],
        nbytes: int,
        **shape: Any,
    ) -> Any:
        """A native channel over ``memory``. ``on_close()`` is called when the channel must not be
        used any more. ``peers`` maps the channel's ranks to the group's. ``nbytes`` were taken.
        """
        with self._lock:
            if self._engine is None:
                self._engine = native.core.ShmEngine(OPERATIONS, REDUCTIONS)
                self._thread = start_thread(
                    partial(self._tell, self._engine),
                    name=f"potluck-shm-{self._group.rank}",
                    on_broken=self._broke,
                )
            channel = native.core.ShmChannel(memory=memory, engine=self._engine, **shape)
            counts = SharedMemoryCounts(
                Algorithm.SHARED_MEMORY, OPERATIONS, channel.stats, channel.waited_s
            )
            self._open[channel] = _Open(on_close, counts, peers, nbytes)
            self._metrics.count(counts)
            is_over = self._over.is_set() or self._is_closed
        if is_over:
            channel.stop(for_all=False)
        return channel

    def leave_channel(self, channel: Any) -> None:
        """This rank makes no more calls on ``channel``. When those under way have ended, or the
        next time that memory is asked for or given up, its memory is released."""
        channel.leave_channel()
        with self._lock:
            self._leaving.append(channel)
        self._drop_left()

    def _drop_left(self) -> None:
        """Release the channels that this rank has left, and on which no call is under way."""
        if not self._leaving:
            return
        with self._lock:
            over = [channel for channel in self._leaving if channel.ongoing() < 0]
            self._leaving = [each for each in self._leaving if each not in over]
            # Those that are not there any more have been released by ``close``.
            dropped = [(each, self._open.pop(each)) for each in over if each in self._open]
            self._left_bytes += sum(opened.nbytes for _, opened in dropped)
        for channel, opened in dropped:
            self._metrics.keep(opened.counts)
            self._tell_abandoned(channel, opened.peers)
            channel.close()

    def ongoing(self) -> list[Hashable]:
        """A name for each channel's first call under way, the same for as long as it is."""
        with self._lock:
            ended = [(id(channel), channel.ongoing()) for channel in self._open]
        return [("shm", name, count) for name, count in ended if count >= 0]

    def start(self, work: SharedMemoryWork, begin: Callable[[int], Any]) -> None:
        """Start the native call of ``work`` by ``begin(id)``, and keep both while the call runs."""
        with self._lock:
            self._ids += 1
            ident = self._ids
            if len(self._inflight) >= self._sweep_at:
                alive = {n: each for n, each in self._inflight.items() if not each.is_told}
                self._inflight, self._sweep_at = alive, 2 * len(alive) + _SWEEP
            self._inflight[ident] = work
        work.began(begin(ident))

    def failure(self, failure: Failure, call: str) -> BaseException:
        """The error of a call that ended so, and the end of the group."""
        if failure.outcome != "stopped":
            self._loop.abort(self._error_of(failure, call))
        if not self._over.wait(_PATIENCE_S):
            me = self._group.describe(self._group.rank)
            return GroupError(
                f"{call} was stopped on {me}: another rank of its node left without a reason",
                rank=self._group.rank,
                epoch=self._group.epoch,
                operation=call,
            )
        error = self._loop.error
        assert error is not None
        if isinstance(error, PeerLost) and not error.operation:
            during = f"; during {call} on {self._group.describe(self._group.rank)}"
            told = PeerLost(
                f"{error}{during}",
                rank=error.rank,
                epoch=error.epoch,
                operation=call,
                certain=error.certain,
            )
            told.__cause__ = error.__cause__
            error = told
        self.failed(call, error)
        return again(error)

    def failed(self, call: str, error: BaseException) -> None:
        """Count a call that failed."""
        self._metrics.failed(call.partition("(")[0], type(error).__name__)

    def _error_of(self, failure: Failure, call: str) -> GroupError:
        peer = failure.peer
        item = StalledCall(call, peer)
        if failure.outcome == "desync":
            return desync(self._group, peer, call, failure.fingerprint)
        if failure.outcome == "closed":
            return closed_before(self._group, peer, call)
        if failure.outcome == "left":
            left = LinkError("it left the group (its context was closed)")
            return peer_lost(self._group, peer, left, item)
        return overdue(self._group, item, -1 if failure.has_begun else peer)

    def leave(self) -> None:
        """This rank makes no more calls; those under way end. Idempotent."""
        with self._lock:
            self._is_closed = True
            channels = list(self._open.items())
        for channel, opened in channels:
            opened.on_close()
            channel.leave()
            channel.stop(for_all=False)

    def close(self) -> None:
        """Release the memory, once the group is over. Idempotent."""
        with self._lock:
            channels, self._open = self._open, {}
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        for channel, opened in channels.items():
            opened.on_close()  # of a channel that was opened while this rank left
            channel.drain()
            self._metrics.keep(opened.counts)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        inflight, self._inflight = self._inflight, {}
        for work in inflight.values():
            work.done()

    def _on_over(self) -> None:
        with self._lock:
            channels = list(self._open)
            self._over.set()
        for_all = not isinstance(self._loop.error, GroupClosed)
        for channel in channels:
            channel.stop(for_all=for_all)

    def broke(self, cause: BaseException, what: str = "the setup of shared memory") -> GroupError:
        """End the group, as ``what`` ended by an error of its own; the group's error."""
        error = broke(self._group, what, why(cause))
        self._loop.abort(error)
        return error

    def _broke(self, cause: BaseException) -> None:
        self.broke(cause, "the thread of shared memory")

    def _tell(self, engine: Any) -> None:
        while ident := engine.next_ended():
            with self._lock:
                work = self._inflight.pop(ident, None)
            if work is not None:
                work.done()
            else:
                with self._lock:
                    channels = list(self._open.items())
                for channel, opened in channels:
                    self._tell_abandoned(channel, opened.peers)

    def _tell_abandoned(self, channel: Any, peers: tuple[int, ...]) -> None:
        """End the group over a blocking call that failed after a signal interrupted its caller."""
        if (abandoned := channel.abandoned_failure()) is not None:
            operation, failure = abandoned
            call = f"{operation} (its caller was interrupted)"
            self._loop.abort(self._error_of(Failure.of(peers, *failure), call))


class SharedMemoryWork(Work):
    """A call through shared memory, or one that waits until the memory is set up."""

    __slots__ = ("_begun", "_group", "_kept", "_native", "_peers")

    def __init__(
        self,
        call: str,
        result: Any,
        group: GroupMemory,
        peers: tuple[int, ...],
        *,
        is_waiting: bool,
    ) -> None:
        """``peers`` maps the channel's ranks to the group's; ``is_waiting``: for the memory."""
        super().__init__(call, result)
        self._group = group
        self._peers = peers
        self._native: Any = None
        self._kept: Any = None
        self._begun = threading.Event() if is_waiting else None

    @property
    def is_told(self) -> bool:
        """Whether the call has ended and no callback waits to be told."""
        if self._is_ended:
            return True
        return self._native is not None and self._native.done and not self._callbacks

    def began(self, call: Any) -> None:
        """The native call is under way."""
        with self._lock:
            self._native = call
            begun, self._begun = self._begun, None
            is_awaited = bool(self._callbacks)
        if begun is not None:
            begun.set()
        if is_awaited and not call.watch():
            self._end_work()

    def keep(self, memory: Any) -> None:
        """Keep ``memory``, which the native call reads and writes, as long as this work."""
        self._kept = memory

    def goes_over_links(self) -> None:
        """The call runs over links instead, and ends as any other work."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.set()

    def done(self) -> bool:
        """Whether the operation has ended, well or not; never blocks."""
        if not self._is_ended and self._native is not None and self._native.done:
            self._end_work()
        return super().done()

    def exception(self) -> BaseException | None:
        """What the operation raised, None while it runs or when it succeeded."""
        self.done()
        return self._error

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call ``callback(work)`` when the operation ends, on a thread of the engine, or now."""
        super().add_done_callback(callback)
        call = self._native
        if call is not None and not call.watch():
            self._end_work()

    def _block(self, timeout: float | None) -> bool:
        begun = self._begun
        if begun is not None and not self._is_ended and not begun.wait(timeout):
            return False
        if self._native is None:
            return super()._block(timeout)
        if not self._is_ended and not self._native.wait(1e9 if timeout is None else timeout):
            return False
        self._end_work()
        return True

    def _end_work(self) -> None:
        """The native call has ended: end this work with its outcome."""
        if self._is_ended:
            return
        failure, error = self._native.failure(), None
        if failure is not None:
            error = self._group.failure(Failure.of(self._peers, *failure), self.call)
        self.finish(error)
