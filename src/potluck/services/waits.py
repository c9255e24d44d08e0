"""Waits for services, with a deadline: ``attempts`` to find one, and calls of one that wait for a
change, by ``WaitingCalls`` at the server, without a thread for each, and ``await_reply`` at the
caller.

A call that waits is answered after ``SLICE_S`` at most, and made again. So the server forgets a
caller that is gone, and the caller sees that the group has changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

from potluck._core.background import start_thread
from potluck._core.waiting import Reminder
from potluck.errors import HandlerError, ServiceTimeout

SLICE_S = 1.0
"""The longest wait of one call at the server."""


def attempts(
    timeout_s: float, pause_s: float, sleep: Callable[[float], object] = time.sleep
) -> Iterator[float]:
    """The deadline of all attempts, once for each: one at once, the others after pauses, which
    double from ``pause_s`` to ten times that. No attempt begins after the deadline."""
    deadline, longest_s = time.monotonic() + timeout_s, 10 * pause_s
    yield deadline
    while time.monotonic() + pause_s < deadline:
        sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
        yield deadline


@dataclass(eq=False, slots=True)
class _Call:
    attempt: Callable[[], Any]
    otherwise: Callable[[], Any]
    until: float
    future: Future[Any] = field(default_factory=Future)


class WaitingCalls:
    """The calls of one server that wait. Each has a Future, whose result is the first reply of the
    call's ``attempt()`` that is not None; after ``wait_s``, the reply of ``otherwise()``.

    All methods are called with ``changed`` held; so are ``attempt`` and ``otherwise``.
    """

    def __init__(
        self, changed: threading.Condition, on_time: Callable[[], None], *, thread: str
    ) -> None:
        """``on_time()`` is called when a call's time is over, and calls ``look``. While calls wait,
        a thread named ``thread`` runs."""
        self._changed = changed
        self._on_time = on_time
        self._thread = thread
        self._calls: list[_Call] = []
        self._is_ticking = False

    def add(
        self, attempt: Callable[[], Any], otherwise: Callable[[], Any], wait_s: float
    ) -> Future[Any]:
        """The Future of a new call. It has ended already if the call need not wait."""
        call = _Call(attempt, otherwise, time.monotonic() + wait_s)
        if not self._is_over(call):
            self._calls.append(call)
            if not self._is_ticking:  # the thread waits for ``changed``, which is held
                start_thread(self._tick, name=self._thread, on_broken=self._broken)
                self._is_ticking = True
        return call.future

    def look(self) -> None:
        """After a change: answer the calls whose wait is over."""
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


_MISTAKES: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


def raise_local(error: HandlerError, kinds: Mapping[str, type[Exception]] = _MISTAKES) -> NoReturn:
    """Raise the error that a method raised for a mistake of this script, of one of the types
    ``kinds`` by name, as if it were raised here; for all others ``error`` itself."""
    kind = kinds.get(error.type)
    if kind is None:
        raise error
    raise kind(error.text) from error


def await_reply(
    ask: Callable[[float], Any],
    what: str,
    timeout_s: float | None,
    between: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The first reply of ``ask(wait_s)`` without ``waits_for``, the text of what the server still
    waits for. ``between()`` is called before each call.

    ServiceTimeout, which says what was waited for, after ``timeout_s`` seconds if that is given.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waits_for = "the server"
    reminder = Reminder(lambda: f"{what}: waiting for {waits_for}", deadline)
    while True:
        between()
        left = SLICE_S if deadline is None else deadline - time.monotonic()
        reply: dict[str, Any] = ask(min(SLICE_S, max(0.0, left)))
        if "waits_for" not in reply:
            return reply
        waits_for = str(reply["waits_for"])
        if left <= 0:
            raise ServiceTimeout(
                f"{what} did not come within {timeout_s:g} s: it waits for {waits_for}"
            )
        reminder.tick()
