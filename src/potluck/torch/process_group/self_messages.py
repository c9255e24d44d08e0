"""Messages of a rank to itself, without a link.

torch's V-shaped pipeline schedules send such messages, since a rank has two neighbouring stages.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque

from potluck._core.backends.serial_executor import BoundedWork
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.work import Work, finished
from potluck.errors import Desync


class SelfMessages:
    """Queues of unreceived messages and of receives without a message, by tag. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[int, deque[Array]] = defaultdict(deque)
        self._wanted: defaultdict[int, deque[tuple[BoundedWork, Array]]] = defaultdict(deque)

    def send(self, array: Array, tag: int) -> Work:
        """Send a copy of ``array``; the work is complete when this returns."""
        with self._lock:
            receive = self._wanted[tag].popleft() if self._wanted[tag] else None
            if receive is None:
                self._sent[tag].append(array.copy())
        if receive is not None:
            _deliver(array, *receive)
        return finished("send to oneself", array)

    def recv(self, array: Array, rank: int, tag: int, *, timeout_s: float) -> Work:
        """Receive into ``array``. OperationTimeout if there is no message within ``timeout_s``
        seconds; Desync if its dtype or shape differs."""
        call = f"recv({array.dtype}, shape {array.shape}, from rank {rank} itself, tag {tag})"
        work: BoundedWork = BoundedWork(
            call, array, time.monotonic() + timeout_s, lambda error: work.finish(error)
        )
        work.source = rank
        with self._lock:
            message = self._sent[tag].popleft() if self._sent[tag] else None
            if message is None:
                self._wanted[tag].append((work, array))
        if message is not None:
            _deliver(message, work, array)
        return work


def _deliver(message: Array, work: Work, array: Array) -> None:
    if message.dtype != array.dtype or message.shape != array.shape:
        told = f"{work.call} met a message of {message.dtype}, shape {message.shape}"
        work.finish(Desync(told, operation=work.call))
        return
    array[...] = message
    work.finish()
