"""Waiting for connections: ``Poller``, many threads for many connections at once; ``BusyWait``, one
thread for a peer that is quick.

``watch`` asks for one notice: when the connection is ready, one ``wait`` of one thread returns its
descriptor, and there is no other notice of it until the next ``watch``. So a connection that is
ready belongs to one thread, and the other threads sleep on. Linux's epoll does all of this in the
kernel; elsewhere one thread at a time waits for all connections.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from potluck._core.system import usable_cpus, wait_readable


class Poller(Protocol):
    """For any number of threads."""

    def watch(self, fd: int, *, write: bool) -> None:
        """Return ``fd`` from one ``wait`` when it can be written (or read), or has failed."""

    def forget(self, fd: int) -> None:
        """Watch ``fd``, which is about to be closed, no more. A ``wait`` may return it still."""

    def wait(self, timeout_s: float) -> int | None:
        """A descriptor that is ready; None after ``wake``, after about ``timeout_s`` seconds, or
        for no reason."""

    def wake(self) -> None:
        """Let a thread that waits, or else the next one to wait, return None."""

    def close(self) -> None:
        """Free the descriptors of this object; no thread may be waiting. ``forget`` and ``wake``
        do nothing from then on."""


class SelectorPoller:
    """One thread waits for all connections, the others for their turn. On every system."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._turn = threading.Lock()
        self._changing = threading.Lock()
        self._ready: deque[int] = deque()

    def watch(self, fd: int, *, write: bool) -> None:
        with self._changing:
            self._selector.register(fd, selectors.EVENT_WRITE if write else selectors.EVENT_READ)
        self.wake()  # select(), on Windows, does not see what is registered while it waits

    def forget(self, fd: int) -> None:
        with self._changing:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
            with contextlib.suppress(ValueError):
                self._ready.remove(fd)

    def wait(self, timeout_s: float) -> int | None:
        with self._turn:
            if not self._ready:
                self._select(timeout_s)
            with contextlib.suppress(IndexError):  # it was forgotten meanwhile
                return self._ready.popleft()
            return None

    def _select(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                continue
            with self._changing, contextlib.suppress(KeyError):
                self._selector.unregister(key.fd)
                self._ready.append(key.fd)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, and wakes; or it is closed
            self._wakes.send(b"\0")

    def close(self) -> None:
        for each in (self._selector, self._wakes, self._woken):
            each.close()


if sys.platform == "linux":
    _ONE = (1).to_bytes(8, sys.byteorder)

    class EpollPoller:
        """All threads wait in one epoll object, which wakes one thread for each connection: the
        last to fall asleep, whose memory is still in the processor's caches."""

        def __init__(self) -> None:
            self._epoll = select.epoll()
            eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._wakes = open(eventfd, "r+b", buffering=0)  # noqa: SIM115
            # Edge-triggered: each write is one notice, and no thread needs to read.
            self._eventfd = eventfd
            self._epoll.register(eventfd, select.EPOLLIN | select.EPOLLET)

        def watch(self, fd: int, *, write: bool) -> None:
            events = (select.EPOLLOUT if write else select.EPOLLIN) | select.EPOLLONESHOT
            try:
                self._epoll.modify(fd, events)
            except FileNotFoundError:
                self._epoll.register(fd, events)

        def forget(self, fd: int) -> None:
            # The kernel would do it, were it not for forked processes that keep the socket open.
            with contextlib.suppress(OSError, ValueError):  # it is not watched
                self._epoll.unregister(fd)

        def wait(self, timeout_s: float) -> int | None:
            for fd, _ in self._epoll.poll(timeout_s, 1):
                return None if fd == self._eventfd else fd
            return None

        def wake(self) -> None:
            with contextlib.suppress(ValueError):  # it is closed
                self._wakes.write(_ONE)

        def close(self) -> None:
            self._epoll.close()
            self._wakes.close()


def poller() -> Poller:
    """The best one of this system."""
    if sys.platform == "linux":
        return EpollPoller()
    return SelectorPoller()


LONGEST_S = 1.5e-4
"""The longest busy wait."""
_QUICK_S = 4e-4
"""The longest time of a peer, waking up included, after which the next wait for it is busy."""
_HAS_OTHERS = len(usable_cpus()) > 1
"""On one processor a busy wait would keep the peer from it."""
_MOST_SKIPPED = 64
"""Calls without a busy wait after several in vain."""


def _nothing_else() -> bool:
    return False


class BusyWait:
    """A wait for one peer that is busy at first, while the peer is quick. For one thread at a time.

    A processor that has nothing to do sleeps, and takes longer to wake up than a small call takes:
    two processes on an idle machine spent two thirds of a call on that. So the waiting side asks
    the kernel again and again, for as long as a small call may take, before it sleeps. On a machine
    whose processors are all busy that keeps the peer from its own, so waits in vain make busy ones
    rarer.
    """

    __slots__ = ("_is_quick", "_is_readable", "_num_after_failure", "_num_to_skip")

    def __init__(self, fd: int) -> None:
        self._is_readable = wait_readable(fd)
        self._is_quick = False
        self._num_to_skip = self._num_after_failure = 0

    @property
    def is_due(self) -> bool:
        """Whether a busy wait is worth it."""
        return self._is_quick and not self._num_to_skip

    def note(self, seconds: float) -> None:
        """The peer took so long."""
        self._is_quick = seconds < _QUICK_S and _HAS_OTHERS
        if self._num_to_skip:
            self._num_to_skip -= 1

    def run(self, has_other: Callable[[], object] = _nothing_else) -> bool:
        """Wait busily: whether bytes have come. At once False if it is not due, and if
        ``has_other()``. It costs ``LONGEST_S`` of processor time at most."""
        if not self.is_due:
            return False
        end = time.monotonic() + LONGEST_S
        while not self._is_readable(0.0):
            if time.monotonic() > end:
                self._is_quick = False
                self._num_after_failure = min(2 * self._num_after_failure + 1, _MOST_SKIPPED)
                self._num_to_skip = self._num_after_failure
                return False
            if has_other():
                return False
        self._num_after_failure = 0
        return True
