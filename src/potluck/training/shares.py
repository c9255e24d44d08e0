"""Load balancing: how many samples of a batch each rank computes, by its measured speed. Pure.

A step takes as long as its slowest rank, so a batch is split such that all ranks finish their
*share* at the same time. A rank's time is modelled as a linear function of its samples: a fixed
cost (the optimizer, packing gradients) and a cost per sample. Both are fitted to the rank's last
steps by the median of the slopes between pairs of steps (Theil, 1950; Sen, 1968), which is robust
to outliers. The reduced gradient is still the mean over the whole batch, because each rank's mean
is weighted by its samples (``Share.weight``).

A rank gets no more samples than fit into its memory at once (``Cost.most``); the others compute the
rest. A batch that does not fit into all memories together is computed in several *parts*: each rank
gets as many times its bound as there are parts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

SPREAD = 0.2
"""Two steps give a slope only if their numbers of samples differ by this fraction."""

LEAST_SLOPE = 0.1
"""A lower bound of the fitted cost per sample, as a fraction of the whole time per sample: timing
noise can make the fit too small, even negative."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a rank for its share of a step: ``fixed_s + sample_s * samples`` seconds.

    ``most``: the samples that fit into its memory at once; 0 while no bound is known.
    """

    fixed_s: float
    sample_s: float
    most: int = 0

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
    more. No rank gets more than ``most``; where that is too little for the batch, no rank gets more
    than the least multiple of it that is enough. ValueError for costs that are not finite and
    positive.
    """
    if size < 0 or not costs or not all(map(_is_possible, costs)):
        raise ValueError(f"{size} samples can't be split by the costs {list(costs)}")
    times = num_parts(size, costs)
    return _split(size, costs, [times * cost.most or size for cost in costs])


def num_parts(size: int, costs: Sequence[Cost]) -> int:
    """In how many parts ranks of these ``costs`` must compute a batch of ``size`` samples, at
    least: 1 if it fits into their memories at once."""
    together = sum(cost.most for cost in costs)
    return max(1, -(-size // together)) if all(cost.most for cost in costs) else 1


def capped(costs: Sequence[Cost] | None, caps: Sequence[int]) -> Costs | None:
    """The costs of ranks that compute at most ``caps`` samples at once (0: any number), equal
    shares for ``costs`` of None; None if nothing is known of any rank."""
    if costs is None:
        return tuple(replace(EQUAL, most=cap) for cap in caps) if any(caps) else None
    caps = caps or (0,) * len(costs)
    return tuple(replace(cost, most=cap) for cost, cap in zip(costs, caps, strict=True))


def _split(size: int, costs: Sequence[Cost], bounds: Sequence[int]) -> tuple[int, ...]:
    """The split with at most ``bounds`` samples for each rank. Ranks that would get more get their
    bound, and the rest is split among the others, who then end later: so a rank that is at its
    bound once stays there."""
    counts = _unbounded(size, costs)
    full = [rank for rank, bound in enumerate(bounds) if counts[rank] >= bound]
    free = [rank for rank, bound in enumerate(bounds) if counts[rank] < bound]
    if all(counts[rank] == bounds[rank] for rank in full):
        return counts
    left = size - sum(bounds[rank] for rank in full)
    rest = _split(left, [costs[rank] for rank in free], [bounds[rank] for rank in free])
    found = dict(zip(free, rest, strict=True)) | {rank: bounds[rank] for rank in full}
    return tuple(found[rank] for rank in range(len(costs)))


def _unbounded(size: int, costs: Sequence[Cost]) -> tuple[int, ...]:
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
    present: Costs | None,
    measured: Sequence[Cost | None],
    size: int,
    threshold: float,
    caps: Sequence[int] = (),
) -> tuple[Costs | None, str]:
    """The costs of the next split, and the reason in words: the ``present`` ones (None: equal
    shares), or those ``measured`` if they make steps shorter by more than ``threshold``. Both are
    bounded by ``caps``.

    A rank without a measurement (None) counts with the median of the others.
    """
    known = [cost for cost in measured if cost is not None]
    if not known:
        return present, ""
    middle = Cost(
        statistics.median(cost.fixed_s for cost in known),
        statistics.median(cost.sample_s for cost in known),
    )
    costs = capped([cost if cost is not None else middle for cost in measured], caps)
    present = capped(present or (EQUAL,) * len(measured), caps)
    assert costs is not None
    assert present is not None
    now, then = step_s(size, present, costs), step_s(size, costs, costs)
    if now <= (1 + threshold) * then:
        return present, f"new shares would gain {now / then - 1:.0%}"
    split = ":".join(str(count) for count in apportion(size, costs))
    return costs, f"shares {split} make steps {now / then:.2f} times as fast"
