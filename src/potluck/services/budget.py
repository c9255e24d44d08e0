"""``Budget``: how many bytes of calls a server holds at one time."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Budget(Generic[T]):
    """Bytes of the requests and replies under way, of all clients together. Small ones
    (``channel.SMALL_BYTES``) are not counted while it is not full.

    A client whose request does not fit waits, in order, and its bytes stay in the network until
    others have ended. One request alone always fits. Replies are counted, not refused: their size
    is known when the method has run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._charged: dict[T, int] = {}
        self._waiting: deque[tuple[T, int]] = deque()
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether every request must wait, or enter in its turn."""
        return bool(self._waiting) or self._used >= self._limit

    def enter(self, client: T, nbytes: int) -> bool:
        """Charge a request; False if ``client`` must wait until ``leave`` names it."""
        with self._lock:
            if self._waiting or not self._fits(nbytes):
                self._waiting.append((client, nbytes))
                return False
            self._charge(client, nbytes)
            return True

    def add(self, client: T, nbytes: int) -> None:
        """Charge a reply."""
        with self._lock:
            self._charge(client, nbytes)

    def leave(self, client: T) -> list[T]:
        """The call of ``client`` has ended; the clients that need wait no more, charged."""
        with self._lock:
            self._used -= self._charged.pop(client, 0)
            self._waiting = deque(each for each in self._waiting if each[0] is not client)
            admitted = []
            while self._waiting and self._fits(self._waiting[0][1]):
                other, nbytes = self._waiting.popleft()
                self._charge(other, nbytes)
                admitted.append(other)
            return admitted

    def _fits(self, nbytes: int) -> bool:
        return not self._used or self._used + nbytes <= self._limit

    def _charge(self, client: T, nbytes: int) -> None:
        self._charged[client] = self._charged.get(client, 0) + nbytes
        self._used += nbytes
