"""Writing in the background, one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one ``write()`` in a thread of its own; its error surfaces at the next call here."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Wait until the last write has ended, start this one, and raise what the last raised.

        Raising does not keep this one from being written.
        """
        error = self._end()
        # Not a daemon: an interpreter that ends waits until everything is on the disk.
        self._thread = threading.Thread(target=self._run, args=(write,), name=self._name)
        self._thread.start()
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until nothing is under way, and raise what the last write raised."""
        error = self._end()
        if error is not None:
            raise error

    def _end(self) -> BaseException | None:
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
