"""The metrics of a context: counters and histograms (``Metrics``), also for Prometheus."""

from potluck._core.metrics.metrics import LinkMeter, Metrics
from potluck._core.metrics.shared_memory import SharedMemoryCounts

__all__ = ["LinkMeter", "Metrics", "SharedMemoryCounts"]
