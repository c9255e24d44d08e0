"""A Work: one operation under way, and its result."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from potluck._core import forks, hints
from potluck._core.checks import Duration, checked_seconds
from potluck.errors import GroupError, OperationTimeout

_log = logging.getLogger(__name__)

_SLICE_S = 1.0
"""How often a waiting thread looks whether a signal handler has forked, and it is in the child."""


def again(error: BaseException) -> BaseException:
    """A fresh error that says the same, so that raising it twice does not grow one traceback."""
    if isinstance(error, GroupError):
        copy: GroupError = type(error)(
            str(error),
            rank=error.rank,
            epoch=error.epoch,
            operation=error.operation,
            certain=error.certain,
        )
        copy.__cause__ = error.__cause__
        return copy
    return error


class Operation(Protocol):
    """An operation that the engine can be asked about."""

    def wait(self, timeout: float | None) -> bool:
        """Block until it has ended, and end its work; False after ``timeout`` seconds."""

    def look(self) -> None:
        """End its work if it has ended; never blocks."""


class Work:
    """One operation under way.

    Neither read nor change the arrays handed to the operation before ``wait`` has returned.
    """

    __slots__ = (
        "_callbacks",
        "_error",
        "_is_ended",
        "_lock",
        "_process",
        "_result",
        "_running",
        "_transform",
        "call",
        "on_wait",
        "operation",
        "source",
    )

    def __init__(self, call: str, result: Any = None) -> None:
        self.call = call
        self.source = -1
        """The rank that a ``recv`` got its message from, -1 before and for other operations."""
        self.on_wait: Callable[[float], None] | None = None
        """Called with the seconds that a ``wait`` has blocked, if it had to."""
        self.operation: Operation | None = None
        """Set where the engine can wake the caller faster than through ``_running``."""
        self._process = forks.here
        self._is_ended = False
        self._running = threading.Lock()
        """Held until the operation has ended: an Event would cost a microsecond for each call."""
        self._running.acquire()
        self._lock = threading.Lock()
        self._result = result
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Work], None]] = []
        self._transform: Callable[[Any], Any] | None = None

    if not TYPE_CHECKING:  # else a type checker would find every attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(hints.of_object(self, name, hints.WORK), name=name, obj=self)

    def done(self) -> bool:
        """Whether the operation has ended, well or not; never blocks."""
        operation = self.operation
        if operation is not None and not self._is_ended and self._process is forks.here:
            operation.look()
        return self._is_ended

    def exception(self) -> BaseException | None:
        """The error that the operation failed with, None while it runs or when it succeeded."""
        return self._error

    def wait(self, timeout: Duration | None = None) -> Any:
        """Block until the operation has ended, and return its result or raise its error.

        After ``timeout`` seconds OperationTimeout says that the operation still runs. Without
        ``timeout`` the wait ends, too: the operation has a deadline of its own. ForkedProcess in a
        child that was forked while the operation ran.
        """
        seconds = None if timeout is None else checked_seconds(timeout, at_least=0)
        self._check_process()
        if not self._block(seconds):
            self._check_process()  # a signal handler may have forked
            raise OperationTimeout(
                f"{self.call} has not ended after {seconds} s (timed out)",
                operation=self.call,
            )
        if self._error is not None:
            raise again(self._error)
        with self._lock:  # two waiting threads: both get what the first one made
            if self._transform is not None:
                self._result, self._transform = self._transform(self._result), None
            return self._result

    def _block(self, timeout: float | None) -> bool:
        """Block until the operation has ended; False after ``timeout`` seconds."""
        if self._is_ended:
            return True
        began = time.monotonic()
        operation = self.operation
        ended = operation is None or operation.wait(timeout)
        ended = ended and self._ends_within(timeout)
        if self.on_wait is not None:
            self.on_wait(time.monotonic() - began)
        return ended

    def _ends_within(self, timeout: float | None) -> bool:
        if self._is_ended:
            return True
        left = math.inf if timeout is None else max(0.0, timeout)
        while not self._running.acquire(timeout=min(left, _SLICE_S)):
            left -= _SLICE_S
            if left <= 0 or self._process is not forks.here:
                return False
        self._running.release()  # for the next waiting thread
        return True

    def _check_process(self) -> None:
        if self._process is not forks.here and not self._is_ended:
            raise self._process.error("this operation")

    def then(self, transform: Callable[[Any], Any]) -> Work:
        """Let ``wait`` return ``transform(result)``, computed once in the waiting thread."""
        before = self._transform
        self._transform = transform if before is None else lambda value: transform(before(value))
        return self

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call ``callback(work)`` when the operation ends, or now if it has ended.

        The call comes from the thread that ran the operation, so ``callback`` must not block. An
        exception of ``callback`` is logged.
        """
        with self._lock:
            if not self._is_ended:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation. Called by the engine; later calls are ignored."""
        with self._lock:
            if self._is_ended:
                return
            self._error = error
            self._is_ended = True
            self.operation = None  # and with it what it keeps
            self._running.release()
        for callback in self._callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Work], None]) -> None:
        try:
            callback(self)
        except Exception:  # a failing callback must not end the progress thread
            _log.exception("a done-callback of %s raised", self.call)


class Together(Work):
    """One Work of several: it ends with the last of ``parts``, or with the first that fails."""

    __slots__ = ("_num_left", "_parts")

    def __init__(self, call: str, parts: Sequence[Work], result: Any = None) -> None:
        super().__init__(call, result)
        self._parts = tuple(parts)
        self._num_left = len(self._parts)
        for part in self._parts:
            part.add_done_callback(self._ended)
        if not self._parts:
            self.finish()

    def done(self) -> bool:
        """Whether all parts have ended, or one has failed; never blocks."""
        return all(part.done() for part in self._parts) or self._is_ended

    def _block(self, timeout: float | None) -> bool:
        # The parts' own waits, because those know how to move bytes and when to give up.
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not part._block(left):
                return False
            if part.exception() is not None:
                break
        self.finish(next((e for part in self._parts if (e := part.exception())), None))
        return True

    def _ended(self, part: Work) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last or part.exception() is not None:
            self.finish(part.exception())


def finished(call: str, result: Any) -> Work:
    """A Work that has ended already, for operations with nothing to do."""
    work = Work(call, result)
    work.finish()
    return work


def deadline_after(timeout_s: float) -> float:
    return time.monotonic() + timeout_s
