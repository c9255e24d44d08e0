"""The metrics of one context: its collectives, failures, links and group.

Recording takes about a microsecond (integers behind one lock), because every collective records.
Prometheus is imported when its registry or text is requested (``prometheus.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

from potluck._core.metrics.histogram import Histogram
from potluck._core.metrics.reported import Reported
from potluck._core.metrics.shared_memory import SharedMemoryCounts
from potluck._core.metrics.snapshot import Snapshot

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

SECONDS_BOUNDS = tuple(1e-5 * 2.0**power for power in range(24))
"""10 microseconds to 84 seconds, in factors of two."""

BYTES_BOUNDS = tuple(float(4**power) for power in range(3, 17))
"""64 bytes to 4 GiB, in factors of four."""


class CollectiveMeter:
    """Durations and sizes of the finished calls of one operation with one algorithm."""

    __slots__ = ("nbytes", "seconds")

    def __init__(self) -> None:
        self.seconds = Histogram(SECONDS_BOUNDS)
        self.nbytes = Histogram(BYTES_BOUNDS)


class LinkMeter:
    """The traffic of one link. The progress loop, the only writer, adds to the fields directly.

    Bytes count payload and frame headers before encryption. A message is a frame.
    ``bytes_in_shared_memory`` is the part of ``bytes_sent`` that went through shared memory. The
    native loop keeps counters of its own, which ``follow`` connects to the meter.
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
        """Add the counts of ``source`` whenever the meter is read. ``source()`` returns the
        increase of each of ``FIELDS`` since its last call; None disconnects the last source."""
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
    """The metrics of one context. Thread-safe.

    Contexts in one process have separate metrics. ``labels`` (``rank="2"``) are added to every
    Prometheus sample.
    """

    def __init__(self, **labels: str) -> None:
        self.labels = dict(labels)
        self._lock = Lock()
        self._collectives: dict[tuple[str, str], CollectiveMeter] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self._beyond: dict[tuple[str, str], int] = {}
        self._links: dict[str, LinkMeter] = {}
        self._shared: list[SharedMemoryCounts] = []
        self._waited_s = 0.0
        self._reforms = Histogram(SECONDS_BOUNDS)
        self._epoch = 0
        self._world_size = 0
        self._reported = Reported(self.labels)

    def report(self, name: str, value: Any, labels: Mapping[str, Any] | None = None) -> None:
        """Set a metric of the script; see ``Reported``."""
        with self._lock:
            self._reported.set(name, value, labels)

    def observe(self, operation: str, algorithm: str, nbytes: int, seconds: float) -> None:
        """Record a finished collective: the bytes of this rank's buffer, the seconds from its call
        to its end."""
        with self._lock:
            meter = self._collectives.get((operation, algorithm))
            if meter is None:
                meter = self._collectives[operation, algorithm] = CollectiveMeter()
            meter.seconds.add(seconds)
            meter.nbytes.add(nbytes)

    def failed(self, operation: str, kind: str) -> None:
        """Record a collective that raised; ``kind`` is the class of the error (``PeerLost``)."""
        with self._lock:
            self._failures[operation, kind] = self._failures.get((operation, kind), 0) + 1

    def beyond(self, operation: str, codec: str, num: int) -> None:
        """Record that ``num`` of the elements that this rank has encoded were beyond the range of
        the codec, or inf or NaN."""
        with self._lock:
            self._beyond[operation, codec] = self._beyond.get((operation, codec), 0) + num

    def link(self, peer: str) -> LinkMeter:
        """The meter of the link to ``peer``, made at the first call.

        Only one thread may add to a meter. Any thread may read: each field is an integer.
        """
        with self._lock:
            return self._links.setdefault(peer, LinkMeter())

    def count(self, counts: SharedMemoryCounts) -> None:
        """Include the calls that ``counts`` counts, from now on."""
        with self._lock:
            self._shared.append(counts)

    def keep(self, counts: SharedMemoryCounts) -> None:
        """Keep the present values of ``counts``, whose channel is about to be closed."""
        with self._lock:
            self._shared.remove(counts)
            for key, seconds, nbytes in counts.collectives(SECONDS_BOUNDS, BYTES_BOUNDS):
                meter = self._collectives.setdefault(key, CollectiveMeter())
                meter.seconds = meter.seconds.plus(seconds)
                meter.nbytes = meter.nbytes.plus(nbytes)
            self._waited_s += counts.waited_s()

    @property
    def waited_s(self) -> float:
        """Seconds that callers were blocked in calls through shared memory."""
        with self._lock:
            return self._waited_s + sum(counts.waited_s() for counts in self._shared)

    def group(self, epoch: int, world_size: int) -> None:
        """Record the context's present group."""
        with self._lock:
            self._epoch = epoch
            self._world_size = world_size

    def reformed(self, seconds: float) -> None:
        """Record that a group was lost: ``seconds`` from the error to the next group."""
        with self._lock:
            self._reforms.add(seconds)

    def snapshot(self) -> Snapshot:
        """A consistent copy of all metrics."""
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
                beyond=dict(self._beyond),
                links={peer: meter.as_dict() for peer, meter in self._links.items()},
                reported=self._reported.copy(),
            )

    def stats(self) -> dict[str, Any]:
        """All metrics as plain dicts and numbers, ready for JSON; see ``Snapshot.as_dict``."""
        return self.snapshot().as_dict()

    def registry(self) -> CollectorRegistry:
        """A Prometheus registry with only these metrics. Imports prometheus-client."""
        from potluck._core.metrics.prometheus import registry_of

        return registry_of(self.snapshot)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format. Imports prometheus-client."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry())
