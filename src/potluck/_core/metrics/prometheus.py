"""The metrics of a context as Prometheus families, made from a snapshot at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from potluck._core.metrics.snapshot import Snapshot

_LINK_COUNTERS = {
    "bytes_sent": "Bytes sent on a link, shared memory included.",
    "bytes_received": "Bytes received on a link, shared memory included.",
    "bytes_in_shared_memory": "The part of the bytes sent that went through shared memory.",
    "messages_sent": "Frames sent on a link.",
    "messages_received": "Frames received on a link.",
}


def registry_of(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry of its own for one context, since contexts of one process have equal names."""
    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))
    return registry


class _Collector:
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from families(self._snapshot())


def families(now: Snapshot) -> Iterator[Metric]:
    """All metric families of a snapshot, with names and units by Prometheus' conventions."""
    names, values = list(now.labels), list(now.labels.values())

    epoch = GaugeMetricFamily("potluck_epoch", "Epoch of the current group.", labels=names)
    epoch.add_metric(values, now.epoch)
    yield epoch
    size = GaugeMetricFamily("potluck_world_size", "Members of the group.", labels=names)
    size.add_metric(values, now.world_size)
    yield size

    reforms = HistogramMetricFamily(
        "potluck_reform_seconds", "From the loss of a group to the next one.", labels=names
    )
    reforms.add_metric(values, now.reforms.cumulative(), now.reforms.total)
    yield reforms

    per_collective = [*names, "operation", "algorithm"]
    for name, text, histograms in (
        ("potluck_collective_seconds", "From call to end of a collective.", now.seconds),
        ("potluck_collective_bytes", "This rank's buffer in a collective.", now.nbytes),
    ):
        family = HistogramMetricFamily(name, text, labels=per_collective)
        for key, histogram in histograms.items():
            family.add_metric([*values, *key], histogram.cumulative(), histogram.total)
        yield family

    failures = CounterMetricFamily(
        "potluck_collective_failures",
        "Collectives that raised, by error.",
        labels=[*names, "operation", "kind"],
    )
    for key, count in now.failures.items():
        failures.add_metric([*values, *key], count)
    yield failures

    beyond = CounterMetricFamily(
        "potluck_codec_beyond_range",
        "Elements encoded by this rank that are inf, NaN or beyond the codec's range.",
        labels=[*names, "operation", "codec"],
    )
    for key, count in now.beyond.items():
        beyond.add_metric([*values, *key], count)
    yield beyond

    for field, text in _LINK_COUNTERS.items():
        counter = CounterMetricFamily(f"potluck_link_{field}", text, labels=[*names, "peer"])
        for peer, link in now.links.items():
            counter.add_metric([*values, peer], link[field])
        yield counter

    gauges: dict[str, GaugeMetricFamily] = {}
    for (name, labels), value in now.reported.items():
        own = [label for label, _ in labels]
        if name not in gauges:
            text = "Reported by the script."
            gauges[name] = GaugeMetricFamily(name, text, labels=[*names, *own])
        gauges[name].add_metric([*values, *(text for _, text in labels)], value)
    yield from gauges.values()
