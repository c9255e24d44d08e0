"""Counts of calls through shared memory: the native core's counters, read on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from potluck._core.metrics.histogram import Histogram

Row = tuple[list[int], list[int], float, int]
"""The counters of one operation: number of calls by bucket of seconds, number of calls by bucket of
bytes, sum of seconds, sum of bytes."""


class SharedMemoryCounts:
    """The counters of one channel. ``rows()`` returns a row for each of ``operations``."""

    def __init__(
        self,
        algorithm: str,
        operations: Sequence[str],
        rows: Callable[[], list[Row]],
        waited_s: Callable[[], float],
    ) -> None:
        """``waited_s()`` returns the seconds that callers were blocked in calls."""
        self._algorithm = algorithm
        self._operations = operations
        self._rows = rows
        self.waited_s = waited_s

    def collectives(
        self, seconds_bounds: Sequence[float], bytes_bounds: Sequence[float]
    ) -> Iterator[tuple[tuple[str, str], Histogram, Histogram]]:
        """``((operation, algorithm), seconds, bytes)`` for each operation that was called."""
        for operation, row in zip(self._operations, self._rows(), strict=True):
            seconds_buckets, bytes_buckets, seconds, nbytes = row
            if any(seconds_buckets):
                yield (
                    (str(operation), self._algorithm),
                    Histogram.of(seconds_bounds, seconds_buckets, seconds),
                    Histogram.of(bytes_bounds, bytes_buckets, float(nbytes)),
                )
