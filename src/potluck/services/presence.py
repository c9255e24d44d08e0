"""``Presence``: which workers still call a service."""

from __future__ import annotations

import time
from collections.abc import Callable

from potluck._core.types import Group
from potluck.services.definition import Call


class Presence:
    """Tracks the time of each worker's last call, and the workers that have left. For any number
    of threads.

    A worker is present while it is in the present group, has not left, and has called in the last
    ``silence_s`` seconds. A worker without a call counts as if it had called when this object was
    made, or when the worker came into the group.
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
        """By worker: the last port of its listener, which identifies its process."""
        self._began = time.monotonic()

    def hear(self, call: Call) -> None:
        """Note a call. Its worker is back, if it had left."""
        self._heard_at[call.worker] = time.monotonic()
        self._gone.discard(call.worker)

    def leave(self, worker: str) -> None:
        """Note that ``worker`` will not call again."""
        self._gone.add(worker)

    def gone(self) -> list[str]:
        """The workers that have left."""
        return sorted(self._gone)

    def begin_anew(self) -> None:
        """Count all workers as if they called now: their calls went to another server until
        now."""
        self._heard_at.clear()
        self._began = time.monotonic()

    def workers(self) -> list[str]:
        """The workers of the group that have not left, silent ones included."""
        return [each.worker for each in self._present().members if each.worker not in self._gone]

    def lost(self) -> list[str]:
        """The workers that have left the group, or were started again, since the last call of this
        method."""
        before, self._before = self._before, self._present()
        if before is None or before is self._before:
            return []
        return _only_in(before, self._before)

    def is_there(self, worker: str) -> bool:
        return worker in self.workers() and self._is_heard(worker)

    def others(self, worker: str) -> list[str]:
        """The present workers without ``worker``."""
        return [each for each in self.workers() if each != worker and self._is_heard(each)]

    def _present(self) -> Group:
        """The present group. A worker that is new in it, or was started again, counts as if it
        called now; if its process is another, it has not left any more."""
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
