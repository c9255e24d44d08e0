"""Pace: ranks measure speed and gradient noise, and adapt shares and batch size from that.

Every few steps the ranks exchange their speeds and noise estimates (one all_gather), and all
compute the same shares and batch size from the same numbers. If a peer is lost during the exchange,
only some ranks have its result; therefore a new group begins with equal shares, exchanges at once,
and takes the batch size from the rank whose state counts. In rounds nothing is exchanged here: the
reports of a round have the speeds of all ranks.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.training.noise import next_batch
from potluck.training.policy import Policy
from potluck.training.progress import Progress
from potluck.training.shares import EQUAL, Cost, Costs, capped, fit, replan
from potluck.training.transfer import gather_numbers

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_log = logging.getLogger(__name__)

EARLY_STEPS = (0, 2, 5)
"""Steps after a change of the group at which ranks exchange, besides every ``adapt_every``
steps."""


class Pace:
    """The measurements of this rank, and the shares that all ranks agreed on."""

    def __init__(self, policy: Policy) -> None:
        self.costs: Costs | None = None
        """The costs by which batches are split, in rank order; None for equal shares."""
        self.caps: tuple[int, ...] = ()
        """The samples that fit into each rank's memory at once, 0 for any number."""
        self._policy = policy
        self._is_on = policy.shares is not None or policy.batching is not None
        window = policy.shares.window if policy.shares is not None else 1
        self._steps: deque[tuple[int, float]] = deque(maxlen=window)
        self._rounds: deque[Sequence[tuple[int, float]]] = deque(maxlen=window)
        self._signals: list[float] = []
        self._noises: list[float] = []
        self._since: int | None = None  # the step at which this group began
        self._num_due = 0  # how many exchanges were due before the latest one

    def add_time(self, num_samples: int, seconds: float) -> None:
        """Record that this rank computed for ``seconds`` on ``num_samples`` of a committed step."""
        if num_samples:
            self._steps.append((num_samples, seconds))

    def add_noise(self, signal: float, noise: float) -> None:
        """Record this rank's unbiased |G|^2 and tr(Sigma) of a committed step."""
        if math.isfinite(signal) and math.isfinite(noise):
            self._signals.append(signal)
            self._noises.append(noise)

    def new_group(self, caps: Sequence[int] = ()) -> None:
        """Forget the agreement of the previous group. The ranks of the present one compute at most
        ``caps`` samples at once."""
        self.caps = tuple(caps)
        self.costs, self._since, self._num_due = capped(None, self.caps), None, 0
        self._rounds.clear()

    def add_round(
        self, ctx: DistributedContext, step: int, done: Sequence[tuple[int, float]]
    ) -> None:
        """Adapt shares to a committed round: the samples and seconds of each rank of the present
        group, in rank order, as all its ranks have received them. Not a collective call."""
        self._rounds.append(done)
        costs = [fit(rounds) for rounds in zip(*self._rounds, strict=True)]
        self._report(ctx, step, self._deal(costs, sum(num for num, _ in done)))

    def exchange(self, ctx: DistributedContext, progress: Progress) -> None:
        """Exchange measurements if an exchange is due. A collective call between two steps.

        Not after the last step: if a peer is lost at the end, ranks that have left would keep
        another batch size than the members of one more group.
        """
        if not self._is_on or progress.done:
            return
        num_due = self._count_due(progress.step)
        if num_due == self._num_due:
            return
        cost = fit(self._steps) or Cost(0.0, 0.0)
        noise = (len(self._signals), math.fsum(self._signals), math.fsum(self._noises))
        rows = gather_numbers(ctx, {"cost": (cost.fixed_s, cost.sample_s), "noise": noise})
        self._num_due = num_due
        self._signals, self._noises = [], []
        costs = [Cost(*each) if each[1] else None for each in rows["cost"].tolist()]
        for change in (
            self._deal(costs, progress.batch_size),
            self._resize(rows["noise"].sum(axis=0).tolist(), progress),
        ):
            self._report(ctx, progress.step, change)

    def _report(self, ctx: DistributedContext, step: int, change: str) -> None:
        if change:
            _log.info("step %d: %s", step, change)
            if ctx.is_master:
                ctx.report(event=change)

    def _count_due(self, step: int) -> int:
        """How many exchanges are due in this group until ``step``."""
        if self._since is None:
            self._since = step
        since = step - self._since
        return since // self._policy.adapt_every + sum(since >= early for early in EARLY_STEPS)

    def _deal(self, costs: Sequence[Cost | None], size: int) -> str:
        """Split ``size`` samples by ``costs``; the change in words, empty if there is none."""
        options = self._policy.shares
        if options is None:
            return ""
        before = self.costs or (EQUAL,) * len(costs)
        self.costs, reason = replan(self.costs, costs, size, options.threshold, self.caps)
        return "" if self.costs in (None, before) else reason

    def _resize(self, sums: list[float], progress: Progress) -> str:
        """Set the batch size; the change in words, empty if there is none."""
        options = self._policy.batching
        num, signal, noise = sums
        if options is None or not num:
            return ""
        progress.noise = progress.noise.after(signal / num, noise / num, options.smoothing)
        size, reason = next_batch(progress.batch_size, progress.noise, options)
        before, progress.batch_size = progress.batch_size, size
        return f"batches of {size}: {reason}" if size != before else ""
