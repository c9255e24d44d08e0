"""Which worker may pull, and which gradient be applied, so that none gets too old. Pure.

Each worker that computes on version ``u`` will push a gradient. It may wait on the server until it
is applied, but never be applied at a version above ``u + max_staleness``. With one update for each
gradient, and the oldest applied first, the gradient in place ``j`` (from 0) of all that are
outstanding is applied at version ``now + j`` at best. So a set of outstanding versions is feasible
if and only if ``now + j - u_j <= max_staleness`` for the ``j``-th oldest ``u_j`` (earliest deadline
first, which meets all deadlines if any order does). Pulls and updates that keep the set feasible go
on; others wait. The oldest gradient may always be applied, so some worker always goes on; also
where the bound has shrunk since, with the number of workers, and the set is feasible no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


def is_feasible(now: int, outstanding: Iterable[int], max_staleness: int) -> bool:
    """Whether all gradients on the ``outstanding`` versions can be applied in time."""
    oldest_first = enumerate(sorted(outstanding))
    return all(now + place - version <= max_staleness for place, version in oldest_first)


@dataclass(slots=True)
class Lease:
    """A worker's right to compute on ``version``, until ``expires_at``."""

    version: int
    expires_at: float


@dataclass(slots=True)
class Leases:
    """The versions that workers compute on, or whose gradients wait here."""

    max_staleness: int
    held: dict[str, Lease] = field(default_factory=dict)

    def pull(self, worker: str, now: int, expires_at: float) -> bool:
        """Whether ``worker`` may compute on version ``now``; its lease is then as written."""
        others = [lease.version for name, lease in self.held.items() if name != worker]
        if not is_feasible(now, [*others, now], self.max_staleness):
            return False
        self.held[worker] = Lease(now, expires_at)
        return True

    def apply(self, worker: str, now: int) -> int | None:
        """The staleness of the gradient of ``worker``, if it may be applied to version ``now``,
        which ends its lease; None if it must wait. KeyError without a lease."""
        mine = self.held[worker]
        others = [lease.version for name, lease in self.held.items() if name != worker]
        is_oldest = mine.version <= min(others, default=now)
        if not is_oldest and not is_feasible(now + 1, others, self.max_staleness):
            return None
        del self.held[worker]
        return now - mine.version

    def blocking(self, now: int) -> list[str]:
        """The workers with the oldest versions: those that the others wait for."""
        oldest = min((lease.version for lease in self.held.values()), default=now)
        return sorted(name for name, lease in self.held.items() if lease.version == oldest)

    def expire(self, time: float) -> list[str]:
        """End the leases of workers that gave nothing back in time; their names."""
        late = sorted(name for name, lease in self.held.items() if lease.expires_at <= time)
        for name in late:
            del self.held[name]
        return late
