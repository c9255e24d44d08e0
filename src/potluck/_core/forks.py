"""Forked processes: what has threads, connections or shared memory belongs to the process that made
it.

A fork (``os.fork``, ``multiprocessing``'s "fork", torch's DataLoader with workers) copies Python's
objects but no threads, and both processes hold the same sockets. So in the child

- every operation on such an object raises ForkedProcess (``Owner.check``), before it takes a lock,
  which a thread that does not exist there may hold;
- ``close`` and ``abort`` do nothing, and what was registered by ``at_exit`` is not called;
- sockets (``opening``), locked files (``opened``) and shared memory (``close_in_children``) are
  closed at once, without a word to the peer. A child may outlive its parent: the peers then still
  see the connections end with the parent.

The native core has its own count of forks (``native/core/process.hpp``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol, SupportsIndex, TypeVar

from potluck.errors import ForkedProcess, PotluckError

Socket = TypeVar("Socket", bound=socket.socket)


class _Closable(Protocol):
    def close(self) -> None: ...


class Process:
    """A process, told from those that were forked from it."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def error(self, what: str) -> ForkedProcess:
        """The error of a forked child, in which ``what`` ("this context") was called."""
        return ForkedProcess(
            f"{what} belongs to process {self.pid}, and this is process {os.getpid()}, which was "
            f"forked from it: make such calls in process {self.pid}, or start this process with "
            'multiprocessing\'s "spawn" or "forkserver" (of a DataLoader: '
            'multiprocessing_context="spawn") and call potluck.init() in it'
        )


here = Process()
"""The present process: another object in each forked child. To compare costs no system call."""

_lock = threading.RLock()
"""Held while a descriptor is made, and during a fork: no child gets one that is not listed yet.
Re-entrant: a signal handler may fork."""
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_descriptors: set[int] = set()
_memory: weakref.WeakSet[_Closable] = weakref.WeakSet()
_at_exit: list[Callable[[], object]] = []


class Owner:
    """The process that made an object, as a part of that object."""

    __slots__ = ("_process", "_what")

    def __init__(self, what: str) -> None:
        """``what``: the object, in the error: "this context"."""
        self._process = here
        self._what = what

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return self._process is here

    def check(self) -> None:
        """ForkedProcess in a process that was forked from that one."""
        if self._process is not here:
            raise self._process.error(self._what)


class _Mine(Protocol):
    def __call__(self, sock: Socket) -> Socket: ...


@contextlib.contextmanager
def opening() -> Iterator[_Mine]:
    """``with opening() as mine: sock = mine(socket.socket(...))``: a socket that a forked child
    closes. The block must not wait: a fork waits for it."""
    with _lock:
        yield _mine


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of ``os.open``, closed at the end, and by a forked child: a lock on it would
    else last as long as the child."""
    with _lock:
        fd = os.open(path, flags)
        _descriptors.add(fd)
    try:
        yield fd
    finally:
        with _lock:
            _descriptors.discard(fd)
            os.close(fd)


def close_in_children(memory: _Closable) -> None:
    """Have a forked child close its copy of ``memory``, which is shared with other processes."""
    _memory.add(memory)


def at_exit(function: Callable[[], object]) -> None:
    """Have ``function`` called when the interpreter of this process ends, not that of a child."""
    _at_exit.append(function)
    atexit.register(function)


def not_at_exit(function: Callable[[], object]) -> None:
    """Undo ``at_exit``."""
    atexit.unregister(function)
    with contextlib.suppress(ValueError):
        _at_exit.remove(function)


def close_at_exit(thing: _Closable, *, before: Callable[[], None] = lambda: None) -> None:
    """Have ``thing`` closed when the interpreter of this process ends, if it is there still.
    ``before()`` is called in any case, first."""
    reference = weakref.ref(thing)

    def close() -> None:
        before()
        alive = reference()
        if alive is not None:
            with contextlib.suppress(PotluckError):
                alive.close()

    at_exit(close)
    # Not at exit: finalizers run before atexit functions, so this one would cancel ``close``.
    weakref.finalize(thing, not_at_exit, close).atexit = False


def _mine(sock: Socket) -> Socket:
    _sockets.add(sock)
    return sock


def _in_child() -> None:
    """The first code that runs in a forked child, on its only thread."""
    global here
    here = Process()
    for function in _at_exit:
        atexit.unregister(function)
    _at_exit.clear()
    descriptors = [*_descriptors, *(sock.fileno() for sock in _sockets)]
    with contextlib.suppress(OSError), socket.socket() as blank:
        for fd in descriptors:
            # Replaced and not closed: objects of the native core and of asyncio keep the number,
            # which must not become that of a file of the child's.
            if fd >= 0:
                os.dup2(blank.fileno(), fd, inheritable=False)
    for memory in list(_memory):
        with contextlib.suppress(BufferError):  # an array refers to it
            memory.close()
    for listed in (_sockets, _descriptors, _memory):
        listed.clear()
    _lock.release()


if sys.platform != "win32":
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child
    )


class Uncopied:
    """The base class of objects whose links, threads and hooks belong to one object in one process.
    Without it a copy would fail in the middle, on a lock ("cannot pickle '_thread.RLock' object"),
    or would lack half of what it needs.

    ``copy.copy``, ``copy.deepcopy`` and pickle of an instance raise TypeError, which says what to
    do: ``take_instead``."""

    take_instead: ClassVar[str]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        article = "an" if kind[0] in "AEIOU" else "a"
        raise TypeError(f"{article} {kind} can't be copied or pickled: {self.take_instead}")
