"""The metrics of a context: counters and histograms (``Metrics``), also for Prometheus."""

from potluck.metrics.metrics import LinkMeter, Metrics
from potluck.metrics.shared_memory import SharedMemoryCounts

__all__ = ["LinkMeter", "Metrics", "SharedMemoryCounts"]
