"""The deadline of a round, from how long the ranks took for the last ones. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 4
"""The number of rounds that are looked at."""

SLACK = 0.1
"""The least time beyond the median, as a part of it: equal machines are never quite equal."""


class Arrivals:
    """The seconds that the ranks took for the steps of the last rounds."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, ...]] = deque(maxlen=WINDOW)

    def add(self, seconds: Iterable[float]) -> None:
        """Add the times of a round, of the ranks that computed in it."""
        arrived = tuple(each for each in seconds if each > 0)
        if arrived:
            self._rounds.append(arrived)

    @property
    def longest_s(self) -> float:
        """The longest time known, 0 without any."""
        return max((max(each) for each in self._rounds), default=0.0)

    def deadline_s(self, num_deviations: float) -> float | None:
        """Median + ``num_deviations`` median absolute deviations; None before the first round."""
        times = [each for arrived in self._rounds for each in arrived]
        if not times:
            return None
        middle = statistics.median(times)
        deviation = statistics.median(abs(each - middle) for each in times)
        return middle + max(num_deviations * deviation, SLACK * middle)
