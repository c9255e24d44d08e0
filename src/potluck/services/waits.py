"""``WaitingCalls``: calls of a service that wait for a change, without a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from potluck._core.background import start_thread


class _Call:
    def __init__(
        self, attempt: Callable[[], Any], otherwise: Callable[[], Any], until: float
    ) -> None:
        self.attempt = attempt
        self.otherwise = otherwise
        self.until = until
        self.future: Future[Any] = Future()


class WaitingCalls:
    """Each call that waits gets a Future, which ends when the call's ``attempt()`` gives a reply
    that is not None; after ``wait_s`` with what ``otherwise()`` gives.

    The caller then asks again. So a caller that is gone is forgotten in time. All methods are
    called with ``changed`` held, which attempts hold, too.
    """

    def __init__(
        self, changed: threading.Condition, on_time: Callable[[], None], *, thread: str
    ) -> None:
        """``on_time()`` is called when a wait ends by its time, and calls ``look``. Meanwhile a
        thread named ``thread`` runs."""
        self._changed = changed
        self._on_time = on_time
        self._thread = thread
        self._calls: list[_Call] = []
        self._is_ticking = False

    def add(
        self, attempt: Callable[[], Any], otherwise: Callable[[], Any], wait_s: float
    ) -> Future[Any]:
        """A call; its Future has ended already if it need not wait."""
        call = _Call(attempt, otherwise, time.monotonic() + wait_s)
        if not self._is_over(call):
            self._calls.append(call)
            if not self._is_ticking:  # the thread waits for ``changed``, which is held
                start_thread(self._tick, name=self._thread, on_broken=self._broken)
                self._is_ticking = True
        return call.future

    def look(self) -> None:
        """Something has changed: end the waits that are over."""
        self._calls = [call for call in self._calls if not self._is_over(call)]

    def _is_over(self, call: _Call) -> bool:
        try:
            reply = call.attempt()
            if reply is None:
                if call.until > time.monotonic():
                    return False
                reply = call.otherwise()
        except Exception as error:
            call.future.set_exception(error)
            return True
        call.future.set_result(reply)
        return True

    def _tick(self) -> None:
        with self._changed:
            while self._calls:
                left = min(call.until for call in self._calls) - time.monotonic()
                self._changed.wait(max(0.0, left))
                self._on_time()
            self._is_ticking = False

    def _broken(self, error: BaseException) -> None:
        with self._changed:
            self._is_ticking = False
            calls, self._calls = self._calls, []
        for call in calls:
            call.future.set_exception(error)
