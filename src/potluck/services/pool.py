"""``Pool``: the connections of one client to one service, a bounded number, one call each."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from potluck._core.system import wait_readable, wait_ready
from potluck._core.transport.bulk import BulkLink
from potluck._core.wire.payload import Packed
from potluck._core.wire.services import Failure, Reply, Request
from potluck.services.busy import BusyWait
from potluck.services.channel import Channel, State
from potluck.services.memory import Blocks

_LONGEST_WAIT_S = 60.0
"""Of one wait of many: poll() counts milliseconds in 32 bits."""


class Connection:
    """One connection of a client, for one call at a time. It blocks."""

    def __init__(self, link: BulkLink, max_bytes: int, memory: Blocks) -> None:
        self._channel: Channel[Reply] = Channel(link, Reply, max_bytes, memory)
        self._fd = link.fileno()
        self._wait_readable = wait_readable(self._fd)
        self._busy = BusyWait(self._fd)

    def is_intact(self) -> bool:
        """Whether the server, which has nothing to say between calls, has not hung up."""
        return not self._wait_readable(0.0)

    def call(self, request: Request, packed: Packed, deadline: float) -> tuple[Failure | None, Any]:
        """The failure or result of one call. TimeoutError at the deadline, LinkError if the
        connection ends; it is of no use after either."""
        channel = self._channel
        channel.put(request, packed)
        while not channel.send():
            wait_ready(self._fd, write=True, timeout_s=_patience(deadline))
        sent_at = time.monotonic()
        if not self._busy.run():
            self._wait_readable(_patience(deadline))
            self._busy.note(time.monotonic() - sent_at)
        while (state := channel.receive()) is not State.COMPLETE:
            if state is State.WAITING:
                self._wait_readable(_patience(deadline))
        value, channel.value = channel.value, None
        return channel.head.failure, value

    def close(self) -> None:
        self._channel.close()


def _patience(deadline: float) -> float:
    """How long one wait may take; TimeoutError at the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, _LONGEST_WAIT_S)


class AllInUseError(Exception):
    """All connections of a pool were in use until the deadline."""


class Pool:
    """For any number of threads."""

    def __init__(
        self, dial: Callable[[float], Connection], may_use: Callable[[], bool], size: int
    ) -> None:
        """``dial(deadline)`` makes a connection; at most ``size`` are in use at one time.
        ``may_use()`` says whether one that was made before may be used."""
        self._dial = dial
        self._may_use = may_use
        self._free: list[Connection | None] = [None] * size
        """Connections that no call uses, the last one used at the end, behind a None for each one
        that may still be made. To append or pop takes no lock."""
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._is_closed = False
        weakref.finalize(self, _close_all, self._free)

    def take(self, deadline: float) -> Connection:
        """A connection that no call uses, to be given back. AllInUseError at the deadline, and what
        ``dial`` raises."""
        while True:
            kept = self._pop(deadline)
            try:
                if kept is None:
                    return self._dial(deadline)
                if self._may_use() and kept.is_intact():
                    return kept
            except BaseException:
                self.discard(kept)
                raise
            self.discard(kept)

    def discard(self, connection: Connection | None) -> None:
        """A call has failed, so that its connection is of no use: close it; another one may be
        made in its place."""
        if connection is not None:
            connection.close()
        self.give_back(None)

    def give_back(self, connection: Connection | None) -> None:
        """A call has ended; None if its connection is of no use any more."""
        self._free.insert(len(self._free) if connection else 0, connection)
        if connection is not None and self._is_closed:  # asked last: ``close`` may have run
            self.close()
        if self._num_waiting:
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        """Close the connections that no call uses now, the others when their calls end.
        Idempotent."""
        self._is_closed = True
        for _ in range(_close_all(self._free)):
            self.give_back(None)

    def _pop(self, deadline: float) -> Connection | None:
        try:
            return self._free.pop()
        except IndexError:
            pass
        with self._changed:
            self._num_waiting += 1  # ``give_back`` appends before it looks at this number
            try:
                while True:
                    with contextlib.suppress(IndexError):
                        return self._free.pop()
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise AllInUseError
            finally:
                self._num_waiting -= 1
                if self._free:  # a notice may have come just as this wait ended: pass it on
                    self._changed.notify()


def _close_all(free: list[Connection | None]) -> int:
    """Empty ``free``; how many there were."""
    count = 0
    with contextlib.suppress(IndexError):
        while True:
            connection = free.pop()
            count += 1
            if connection is not None:
                connection.close()
    return count
