"""The metrics of one context: its collectives, failures, links and group.

Recording takes about a microsecond (integers behind one lock), because every collective records.
Prometheus is imported when its registry or text is requested (``prometheus.py``). Names and labels
of the metrics that a script reports are as in Prometheus' data model and text format.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from threading import Lock
from typing import TYPE_CHECKING, Any

from potluck._core.metrics.snapshot import Histogram, Snapshot

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)

SECONDS_BOUNDS = tuple(1e-5 * 2.0**power for power in range(24))
"""10 microseconds to 84 seconds, in factors of two."""

BYTES_BOUNDS = tuple(float(4**power) for power in range(3, 17))
"""64 bytes to 4 GiB, in factors of four."""


_Collectives = dict[tuple[str, str], tuple[Histogram, Histogram]]
"""The seconds and bytes of the finished calls, by operation and algorithm."""

Row = tuple[list[int], list[int], float, int]
"""The counters of one operation: number of calls by bucket of seconds, number of calls by bucket of
bytes, sum of seconds, sum of bytes."""


@dataclass(eq=False, repr=False)
class SharedMemoryCounts:
    """Calls through shared memory: the native core's counters of one channel, read on demand.
    ``rows()`` returns a row for each of ``operations``.

    ``waited_s()`` returns the seconds that callers were blocked in calls.
    """

    algorithm: str
    operations: Sequence[str]
    rows: Callable[[], list[Row]]
    waited_s: Callable[[], float]

    def add_to(self, collectives: _Collectives) -> None:
        """Add the calls of each operation that was called."""
        for operation, row in zip(self.operations, self.rows(), strict=True):
            seconds_buckets, bytes_buckets, seconds, nbytes = row
            if not any(seconds_buckets):
                continue
            key = str(operation), self.algorithm
            times = Histogram.of(SECONDS_BOUNDS, seconds_buckets, seconds)
            sizes = Histogram.of(BYTES_BOUNDS, bytes_buckets, float(nbytes))
            before = collectives.get(key)
            if before is not None:
                times, sizes = times.plus(before[0]), sizes.plus(before[1])
            collectives[key] = times, sizes


MAX_SERIES = 1000
"""Of one context. A scrape carries all of them."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,99}")
_MAX_TEXT = 200
_OWN = "potluck_"

Labels = tuple[tuple[str, str], ...]


class Reported:
    """The newest value of each series: a name with the values of its labels. Not thread-safe.

    Beyond ``MAX_SERIES`` the series that was reported longest ago is dropped, with one warning: a
    training must not end because of a label that counts its epochs.
    """

    def __init__(self, own_labels: Mapping[str, str]) -> None:
        self._own_labels = frozenset(own_labels)
        self._values: dict[tuple[str, Labels], float] = {}
        self._has_warned = False

    def set(self, name: Any, value: Any, labels: Mapping[str, Any] | None) -> None:
        """Set a series. TypeError or ValueError for a name, a value or labels that are none."""
        number, texts = _number(name, value), self._labels(name, labels or {})
        names = [label for label, _ in texts]
        before = [label for label, _ in next((ls for n, ls in self._values if n == name), texts)]
        if before != names:
            raise ValueError(
                f"{name} has the labels {names}, and had {before} before: all series of a name "
                "have the same"
            )
        self._values.pop(key := (name, texts), None)  # it is the newest from now on
        self._values[key] = number
        if len(self._values) > MAX_SERIES:
            oldest = next(iter(self._values))
            del self._values[oldest]
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "more than %d series were reported: the oldest ones are dropped, first of %s. "
                    "A label is for a few values (a phase, a layer), not for one that rises",
                    *(MAX_SERIES, oldest[0]),
                )

    def copy(self) -> dict[tuple[str, Labels], float]:
        """The values by name and labels."""
        return dict(self._values)

    def _labels(self, name: str, labels: Any) -> Labels:
        if not isinstance(labels, Mapping):
            raise TypeError(f"the labels of {name} are a dict of names to values, not {labels!r}")
        for label, value in labels.items():
            if not isinstance(label, str) or not _LABEL.fullmatch(label):
                raise ValueError(
                    f"{label!r} can't be the name of a label of {name}: letters, digits and _, no "
                    "digit and no __ at first"
                )
            if label in self._own_labels:
                raise ValueError(f"the label {label!r} of {name} is potluck's own: choose another")
            if not isinstance(value, str | Real):
                raise TypeError(f"label {label!r} of {name} is {value!r:.60}: a text or a number")
        return tuple((label, str(labels[label])[:_MAX_TEXT]) for label in sorted(labels))


def _number(name: Any, value: Any) -> float:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r:.80} can't be the name of a metric: letters, digits, _ and :, no digit at "
            "first, such as training_loss"
        )
    if name.startswith(_OWN):
        raise ValueError(f"{name}: names that begin with {_OWN} are its own metrics'")
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        value = getattr(value, "detach", lambda: value)()  # a loss in torch's graph
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"the value of {name} is {value!r:.60}; it must be a number") from None


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
        self._collectives: _Collectives = {}
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
            meters = self._collectives.get((operation, algorithm))
            if meters is None:
                meters = Histogram(SECONDS_BOUNDS), Histogram(BYTES_BOUNDS)
                self._collectives[operation, algorithm] = meters
            meters[0].add(seconds)
            meters[1].add(nbytes)

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
            counts.add_to(self._collectives)
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
            now = {key: (s.copy(), b.copy()) for key, (s, b) in self._collectives.items()}
            for counts in self._shared:
                counts.add_to(now)
            return Snapshot(
                labels=dict(self.labels),
                epoch=self._epoch,
                world_size=self._world_size,
                reforms=self._reforms.copy(),
                seconds={key: seconds for key, (seconds, _) in now.items()},
                nbytes={key: nbytes for key, (_, nbytes) in now.items()},
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
