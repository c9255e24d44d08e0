"""``Counts``: a training in rounds, without torch, which shows what counted and what did not.

What is trained is a count: each step adds one to its samples on its own rank, and the exchange of
a round adds up what the ranks have counted. In the end every sample must have been counted exactly
once per epoch, on every worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from potluck._core.context import DistributedContext
from potluck.checkpoint.store import CheckpointStore
from potluck.training.elastic import ElasticLoop, Policy
from potluck.training.replica import StateReplica
from potluck.training.rounding import tolerant_hash
from potluck.training.sampler import Schedule


@dataclass
class Counts:
    """A strategy and its training, whose state is how often each sample was committed."""

    ctx: DistributedContext
    schedule: Schedule
    every: int = 3
    store: CheckpointStore | None = None
    on_step: Callable[[Counts], None] = lambda counts: None
    policy: Policy = field(default_factory=lambda: Policy(hash_every=1, save_every=5))
    deadline: float | None = None
    rate: int = 1
    delay: int = 0
    num_fragments: int = 1
    needs_whole_weights: bool = False
    callbacks: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_steps = self.every
        self.delay = min(self.delay, self.every - 1)
        self.seen = np.zeros(self.schedule.num_samples, np.int64)
        self.mine = np.zeros_like(self.seen)
        self.kept: dict[int, np.ndarray] = {}
        self.fractions: list[float] = []
        self.num_taken = self.num_delayed = 0
        replica = StateReplica(lambda: {"seen": self.seen}, self.restore)
        self.job = ElasticLoop(
            self.ctx, self.schedule, replica, checkpoint=self.store, policy=self.policy,
            strategy=self, callbacks=self.callbacks,
        )  # fmt: skip

    def restore(self, state: Any) -> None:
        self.seen = state["seen"].copy()
        self.mine[:] = 0
        self.kept.clear()

    # -- the strategy

    def begin(self, number: int) -> None:
        assert self.num_fragments > 1 or not self.mine.any(), "steps of another round are left"

    def close(self, number: int, *, whole: bool) -> None:
        """A fragment is every so-manieth sample."""
        chosen = np.arange(len(self.mine)) % self.num_fragments == number % self.num_fragments
        chosen |= whole
        self.kept[number] = np.where(chosen, self.mine, 0)
        self.mine = np.where(chosen, 0, self.mine)

    def start(
        self, ctx: DistributedContext, number: int, weight: float, timeout_s: float
    ) -> Callable[[], None]:
        self.total = self.kept[number] if weight else np.zeros_like(self.seen)
        self.total = self.total.copy()
        work = ctx.all_reduce(self.total, async_op=True)
        return lambda: work.wait()

    def apply(self, number: int, fraction: float, *, delayed: bool) -> None:
        self.seen = self.seen + self.total
        self.num_delayed += delayed
        self.fractions.append(fraction)
        del self.kept[number]

    def inner_hash(self) -> int:
        return tolerant_hash(self.rate)

    def synchronize(self) -> None:
        return None

    def capture_inner(self) -> int:
        return self.rate

    def restore_inner(self, state: int) -> None:
        self.rate = state

    # -- the script

    def run(self) -> Counts:
        for share in self.job:
            with self.job.step():
                self.on_step(self)
                self.mine[share.indices] += 1
                self.job.log(loss=float(len(share.indices)))
                self.num_taken += 1
        return self
