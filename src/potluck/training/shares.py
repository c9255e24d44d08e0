"""Load balancing: how many samples of a batch each rank computes, by its measured speed. Pure.

A step takes as long as its slowest rank, so a batch is split such that all ranks finish their
*share* at the same time. A rank's time is modelled as a linear function of its samples: a fixed
cost (the optimizer, packing gradients) and a cost per sample. Both are fitted to the rank's last
steps by the median of the slopes between pairs of steps (Theil, 1950; Sen, 1968), which is robust
to outliers. The reduced gradient is still the mean over the whole batch, because each rank's mean
is weighted by its samples (``Share.weight``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

SPREAD = 0.2
"""Two steps give a slope only if their numbers of samples differ by this fraction."""

LEAST_SLOPE = 0.1
"""A lower bound of the fitted cost per sample, as a fraction of the whole time per sample: timing
noise can make the fit too small, even negative."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a rank for its share of a step: ``fixed_s + sample_s * samples`` seconds."""

    fixed_s: float
    sample_s: float

    def seconds(self, num_samples: int) -> float:
        return self.fixed_s + self.sample_s * num_samples


EQUAL = Cost(0.0, 1.0)
"""The cost of every rank before measurements."""


Costs = tuple[Cost, ...]
"""By which batches are split: the cost of each rank, in rank order."""


def fit(steps: Iterable[tuple[int, float]]) -> Cost | None:
    """The cost that fits ``steps``, pairs of (samples, seconds); None without steps.

    Steps of nearly equal numbers of samples can't separate the two costs: then the whole time
    counts as cost per sample, until shares have changed once.
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
    """Split ``size`` samples such that the slowest rank ends as early as possible.

    Each rank gets at least one sample if there are enough: the speed of a rank without samples
    can't be measured. Ties go to the lower rank: with equal costs the first ranks get one sample
    more. ValueError for costs that are not finite and positive.
    """
    if size < 0 or not costs or not all(map(_is_possible, costs)):
        raise ValueError(f"{size} samples can't be split by the costs {list(costs)}")
    ranks = range(len(costs))
    least = 1 if size >= len(costs) else 0
    # First what each rank computes until the common end, rounded down; then each remaining sample
    # goes to the rank that would end first with it.
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
    """The time at which all ranks with work end, if samples were divisible."""
    rate = head_start = end = 0.0
    for cost in sorted(costs, key=lambda cost: cost.fixed_s):
        if rate and end <= cost.fixed_s:
            break  # the ranks so far end before the fixed cost of this rank is over
        rate += 1 / cost.sample_s
        head_start += cost.fixed_s / cost.sample_s
        end = (size + head_start) / rate
    return end


def step_s(size: int, split_by: Sequence[Cost], costs: Sequence[Cost]) -> float:
    """The seconds of a step of ``size`` samples, split by ``split_by``, on ranks of ``costs``."""
    counts = apportion(size, split_by)
    return max(cost.seconds(count) for count, cost in zip(counts, costs, strict=True))


def replan(
    present: Costs | None, measured: Sequence[Cost | None], size: int, threshold: float
) -> tuple[Costs | None, str]:
    """The costs of the next split, and the reason in words: the ``present`` ones (None: equal
    shares), or those ``measured`` if they make steps shorter by more than ``threshold``.

    A rank without a measurement (None) counts with the median of the others.
    """
    known = [cost for cost in measured if cost is not None]
    if not known:
        return present, ""
    middle = Cost(
        statistics.median(cost.fixed_s for cost in known),
        statistics.median(cost.sample_s for cost in known),
    )
    costs = tuple(cost if cost is not None else middle for cost in measured)
    present = present or (EQUAL,) * len(costs)
    now, then = step_s(size, present, costs), step_s(size, costs, costs)
    if now <= (1 + threshold) * then:
        return present, f"new shares would gain {now / then - 1:.0%}"
    split = ":".join(str(count) for count in apportion(size, costs))
    return costs, f"shares {split} make steps {now / then:.2f} times as fast"
