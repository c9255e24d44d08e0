"""A thread beside backward: buckets are encoded, and their collectives started, in order."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from potluck._core import forks
from potluck._core.background import start_thread


class Encoder:
    """Runs functions one after the other, in the order in which they were added.

    Its thread is started by the first function, waits for later ones, and ends when nothing refers
    to the encoder any more. A forked child, which has no such thread, starts one of its own. After
    a function has raised, those behind it are dropped until ``drain`` or ``drop``.
    """

    def __init__(self) -> None:
        self._queue = _Queue()

    def add(self, task: Callable[[], None]) -> None:
        """Run ``task()`` after all earlier functions. RuntimeError if the system has no thread for
        it."""
        own = self._own()
        if own.thread is None or not own.thread.is_alive():
            own.thread = start_thread(own.run, name="potluck-encode", on_broken=own.broke)
            # A SimpleQueue may be used where the garbage collector has interrupted its other use.
            weakref.finalize(self, own.tasks.put, None).atexit = False  # a daemon needs no end
        own.add(task)

    def drain(self) -> None:
        """Wait until all have run; raises what a function has raised."""
        error = self._own().ended()
        if error is not None:
            raise error

    def drop(self) -> None:
        """Forget the functions that have not begun, and errors, and wait for the end of the
        running function."""
        own = self._own()
        own.is_dropping = True
        own.ended()

    def _own(self) -> _Queue:
        """The queue of this process: a lock may have been held when it was forked."""
        if self._queue.process is not forks.here:
            self._queue = _Queue()
        return self._queue


class _Queue:
    """The functions of an encoder, and all that its thread refers to between two of them."""

    def __init__(self) -> None:
        self.process = forks.here
        self.tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.is_dropping = False
        self._changed = threading.Condition()
        self._num_left = 0
        self._error: BaseException | None = None

    def add(self, task: Callable[[], None]) -> None:
        with self._changed:
            if self._error is None:
                self._num_left += 1
                self.tasks.put(task)

    def ended(self) -> BaseException | None:
        """Wait until no function is left; returns what one has raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_left)
            error, self._error, self.is_dropping = self._error, None, False
        return error

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            try:
                if self._error is None and not self.is_dropping:
                    task()
            except BaseException as error:  # raised where the results are waited for
                with self._changed:
                    self._error = error
            del task  # which may refer to the encoder
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()

    def broke(self, error: BaseException) -> None:
        with self._changed:
            self._error, self._num_left = error, 0
            self._changed.notify_all()
