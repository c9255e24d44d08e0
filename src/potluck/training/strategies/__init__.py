"""Strategies: how often the ranks of a training agree. Pure."""

from potluck.training.strategies.gossip import Gossip
from potluck.training.strategies.kinds import SGD, DataParallel, DiLoCo, LocalSGD, Rounds

__all__ = ["SGD", "DataParallel", "DiLoCo", "Gossip", "LocalSGD", "Rounds"]
