"""The metrics of a context: counters and histograms (``Metrics``), also for Prometheus."""

from typing import Any

from potluck import hints
from potluck.metrics.metrics import LinkMeter, Metrics
from potluck.metrics.shared_memory import SharedMemoryCounts

__all__ = ["LinkMeter", "Metrics", "SharedMemoryCounts"]


def __getattr__(name: str) -> Any:
    raise hints.of_module(__name__, name)
