"""The state of a group: alive, or over with an error. The first failure ends it for good."""

from __future__ import annotations

import threading
from collections.abc import Callable

from potluck._core.types import Group
from potluck.errors import GroupClosed


class GroupState:
    """Holds the error that ended the group, None while it is alive. Set once; for any thread."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def error(self) -> BaseException | None:
        return self._error

    def fail(self, error: BaseException) -> None:
        """End the group with ``error``; the first one wins."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once the group is over, on whatever thread ends it; or now."""
        with self._lock:
            if self._error is None:
                self._watchers.append(callback)
                return
        callback()

    def closed(self) -> GroupClosed:
        """What calls raise after an orderly close."""
        return GroupClosed(
            f"the group of epoch {self.group.epoch} was closed on this rank",
            rank=self.group.rank,
            epoch=self.group.epoch,
        )
