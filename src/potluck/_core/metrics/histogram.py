"""A histogram with fixed bounds, for counts and approximate quantiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of observed values between ascending ``bounds``; the last bucket has no upper bound.

    Not thread-safe: the owner has a lock. ``add`` costs a binary search over the bounds.
    """

    __slots__ = ("bounds", "buckets", "count", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.total = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], buckets: Sequence[int], total: float) -> Histogram:
        """A histogram of ``buckets`` that were counted elsewhere, with the sum of their values."""
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
        """A new histogram of the observations of both, which must have the same bounds."""
        assert self.bounds == other.bounds
        both = Histogram(self.bounds)
        both.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]
        both.count = self.count + other.count
        both.total = self.total + other.total
        return both

    def quantile(self, fraction: float) -> float:
        """The value below which ``fraction`` of the observations lie; 0.0 without observations.

        Interpolated linearly inside a bucket, so the error is at most the bucket's width. In the
        last bucket the result is the last bound, and the true value is larger.
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
        """Rows of Prometheus: ``(upper bound, number of observations up to it)``, ``+Inf`` last."""
        rows: list[tuple[str, float]] = []
        seen = 0
        for bound, held in zip((*self.bounds, float("inf")), self.buckets, strict=True):
            seen += held
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(seen)))
        return rows
