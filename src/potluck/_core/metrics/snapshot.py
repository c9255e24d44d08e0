"""A snapshot: an immutable copy of a context's metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from potluck._core.metrics.histogram import Histogram


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
