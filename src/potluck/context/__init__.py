"""What a script holds: ``DistributedContext``, and ``init`` to get one."""

from potluck.context.context import Commit, DistributedContext
from potluck.context.functions import all_reduce_mean, all_reduce_sum
from potluck.context.start import init

__all__ = ["Commit", "DistributedContext", "all_reduce_mean", "all_reduce_sum", "init"]
