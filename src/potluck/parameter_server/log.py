"""``Log``: the newest decisions, those that another server may not have carried out yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from potluck.parameter_server.entries import AnyEntry, Entry

MAX_BEHIND = 1 << 16
"""Entries; with more, the first server answers no calls until the others have caught up."""


class Position(NamedTuple):
    """That of an entry in the logs of all servers, and so the state after it: two servers of one
    position have carried out the same entries. Later ones are greater."""

    incarnation: int
    """That of the first server which decided it."""
    number: int


class Log:
    """The entries from ``base`` to ``position``, all of one incarnation. For any number of threads,
    by the lock ``changed``."""

    def __init__(self, changed: threading.Condition) -> None:
        self.index = 0
        """The highest number of an entry. The next one has the number after it."""
        self.position = Position(0, 0)
        """That of the newest entry."""
        self.base = self.position
        """That of the entry before those that are kept."""
        self.is_kept = False
        """Whether there are other servers."""
        self._entries: list[Entry] = []
        self._changed = changed

    def append(self, entry: Entry, incarnation: int) -> None:
        """One more."""
        self.index += 1
        self.position = Position(incarnation, self.index)
        self._entries.append(entry)
        if not self.is_kept:
            self.begin(self.index)

    def begin(self, index: int) -> None:
        """All servers have the state of ``position``; the numbers of new entries are above
        ``index``."""
        self.index, self.base, self._entries = index, self.position, []

    def skip_to(self, number: int) -> None:
        """The next entry has that number."""
        if number != self.index + 1:
            self.begin(number - 1)

    @property
    def first(self) -> int:
        """The number of the first entry that another server may lack."""
        return self.index - len(self._entries) + 1

    @property
    def is_empty(self) -> bool:
        """Whether all servers have carried out all entries."""
        return not self._entries

    @property
    def is_full(self) -> bool:
        """Whether another server is too far behind."""
        return len(self._entries) > MAX_BEHIND

    def is_everywhere(self, index: int) -> bool:
        """Whether all servers have carried out the entry with that number."""
        return index < self.first

    def entries(self, wait_s: float = 0.0) -> tuple[int, list[Entry]]:
        """``first``, and the entries from there on; waits for one if there is none."""
        with self._changed:
            if not self._entries:
                self._changed.wait(wait_s)
            return self.first, list(self._entries)

    def drop_before(self, first: int) -> None:
        """All servers have carried out the entries before number ``first``."""
        with self._changed:
            count = min(first - self.first, len(self._entries))
            if count > 0:
                self.base = Position(self.position.incarnation, self.first + count - 1)
                del self._entries[:count]
                self._changed.notify_all()

    def wake(self) -> None:
        """End the wait of ``entries``."""
        with self._changed:
            self._changed.notify_all()


def after(
    position: Position, base: Position, newest: Position, entries: Sequence[AnyEntry]
) -> Sequence[AnyEntry] | None:
    """Which of ``entries``, those of a log from ``base`` to ``newest``, a server that has come to
    ``position`` lacks. None if its state is none that the log went through since ``base``."""
    first = newest.number - len(entries) + 1
    if position in (base, newest):
        return entries if position == base else ()
    if position.incarnation == newest.incarnation and first <= position.number <= newest.number:
        return entries[position.number + 1 - first :]
    return None
