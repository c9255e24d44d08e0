"""Strategies: how often the ranks of a training agree. Pure."""

from potluck.training.strategies.gossip import Gossip
from potluck.training.strategies.kinds import (
    DataParallel,
    DiLoCo,
    LocalSGD,
    OuterSGD,
    Rounds,
    Strategy,
)

__all__ = ["DataParallel", "DiLoCo", "Gossip", "LocalSGD", "OuterSGD", "Rounds", "Strategy"]
