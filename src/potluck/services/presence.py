"""``Presence``: which callers of a service are there."""

from __future__ import annotations

import time
from collections.abc import Callable

from potluck._core.types import Group
from potluck.services.definition import Call


class Presence:
    """When each worker was heard, and which ones have left. For any number of threads.

    A worker is there while it is in the present group, has not left, and was heard in the last
    ``silence_s`` seconds; one that has not called yet counts as heard when this object was made, or
    when it came into the group.
    """

    def __init__(self, group: Callable[[], Group], silence_s: float) -> None:
        """``group()`` is the present group."""
        self._group = group
        self._silence_s = silence_s
        self._heard_at: dict[str, float] = {}
        self._gone: set[str] = set()
        self._before: Group | None = None
        self._seen = group()
        self._ports = {each.worker: each.port for each in self._seen.members}
        """By worker: the last one of its listener, by which its process is known."""
        self._began = time.monotonic()

    def hear(self, call: Call) -> None:
        """A call has come; its worker is back, if it had left."""
        self._heard_at[call.worker] = time.monotonic()
        self._gone.discard(call.worker)

    def leave(self, worker: str) -> None:
        """``worker`` calls no more."""
        self._gone.add(worker)

    def gone(self) -> list[str]:
        """The workers that have left."""
        return sorted(self._gone)

    def begin_anew(self) -> None:
        """Calls came elsewhere until now: all count as heard."""
        self._heard_at.clear()
        self._began = time.monotonic()

    def workers(self) -> list[str]:
        """The workers of the group that have not left, also those that are silent."""
        return [each.worker for each in self._present().members if each.worker not in self._gone]

    def lost(self) -> list[str]:
        """The workers that were in the group at the last call of this method, and are not now, or
        were started again."""
        before, self._before = self._before, self._present()
        if before is None or before is self._before:
            return []
        return _only_in(before, self._before)

    def is_there(self, worker: str) -> bool:
        return worker in self.workers() and self._is_heard(worker)

    def others(self, worker: str) -> list[str]:
        """The workers that are there, without ``worker``."""
        return [each for each in self.workers() if each != worker and self._is_heard(each)]

    def _present(self) -> Group:
        """The present group. A worker that was not in the one before, or was started again, counts
        as heard now. That it had left was its earlier life, if its process is another one."""
        before, self._seen = self._seen, self._group()
        if before is not self._seen:
            for worker in _only_in(self._seen, before):
                self._heard_at[worker] = time.monotonic()
            for each in self._seen.members:
                if self._ports.setdefault(each.worker, each.port) != each.port:
                    self._ports[each.worker] = each.port
                    self._gone.discard(each.worker)
        return self._seen

    def _is_heard(self, worker: str) -> bool:
        since = time.monotonic() - self._silence_s
        return self._heard_at.get(worker, self._began) > since


def _only_in(group: Group, other: Group) -> list[str]:
    """The workers of ``group`` whose processes are not in ``other``."""
    known = {(each.worker, each.port) for each in other.members}
    return [each.worker for each in group.members if (each.worker, each.port) not in known]
