"""``Log``: the decisions of the first server that another server may not have carried out yet."""

from __future__ import annotations

import threading

from potluck.parameter_server.entries import Entry

MAX_BEHIND = 1 << 16
"""Entries; with more, the first server answers no calls until the others have caught up."""


class Log:
    """The newest entries, each with a number; the newest has the number ``index``. For any number
    of threads, by the lock ``changed``."""

    def __init__(self, changed: threading.Condition, *, is_kept: bool) -> None:
        """``is_kept``: there are other servers."""
        self.index = 0
        self._entries: list[Entry] = []
        self._changed = changed
        self._is_kept = is_kept

    def append(self, entry: Entry) -> None:
        """One more."""
        self.index += 1
        if self._is_kept:
            self._entries.append(entry)

    def begin(self, index: int) -> None:
        """All servers have the state after entry ``index``."""
        self.index, self._entries = index, []

    @property
    def is_empty(self) -> bool:
        """Whether all servers have carried out all entries."""
        return not self._entries

    @property
    def is_full(self) -> bool:
        """Whether another server is too far behind."""
        return len(self._entries) > MAX_BEHIND

    def entries(self, wait_s: float) -> tuple[int, list[Entry]]:
        """The number of the first entry that another server may lack, and the entries from there
        on; waits for one if there is none."""
        with self._changed:
            if not self._entries:
                self._changed.wait(wait_s)
            return self.index - len(self._entries) + 1, list(self._entries)

    def carried_out(self, count: int) -> None:
        """All other servers have carried out the first ``count`` entries."""
        with self._changed:
            del self._entries[:count]
            self._changed.notify_all()

    def wake(self) -> None:
        """End the wait of ``entries``."""
        with self._changed:
            self._changed.notify_all()
