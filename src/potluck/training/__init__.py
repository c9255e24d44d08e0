"""Training without a framework: the order of samples, and the loop that survives lost workers."""

from potluck.training.elastic import ElasticLoop, Policy
from potluck.training.replica import Replica, StateReplica
from potluck.training.sampler import Schedule, Share

__all__ = ["ElasticLoop", "Policy", "Replica", "Schedule", "Share", "StateReplica"]
