"""A histogram with fixed bounds: a few integers, cheap to add to, good enough for quantiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of observed values between fixed ``bounds`` (ascending; a last bucket is open).

    Not locked: its owner is. One ``add`` costs a binary search over the bounds.
    """

    __slots__ = ("bounds", "buckets", "count", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.total = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], buckets: Sequence[int], total: float) -> Histogram:
        """What others have counted in the same buckets."""
        made = cls(bounds)
        assert len(buckets) == len(made.buckets)
        made.buckets, made.count, made.total = list(buckets), sum(buckets), total
        return made

    def add(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.total += value

    def copy(self) -> Histogram:
        return self.plus(Histogram(self.bounds))

    def plus(self, other: Histogram) -> Histogram:
        """A new histogram of both's observations; both must have the same bounds."""
        assert self.bounds == other.bounds
        both = Histogram(self.bounds)
        both.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]
        both.count = self.count + other.count
        both.total = self.total + other.total
        return both

    def quantile(self, fraction: float) -> float:
        """The value below which ``fraction`` of the observations lie, 0.0 if there are none.

        Interpolated inside a bucket, so it is off by at most that bucket's width. Beyond the
        last bound it is the last bound: the true value is larger.
        """
        wanted = fraction * self.count
        seen = 0
        for index, (bound, held) in enumerate(zip(self.bounds, self.buckets, strict=False)):
            if held and seen + held >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                return low + (bound - low) * (wanted - seen) / held
            seen += held
        return self.bounds[-1] if self.count else 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """``(upper bound, observations up to it)`` as Prometheus wants them, ``+Inf`` last."""
        rows: list[tuple[str, float]] = []
        seen = 0
        for bound, held in zip((*self.bounds, float("inf")), self.buckets, strict=True):
            seen += held
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(seen)))
        return rows
