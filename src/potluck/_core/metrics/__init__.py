"""The metrics of a context: counters and histograms (``Metrics``), also for Prometheus."""

from potluck._core.metrics.metrics import LinkMeter, Metrics, SharedMemoryCounts

__all__ = ["LinkMeter", "Metrics", "SharedMemoryCounts"]
