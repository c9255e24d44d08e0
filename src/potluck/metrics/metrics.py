"""The numbers of one context: collectives, failures, links, and the group they belong to.

Recording is plain integers behind one lock, about a microsecond, because it stands in the path of
every collective. Prometheus is imported only when its text is asked for (``prometheus.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from potluck.metrics.histogram import Histogram
from potluck.metrics.shared_memory import SharedMemoryCounts
from potluck.metrics.snapshot import Snapshot

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

SECONDS_BOUNDS = tuple(1e-5 * 2.0**power for power in range(24))
"""10 microseconds to 84 seconds, each bound twice the one before."""

BYTES_BOUNDS = tuple(float(4**power) for power in range(3, 17))
"""64 bytes to 4 GiB, each bound four times the one before."""


class CollectiveMeter:
    """The finished calls of one operation with one algorithm."""

    __slots__ = ("nbytes", "seconds")

    def __init__(self) -> None:
        self.seconds = Histogram(SECONDS_BOUNDS)
        self.nbytes = Histogram(BYTES_BOUNDS)


class LinkMeter:
    """Counts the traffic of one link. Its one writer, the progress loop, adds to the fields
    directly.

    Bytes are payload and frame headers as handed to the link, before TLS. A message is a frame.
    ``bytes_in_shared_memory`` is the part of ``bytes_sent`` that went through shared memory. The
    native loop has counters of its own, which are read when the meter is (``follow``).
    """

    FIELDS = (
        "bytes_in_shared_memory",
        "bytes_received",
        "bytes_sent",
        "messages_received",
        "messages_sent",
    )
    __slots__ = (*FIELDS, "_lock", "_source")

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.bytes_in_shared_memory = 0
        self.messages_sent = 0
        self.messages_received = 0
        self._lock = Lock()
        self._source: Callable[[], tuple[int, ...]] | None = None

    def follow(self, source: Callable[[], tuple[int, ...]] | None) -> None:
        """From now on add what ``source`` gives when asked: what is new of each of ``FIELDS``."""
        self._collect()
        self._source = source

    def as_dict(self) -> dict[str, int]:
        self._collect()
        return {name: getattr(self, name) for name in LinkMeter.FIELDS}

    def _collect(self) -> None:
        with self._lock:
            if self._source is not None:
                for name, count in zip(LinkMeter.FIELDS, self._source(), strict=True):
                    setattr(self, name, getattr(self, name) + count)


class Metrics:
    """The metrics of one context. Any thread may call any method.

    Nothing here is global: two contexts in one process have two of these. Labels given at
    construction (``rank="2"``) are put on every Prometheus sample.
    """

    def __init__(self, **labels: str) -> None:
        self.labels = dict(labels)
        self._lock = Lock()
        self._collectives: dict[tuple[str, str], CollectiveMeter] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self._links: dict[str, LinkMeter] = {}
        self._shared: list[SharedMemoryCounts] = []
        self._waited_s = 0.0
        self._reforms = Histogram(SECONDS_BOUNDS)
        self._epoch = 0
        self._world_size = 0

    def observe(self, operation: str, algorithm: str, nbytes: int, seconds: float) -> None:
        """A collective finished: ``nbytes`` of this rank's buffer, ``seconds`` from call to end."""
        with self._lock:
            meter = self._collectives.get((operation, algorithm))
            if meter is None:
                meter = self._collectives[operation, algorithm] = CollectiveMeter()
            meter.seconds.add(seconds)
            meter.nbytes.add(nbytes)

    def failed(self, operation: str, kind: str) -> None:
        """A collective raised; ``kind`` is the name of the error (``PeerLost``)."""
        with self._lock:
            self._failures[operation, kind] = self._failures.get((operation, kind), 0) + 1

    def link(self, peer: str) -> LinkMeter:
        """The meter of the link to ``peer``, the same one for the same name.

        Only one thread may add to it. Readers may look at any time: each field is one integer.
        """
        with self._lock:
            return self._links.setdefault(peer, LinkMeter())

    def count(self, counts: SharedMemoryCounts) -> None:
        """From now on what ``counts`` counts is part of these metrics."""
        with self._lock:
            self._shared.append(counts)

    def keep(self, counts: SharedMemoryCounts) -> None:
        """``counts`` is about to go: keep what it has counted."""
        with self._lock:
            self._shared.remove(counts)
            for key, seconds, nbytes in counts.collectives(SECONDS_BOUNDS, BYTES_BOUNDS):
                meter = self._collectives.setdefault(key, CollectiveMeter())
                meter.seconds = meter.seconds.plus(seconds)
                meter.nbytes = meter.nbytes.plus(nbytes)
            self._waited_s += counts.waited_s()

    @property
    def waited_s(self) -> float:
        """Seconds that callers were blocked in shared memory."""
        with self._lock:
            return self._waited_s + sum(counts.waited_s() for counts in self._shared)

    def group(self, epoch: int, world_size: int) -> None:
        """The context now works in this group."""
        with self._lock:
            self._epoch = epoch
            self._world_size = world_size

    def reformed(self, seconds: float) -> None:
        """A group was lost and the next one formed; ``seconds`` from the error to the new group."""
        with self._lock:
            self._reforms.add(seconds)

    def snapshot(self) -> Snapshot:
        """A consistent copy of everything, taken at one moment."""
        with self._lock:
            seconds = {key: meter.seconds.copy() for key, meter in self._collectives.items()}
            nbytes = {key: meter.nbytes.copy() for key, meter in self._collectives.items()}
            for counts in self._shared:
                for key, times, sizes in counts.collectives(SECONDS_BOUNDS, BYTES_BOUNDS):
                    seconds[key] = seconds[key].plus(times) if key in seconds else times
                    nbytes[key] = nbytes[key].plus(sizes) if key in nbytes else sizes
            return Snapshot(
                labels=dict(self.labels),
                epoch=self._epoch,
                world_size=self._world_size,
                reforms=self._reforms.copy(),
                seconds=seconds,
                nbytes=nbytes,
                failures=dict(self._failures),
                links={peer: meter.as_dict() for peer, meter in self._links.items()},
            )

    def stats(self) -> dict[str, Any]:
        """Everything as plain dicts and numbers, ready for JSON: ``Snapshot.as_dict``."""
        return self.snapshot().as_dict()

    def registry(self) -> CollectorRegistry:
        """A Prometheus registry with these metrics and no others; imports prometheus-client."""
        from potluck.metrics.prometheus import registry_of

        return registry_of(self.snapshot)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format, for a scrape or a file."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry())
