"""Federated learning: the data stays where it is, and updates of a model travel.

``definition.py``: what a user writes. ``aggregation.py``: which clients train, and how updates are
combined (pure). ``patience.py``: how long a round waits (pure). ``federation.py``: the server's
rounds, their reports, and the state on disk. ``secure/``, ``privacy.py``: what the
server and the world learn. ``participant.py``: a client's side. ``simulation.py``: all in one
process; ``remote.py``, ``worker.py``: in a job.
"""

from potluck.federated.aggregation import (
    Aggregation,
    FedAdam,
    FedAvg,
    FedProx,
    FedYogi,
    Krum,
    Median,
    Round,
    TrimmedMean,
)
from potluck.federated.definition import Site, client, server, site
from potluck.federated.federation import Federation, History, RoundReport
from potluck.federated.parameters import Update
from potluck.federated.patience import Patience
from potluck.federated.privacy import DifferentialPrivacy
from potluck.federated.secure.settings import SecureAggregation
from potluck.federated.simulation import simulate

__all__ = [
    "Aggregation",
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
    "TrimmedMean",
    "Update",
    "client",
    "server",
    "simulate",
    "site",
]
