"""``Budget``: how many bytes of calls a server holds at one time."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Budget(Generic[T]):
    """Bytes of the requests and replies under way, of all clients together.

    A client whose request does not fit waits, in order, and its bytes stay in the network until
    others have ended. One request alone always fits. Replies are counted, not refused: their size
    is known when the method has run. Small requests (``channel.SMALL_BYTES``) are not counted, and
    wait only while the replies alone reach the limit. So a client that announces a long request and
    then stops keeps long ones waiting, and no others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests = self._replies = 0
        self._charged: dict[T, tuple[int, int]] = {}
        """The bytes of a client's request, and of its reply."""
        self._waiting: deque[tuple[T, int]] = deque()
        self._small: deque[T] = deque()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """The bytes of requests and replies under way."""
        return self._requests + self._replies

    @property
    def is_full(self) -> bool:
        """Whether small requests must wait as well."""
        return self._replies >= self._limit

    def enter(self, client: T, nbytes: int) -> bool:
        """Charge a request; False if ``client`` must wait until ``leave`` names it."""
        with self._lock:
            if self._waiting or not self._fits(nbytes):
                self._waiting.append((client, nbytes))
                return False
            self._charge(client, nbytes, 0)
            return True

    def enter_small(self, client: T) -> bool:
        """The same for a small request, which is not charged."""
        with self._lock:
            if self.is_full:
                self._small.append(client)
                return False
            return True

    def add(self, client: T, nbytes: int) -> None:
        """Charge a reply."""
        with self._lock:
            self._charge(client, 0, nbytes)

    def leave(self, client: T) -> list[T]:
        """The call of ``client`` has ended; the clients that need wait no more, charged."""
        with self._lock:
            request, reply = self._charged.pop(client, (0, 0))
            self._requests -= request
            self._replies -= reply
            self._waiting = deque(each for each in self._waiting if each[0] is not client)
            self._small = deque(each for each in self._small if each is not client)
            admitted = []
            while self._waiting and self._fits(self._waiting[0][1]):
                other, nbytes = self._waiting.popleft()
                self._charge(other, nbytes, 0)
                admitted.append(other)
            if not self.is_full:
                admitted.extend(self._small)
                self._small.clear()
            return admitted

    def _fits(self, nbytes: int) -> bool:
        return not self.used or self.used + nbytes <= self._limit

    def _charge(self, client: T, request: int, reply: int) -> None:
        before = self._charged.get(client, (0, 0))
        self._charged[client] = before[0] + request, before[1] + reply
        self._requests += request
        self._replies += reply
