"""Federated learning: the data stays where it is, and updates of a model travel.

``definition.py``: what a user writes. ``strategies/``: which clients train, and what their updates
make (pure). ``patience.py``: how long a round waits (pure). ``federation.py``: the server's rounds.
``secure/``, ``privacy.py``: what the server and the world learn. ``participant.py``: a client's
side. ``simulation.py``: all in one process.
"""

from potluck.federated.definition import Site, client, server, site
from potluck.federated.federation import Federation
from potluck.federated.history import History, RoundReport
from potluck.federated.patience import Patience
from potluck.federated.privacy import DifferentialPrivacy
from potluck.federated.secure.settings import SecureAggregation
from potluck.federated.simulation import simulate
from potluck.federated.strategies import (
    FedAdam,
    FedAvg,
    FedProx,
    FedYogi,
    Krum,
    Median,
    Round,
    Strategy,
    TrimmedMean,
)
from potluck.federated.updates import Update

__all__ = [
    "DifferentialPrivacy",
    "FedAdam",
    "FedAvg",
    "FedProx",
    "FedYogi",
    "Federation",
    "History",
    "Krum",
    "Median",
    "Patience",
    "Round",
    "RoundReport",
    "SecureAggregation",
    "Site",
    "Strategy",
    "TrimmedMean",
    "Update",
    "client",
    "server",
    "simulate",
    "site",
]
