"""Shares for unlike machines: how many samples of a batch each rank computes. Pure.

A step lasts as long as its slowest rank, so samples are dealt out such that all ranks end at the
same time. A rank's time is a line: a fixed part (the optimizer, packing gradients) and a part per
sample. Both come from its last steps, by the median of the slopes between them (Theil, 1950; Sen,
1968), which a few odd steps do not move. The gradient stays that of the whole batch, because every
rank's mean is weighed by its samples (Share.weight).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

SPREAD = 0.2
"""By which fraction two steps' samples must differ to tell the fixed part from the other."""

LEAST_SLOPE = 0.1
"""The part per sample is at least this fraction of all: the other way to see it is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalShares:
    """Deal samples out by speed.

    A rank's speed is that of the median of its last ``window`` steps, so a change of it shows once
    it has lasted for more than half of them. Shares change only when the step would become shorter
    by more than the fraction ``threshold``.
    """

    window: int = 8
    threshold: float = 0.05

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 step")
        if not self.threshold >= 0:
            raise ValueError(f"threshold is {self.threshold}; it must not be negative")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a rank needs for its share of a step: ``fixed_s + sample_s * samples`` seconds."""

    fixed_s: float
    sample_s: float

    def seconds(self, num_samples: int) -> float:
        return self.fixed_s + self.sample_s * num_samples


EQUAL = Cost(0.0, 1.0)
"""What every rank counts as before anything is measured."""


@dataclass(frozen=True, slots=True)
class ShareCosts:
    """The costs that shares are dealt out by, in rank order, and why."""

    costs: tuple[Cost, ...]
    reason: str = ""


def fit(steps: Iterable[tuple[int, float]]) -> Cost | None:
    """The cost that (samples, seconds) of some ``steps`` show, None if there are none.

    While all of them have about equally many samples, all is taken as cost per sample: what that
    gets wrong shows as soon as shares have changed once.
    """
    timed = [(n, s) for n, s in steps if n > 0 and s > 0]
    if not timed:
        return None
    per_sample = statistics.median(s / n for n, s in timed)
    slopes = [
        (s1 - s2) / (n1 - n2)
        for (n1, s1), (n2, s2) in combinations(timed, 2)
        if abs(n1 - n2) > SPREAD * max(n1, n2)
    ]
    slope = statistics.median(slopes) if slopes else per_sample
    if slope >= per_sample:
        return Cost(0.0, per_sample)
    slope = max(slope, LEAST_SLOPE * per_sample)
    return Cost(max(statistics.median(s - slope * n for n, s in timed), 0.0), slope)


def apportion(size: int, costs: Sequence[Cost]) -> tuple[int, ...]:
    """How many of ``size`` samples each rank gets: the split whose slowest rank is fastest.

    Every rank gets at least one sample if there are enough, since a rank without samples shows no
    speed. Ties go to the lower rank, so equal costs give equal shares and the first ranks one more.
    """
    if size < 0 or not costs or not all(map(_is_possible, costs)):
        raise ValueError(f"{size} samples can't be dealt out by costs {list(costs)}")
    ranks = range(len(costs))
    least = 1 if size >= len(costs) else 0
    # The number that each rank certainly gets; then one sample at a time to the rank that would be
    # done with it first.
    end = _common_end(size, costs)
    counts = [max(math.floor((end - c.fixed_s) / c.sample_s), least) for c in costs]
    while sum(counts) < size:
        counts[min(ranks, key=lambda rank: costs[rank].seconds(counts[rank] + 1))] += 1
    while sum(counts) > size:
        rich = [rank for rank in ranks if counts[rank] > least]
        counts[max(rich, key=lambda rank: costs[rank].seconds(counts[rank]))] -= 1
    return tuple(counts)


def _is_possible(cost: Cost) -> bool:
    return 0 <= cost.fixed_s < math.inf and 0 < cost.sample_s < math.inf


def _common_end(size: int, costs: Sequence[Cost]) -> float:
    """When all ranks are done that have anything to do, if samples could be divided."""
    rate = head_start = end = 0.0
    for cost in sorted(costs, key=lambda cost: cost.fixed_s):
        if rate and end <= cost.fixed_s:
            break  # the others are done before this one could begin
        rate += 1 / cost.sample_s
        head_start += cost.fixed_s / cost.sample_s
        end = (size + head_start) / rate
    return end


def step_s(size: int, split_by: Sequence[Cost], costs: Sequence[Cost]) -> float:
    """How long ranks of ``costs`` compute on ``size`` samples dealt out by ``split_by``."""
    counts = apportion(size, split_by)
    return max(cost.seconds(count) for count, cost in zip(counts, costs, strict=True))


def replan(
    plan: ShareCosts | None, measured: Sequence[Cost | None], size: int, threshold: float
) -> ShareCosts | None:
    """The plan to go on with: ``plan`` (None: equal shares) or one by the ``measured`` costs.

    A rank without a measurement (None) counts as the median of the others.
    """
    known = [cost for cost in measured if cost is not None]
    if not known:
        return plan
    middle = Cost(
        statistics.median(cost.fixed_s for cost in known),
        statistics.median(cost.sample_s for cost in known),
    )
    costs = tuple(cost if cost is not None else middle for cost in measured)
    current = plan if plan is not None else ShareCosts((EQUAL,) * len(costs))
    now, then = step_s(size, current.costs, costs), step_s(size, costs, costs)
    if now <= (1 + threshold) * then:
        return replace(current, reason=f"new shares would gain {now / then - 1:.0%}")
    split = ":".join(str(count) for count in apportion(size, costs))
    return ShareCosts(costs, f"shares {split} make steps {now / then:.2f} times as fast")
