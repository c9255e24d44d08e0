"""The rule for reports of long operations: a worker tells its agent after 2 s, then every 2 s.

The agents of the group's members then check whether their workers run. The report alone blames no
worker, since another rank may compute for minutes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

LONG_S = 2.0
LOOK_EVERY_S = 0.2


class LongWaits:
    """The ages of this worker's unfinished operations. Pure: the time is an argument."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}
        self._said_at = float("-inf")

    def is_long(self, ongoing: Iterable[Hashable], now: float) -> bool:
        """Whether to send a report now. ``ongoing`` has a name for each unfinished operation.

        An operation's age counts from the first call that names it.
        """
        self._since = {name: self._since.get(name, now) for name in ongoing}
        oldest = min(self._since.values(), default=now)
        if now - oldest < LONG_S or now - self._said_at < LONG_S:
            return False
        self._said_at = now
        return True
