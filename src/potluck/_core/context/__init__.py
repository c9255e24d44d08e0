"""The context of a worker, ``DistributedContext``, and ``init``, which makes it."""

from potluck._core.context.collectives import all_reduce_mean, all_reduce_sum
from potluck._core.context.context import Commit, DistributedContext, check_whole
from potluck._core.context.messages import Message
from potluck._core.context.start import init

__all__ = [
    "Commit",
    "DistributedContext",
    "Message",
    "all_reduce_mean",
    "all_reduce_sum",
    "check_whole",
    "init",
]
