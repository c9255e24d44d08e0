"""A thread beside backward: buckets are encoded, and their collectives started, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from potluck._core.background import start_thread


class Encoder:
    """Runs functions one after the other, in the order in which they were added.

    Its thread lives while there are functions to run, so that nothing needs to close it. After a
    function has raised, those behind it are dropped until ``drain`` or ``drop``.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._error: BaseException | None = None

    def add(self, task: Callable[[], None]) -> None:
        """Run ``task()`` after those that were added before. RuntimeError if the system has no
        thread for it."""
        with self._changed:
            if self._error is not None:
                return
            if not self._is_running:  # the thread waits for the end of this block
                start_thread(self._run, name="potluck-encode", on_broken=self._broke)
                self._is_running = True
            self._tasks.append(task)

    def drain(self) -> None:
        """Wait until all have run; raises what a function has raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def drop(self) -> None:
        """Forget those that have not begun, and errors, and wait for the end of the one that
        has."""
        with self._changed:
            self._tasks.clear()
            self._changed.wait_for(lambda: not self._is_running)
            self._error = None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                task = self._tasks.popleft()
            try:
                task()
            except BaseException as error:  # raised where the results are waited for
                with self._changed:
                    self._error = error
                    self._tasks.clear()

    def _broke(self, error: BaseException) -> None:
        with self._changed:
            self._error, self._is_running = error, False
            self._tasks.clear()
            self._changed.notify_all()
