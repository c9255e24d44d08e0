"""Elastic training without torch: the schedule of samples, and a loop that survives lost
workers."""

from potluck.training.elastic import ElasticLoop
from potluck.training.means import average
from potluck.training.policy import NoiseBatching, Policy, ProportionalShares
from potluck.training.replica import Replica, StateReplica
from potluck.training.sampler import Schedule, Share

__all__ = [
    "ElasticLoop",
    "NoiseBatching",
    "Policy",
    "ProportionalShares",
    "Replica",
    "Schedule",
    "Share",
    "StateReplica",
    "average",
]
