"""Strategies: which clients train in a round, and what their updates make. Pure."""

from potluck.federated.strategies.adaptive import FedAdam, FedYogi
from potluck.federated.strategies.averaging import FedAvg, FedProx
from potluck.federated.strategies.base import Round, Strategy
from potluck.federated.strategies.robust import Krum, Median, TrimmedMean

__all__ = [
    "FedAdam",
    "FedAvg",
    "FedProx",
    "FedYogi",
    "Krum",
    "Median",
    "Round",
    "Strategy",
    "TrimmedMean",
]
