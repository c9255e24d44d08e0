"""A snapshot, an immutable copy of a context's metrics, and the histograms in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of one moment. ``seconds`` and ``nbytes`` are keyed by (operation, algorithm),
    ``failures`` by (operation, class of the error), ``beyond`` by (operation, codec), ``links`` by
    peer, ``reported`` by name and labels."""

    labels: dict[str, str]
    epoch: int
    world_size: int
    reforms: Histogram
    seconds: dict[tuple[str, str], Histogram]
    nbytes: dict[tuple[str, str], Histogram]
    failures: dict[tuple[str, str], int]
    beyond: dict[tuple[str, str], int]
    links: dict[str, dict[str, int]]
    reported: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def as_dict(self) -> dict[str, Any]:
        """The metrics as plain dicts and numbers, ready for JSON.

        ``operations`` maps an operation to count, bytes and seconds (sums), mean_s, p50_s and
        p99_s (estimates from a histogram with bounds in factors of two), algorithms (number of
        finished calls of each), failures (number by class of error) and beyond_range (by codec, the
        number of elements encoded here that are inf, NaN or beyond its range). ``links`` maps a
        peer to the fields of ``LinkMeter``.
        """
        names = [operation for operation, _ in (*self.seconds, *self.failures)]
        return {
            "epoch": self.epoch,
            "world_size": self.world_size,
            "reforms": self.reforms.count,
            "reform_seconds": self.reforms.total,
            "operations": {name: self._operation(name) for name in dict.fromkeys(names)},
            "links": self.links,
        }

    def _operation(self, name: str) -> dict[str, Any]:
        by_algorithm = {a: seconds for (o, a), seconds in self.seconds.items() if o == name}
        failures = {kind: n for (o, kind), n in self.failures.items() if o == name}
        if not by_algorithm:
            return {"count": 0, "bytes": 0, "seconds": 0.0, "failures": failures}
        seconds = reduce(Histogram.plus, by_algorithm.values())
        return {
            "count": seconds.count,
            "bytes": sum(int(h.total) for (o, _), h in self.nbytes.items() if o == name),
            "seconds": seconds.total,
            "mean_s": seconds.total / seconds.count,
            "p50_s": seconds.quantile(0.5),
            "p99_s": seconds.quantile(0.99),
            "algorithms": {algorithm: h.count for algorithm, h in by_algorithm.items()},
            "failures": failures,
            "beyond_range": {codec: n for (o, codec), n in self.beyond.items() if o == name},
        }
