"""Links between threads of one process: a socket pair for the native loop, two bounded byte pipes
for the Python loop.

Real transports, not mocks: bytes are copied, the link fills up, and closing one end is an end for
the other. Pipes have no descriptor to select on; each end calls the other's waker.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from potluck._core import forks, native
from potluck._core.transport.link_memory import LinkMemory
from potluck._core.transport.native_tls import is_available
from potluck.errors import LinkError


class Killed(Protocol):
    """Set when a worker is killed: no byte leaves or enters by its links any more. They share it,
    so all of them end at one moment. A ``threading.Event``, or the native core's ``Killed``."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


class _Pipe:
    """One direction: a bounded queue of bytes. The lock belongs to the pair."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = bytearray()
        self.closed = False  # by its writer: what is inside can still be read

    def put(self, data: memoryview) -> int:
        taken = min(len(data), self.capacity - len(self.held))
        self.held += data[:taken]
        return taken

    def take(self, buffer: memoryview) -> int:
        given = min(len(buffer), len(self.held))
        with memoryview(self.held) as held:
            buffer[:given] = held[:given]
        del self.held[:given]  # moves no byte, only the start of the bytearray
        return given


class InprocLink:
    """One end of a pair of pipes; see ``link.py``. Safe to close from any thread."""

    memory: LinkMemory | None = None
    stream = None

    def __init__(self, peer: str, lock: threading.Lock, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._peer = peer
        self._lock = lock
        self._out = outgoing
        self._in = incoming
        self._other: InprocLink = self
        self._wake: Callable[[], None] | None = None
        self._end: str = ""
        self.killed: Killed = threading.Event()

    @property
    def peer(self) -> str:
        return self._peer

    def __repr__(self) -> str:
        return f"<InprocLink to {self._peer}>"

    def fileno(self) -> int:
        return -1

    def bind(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._wake = wake
            waiting = len(self._in.held) > 0 or self._in.closed or bool(self._end)
        if waiting:
            wake()

    def send(self, data: memoryview) -> int:
        with self._lock:
            self._check()
            if self._other._end or self._in.closed:
                raise LinkError(f"{self._peer} closed the link while sending")
            taken = self._out.put(data)
        if taken:
            self._other._notify()
        return taken

    def recv_into(self, buffer: memoryview) -> int:
        with self._lock:
            self._check()
            given = self._in.take(buffer)
            if given == 0 and len(buffer) and self._in.closed:
                raise LinkError(f"{self._peer} closed the link while receiving")
        if given:
            self._other._notify()
        return given

    @property
    def readable(self) -> bool:
        with self._lock:
            return len(self._in.held) > 0 or self._in.closed or bool(self._end)

    def cut(self) -> None:
        """End the link, from any thread."""
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._end:
                return
            self._end = f"link to {self._peer} was closed here"
            self._out.closed = True
        self._other._notify()

    def _check(self) -> None:
        if self.killed.is_set():
            raise LinkError("this worker was killed")
        if self._end:
            raise LinkError(self._end)

    def _notify(self) -> None:
        wake = self._wake
        if wake is not None:
            wake()


class SocketLink:
    """One end of a socket pair, for the native loop, which takes ``stream``; see ``link.py``."""

    memory: LinkMemory | None = None

    def __init__(self, peer: str, sock: socket.socket, killed: Any) -> None:
        """``killed`` is the native core's."""
        sock.setblocking(False)
        self._peer = peer
        self._sock = sock
        self._lock = threading.Lock()  # so that ``cut`` never ends another socket of that number
        self.stream = native.core.LocalStream(sock.fileno(), killed, peer)

    @property
    def peer(self) -> str:
        return self._peer

    def __repr__(self) -> str:
        return f"<SocketLink to {self._peer}>"

    def fileno(self) -> int:
        return self._sock.fileno()

    def bind(self, wake: Callable[[], None]) -> None:
        """Not needed: the descriptor tells."""

    def send(self, data: memoryview) -> int:
        return self._moved(self.stream.send, data)

    def recv_into(self, buffer: memoryview) -> int:
        return self._moved(self.stream.recv_into, buffer)

    def _moved(self, move: Callable[[memoryview], int], data: memoryview) -> int:
        if self._sock.fileno() < 0:
            raise LinkError(f"link to {self._peer} was closed here")
        try:
            return move(data)
        except RuntimeError as error:
            raise LinkError(str(error)) from None

    @property
    def readable(self) -> bool:
        return self.stream.is_readable

    def cut(self) -> None:
        """End the link, from any thread; the loop that has it then closes it."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._sock.close()


def inproc_pair(
    name_a: str,
    name_b: str,
    killed: tuple[Killed, Killed] | None = None,
    *,
    capacity: int = 1 << 20,
) -> tuple[InprocLink, InprocLink]:
    """Two connected ends: the first is held by ``name_a`` and leads to ``name_b``.

    ``killed``: what is set when the holder of each end is killed. ``capacity`` is what each
    direction holds, in bytes, before send returns 0.
    """
    if capacity < 1:
        raise ValueError(f"a pipe needs room for at least 1 byte, not {capacity}")
    lock = threading.Lock()
    there, back = _Pipe(capacity), _Pipe(capacity)
    a = InprocLink(name_b, lock, there, back)
    b = InprocLink(name_a, lock, back, there)
    a._other, b._other = b, a
    if killed is not None:
        a.killed, b.killed = killed
    return a, b


def socket_pair(
    name_a: str, name_b: str, killed: tuple[Killed, Killed]
) -> tuple[SocketLink, SocketLink]:
    """The same for the native loop."""
    with forks.opening() as mine:
        a, b = map(mine, socket.socketpair())
    return SocketLink(name_b, a, killed[0]), SocketLink(name_a, b, killed[1])


def new_killed() -> Killed:
    """For a new worker, on either loop."""
    made: Killed = native.core.Killed() if is_available() else threading.Event()
    return made
