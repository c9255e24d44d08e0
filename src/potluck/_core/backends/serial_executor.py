"""A thread that runs the calls of a group into another library, one after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from potluck._core.background import OnBroken, start_thread
from potluck._core.checks import Duration, checked_seconds
from potluck._core.engine.work import Work
from potluck.errors import OperationTimeout, PotluckError

_GRACE_S = 0.5
"""Seconds after an operation's deadline for the library to raise its own, more precise error."""


class SerialExecutor:
    """Runs tasks in order on a thread, which is started with the first task."""

    def __init__(self, name: str, on_broken: OnBroken) -> None:
        """``on_broken(error)`` is called if a task raises; later tasks are not run."""
        self._name = name
        self._on_broken = on_broken
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` after all earlier ones. It must not raise."""
        with self._lock:
            if self._thread is None:
                # A daemon, because a thread that is blocked inside a library can't be ended.
                self._thread = start_thread(self._run, name=self._name, on_broken=self._on_broken)
        self._tasks.put(task)

    def close(self, timeout_s: float) -> None:
        """End the thread after its present tasks; wait for that at most ``timeout_s``."""
        self._tasks.put(None)
        if self._thread is not None and timeout_s > 0:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # frees the task's arrays before the wait


class BoundedWork(Work):
    """A Work with a deadline that holds even if the library does not return.

    The operation may be queued behind another with a later deadline, or be in a library without
    deadlines.
    """

    __slots__ = ("_deadline", "_on_late")

    def __init__(
        self, call: str, result: Any, deadline: float, on_late: Callable[[PotluckError], None]
    ) -> None:
        super().__init__(call, result)
        self._deadline = deadline
        self._on_late = on_late

    def wait(self, timeout: Duration | None = None) -> Any:
        """See ``Work.wait``."""
        left = self._deadline + _GRACE_S - time.monotonic()
        if timeout is None or checked_seconds(timeout, at_least=0) > left:
            if not self._block(max(0.0, left)):
                self._on_late(
                    OperationTimeout(
                        f"{self.call} has not ended before its deadline", operation=self.call
                    )
                )
            timeout = None
        return super().wait(timeout)

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the operation ends within ``timeout_s``. Does not raise the operation's error."""
        return self._ends_within(timeout_s)
