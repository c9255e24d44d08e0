"""Links between threads of one process: two bounded byte pipes, no socket.

A real transport, not a mock: bytes are copied, the pipes fill up, and closing one end is an end for
the other. There is no descriptor to select on; each end calls the other's waker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from potluck._core.transport.link_memory import LinkMemory
from potluck.errors import LinkError


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
    """One end of a pair; see ``link.py``. Safe to close from any thread."""

    memory: LinkMemory | None = None

    def __init__(self, peer: str, lock: threading.Lock, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._peer = peer
        self._lock = lock
        self._out = outgoing
        self._in = incoming
        self._other: InprocLink = self
        self._wake: Callable[[], None] | None = None
        self._end: str = ""
        self.killed = threading.Event()
        """Set when the worker that holds this end is killed: no byte leaves or enters any more. The
        ends of one worker share the event, so all of them end at one moment."""

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


def inproc_pair(name_a: str, name_b: str, capacity: int = 1 << 20) -> tuple[InprocLink, InprocLink]:
    """Two connected ends: the first is held by ``name_a`` and leads to ``name_b``.

    ``capacity`` is what each direction holds, in bytes, before send returns 0.
    """
    if capacity < 1:
        raise ValueError(f"a pipe needs room for at least 1 byte, not {capacity}")
    lock = threading.Lock()
    there, back = _Pipe(capacity), _Pipe(capacity)
    a = InprocLink(name_b, lock, there, back)
    b = InprocLink(name_a, lock, back, there)
    a._other, b._other = b, a
    return a, b
