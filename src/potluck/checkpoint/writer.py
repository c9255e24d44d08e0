"""A background thread for writing, with one write at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from potluck._core.forks import Owner


class BackgroundWriter:
    """Runs ``write()`` functions in a thread, one after the other. The error of a write is raised
    by the next call of ``submit`` or ``wait``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = Owner("this store, which writes in the background,")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Wait until the previous write has ended, start ``write``, and raise the error of the
        previous one. ``write`` is started also if this raises."""
        error = self._end()
        # Not a daemon: at its end the interpreter waits for the write.
        self._thread = threading.Thread(target=self._run, args=(write,), name=self._name)
        self._thread.start()
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until the write in progress has ended, and raise its error."""
        error = self._end()
        if error is not None:
            raise error

    def _end(self) -> BaseException | None:
        self._owner.check()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
