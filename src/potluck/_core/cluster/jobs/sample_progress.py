"""The training progress of a job: committed samples, and their rate over the last seconds. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from potluck._core.wire.worker_link import Samples

WINDOW_S = 20.0
"""The rate is a mean over this time, waits and recoveries included."""
MIN_SPAN_S = 1.0
"""A shorter time gives no rate."""
_SPACING_S = 0.25


@dataclass(slots=True)
class SampleProgress:
    """The newest count of samples, and earlier counts as points (time, count) for the rate."""

    committed: int = 0
    total: int = 0
    _points: deque[tuple[float, int]] = field(default_factory=deque)

    def update(self, committed: int, total: int, now: float) -> None:
        """``committed`` samples of ``total`` count now. A lower count than before comes of another
        training, or of one that went on from an older checkpoint."""
        if total <= 0:
            return
        points = self._points
        if committed < self.committed or total != self.total:
            points.clear()
        self.committed, self.total = committed, total
        if len(points) > 1 and now - points[-2][0] < _SPACING_S:
            points.pop()
        points.append((now, committed))
        while len(points) > 2 and points[1][0] <= now - WINDOW_S:
            points.popleft()

    def samples(self, now: float) -> Samples | None:
        """For people and programs; None while nothing is known."""
        return Samples(self.committed, self.total, self._per_s(now)) if self.total else None

    def _per_s(self, now: float) -> float | None:
        """The mean rate. It falls while the next count comes later than usual."""
        if len(self._points) < 2:
            return None
        (first, start), (last, end) = self._points[0], self._points[-1]
        usual = (last - first) / (len(self._points) - 1)
        seconds = max(last, now - usual) - first
        return (end - start) / seconds if seconds >= MIN_SPAN_S else None
