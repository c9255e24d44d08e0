"""What a context measures of itself: ``Metrics`` (the numbers) and its Prometheus face."""

from potluck.metrics.metrics import LinkMeter, Metrics
from potluck.metrics.shared_memory import SharedMemoryCounts

__all__ = ["LinkMeter", "Metrics", "SharedMemoryCounts"]
