"""When a worker tells its agent that an operation does not end: after 2 s, then every 2 s.

The agents of the group's members then look whether their workers still run. An operation may last
longer for a good reason, since another rank may compute for minutes: the message alone blames no
worker.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

LONG_S = 2.0
LOOK_EVERY_S = 0.2


class LongWaits:
    """How long the operations of this worker have been under way. Decides; reads no clock."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}
        self._said_at = float("-inf")

    def is_long(self, ongoing: Iterable[Hashable], now: float) -> bool:
        """Whether to tell the agent now, given a name for each operation under way.

        An operation counts from the look that first saw it.
        """
        self._since = {name: self._since.get(name, now) for name in ongoing}
        oldest = min(self._since.values(), default=now)
        if now - oldest < LONG_S or now - self._said_at < LONG_S:
            return False
        self._said_at = now
        return True
