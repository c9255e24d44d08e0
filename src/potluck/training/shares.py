"""Shares for unlike machines: who computes how many samples of a batch. Pure.

A step lasts as long as its slowest rank, so samples are dealt out in proportion to measured speed:
then all ranks end at the same time. The gradient stays that of the whole batch, because every
rank's mean is weighed by its samples (Share.weight). Speeds are measured at the current shares, so
a fixed cost per step counts as slowness; dealing again with the new measurement settles where all
ranks take equally long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalShares:
    """Deal samples out by speed.

    ``smoothing`` is the weight of the newest step in a rank's measured speed. Shares change only
    when the step would become shorter by more than the fraction ``threshold``.
    """

    smoothing: float = 0.3
    threshold: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}; it must be above 0 and at most 1")
        if not self.threshold >= 0:
            raise ValueError(f"threshold is {self.threshold}; it must not be negative")


@dataclass(frozen=True, slots=True)
class Speed:
    """One rank's speed: exponential averages of samples and of seconds; their ratio is robust."""

    samples: float = 0.0
    seconds: float = 0.0

    def after(self, num_samples: int, seconds: float, smoothing: float) -> Speed:
        """The average with one more step in it."""
        if num_samples < 1 or not seconds > 0:
            return self
        if not self.seconds:
            return Speed(num_samples, seconds)
        keep = 1 - smoothing
        return Speed(
            keep * self.samples + smoothing * num_samples,
            keep * self.seconds + smoothing * seconds,
        )

    @property
    def samples_per_s(self) -> float:
        """0 while nothing has been measured."""
        return self.samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The speeds that shares are dealt out by, in rank order, and why."""

    speeds: tuple[float, ...]
    reason: str = ""


def apportion(size: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """How many of ``size`` samples each rank gets: the split whose slowest rank is fastest.

    Nobody gets nothing unless there are fewer samples than ranks, since a rank without samples
    shows no speed. Ties go to the lower rank, so equal speeds give equal shares and the first
    ranks one more.
    """
    if size < 0 or not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(f"{size} samples can't be dealt out by speeds {list(speeds)}")
    total = math.fsum(speeds)
    # What everybody certainly gets, then one at a time to whoever would be done with it first.
    counts = [math.floor(size * speed / total) for speed in speeds]
    ranks = range(len(speeds))
    while sum(counts) < size:
        counts[min(ranks, key=lambda rank: (counts[rank] + 1) / speeds[rank])] += 1
    while sum(counts) > size:  # only by rounding, where one rank has nearly everything
        counts[max(ranks, key=lambda rank: counts[rank] / speeds[rank])] -= 1
    if size >= len(counts):
        for rank in ranks:
            if not counts[rank]:
                rich = [other for other in ranks if counts[other] > 1]
                counts[max(rich, key=lambda other: counts[other] / speeds[other])] -= 1
                counts[rank] = 1
    return tuple(counts)


def seconds(size: int, split_by: Sequence[float], speeds: Sequence[float]) -> float:
    """How long ranks of ``speeds`` compute on ``size`` samples dealt out by ``split_by``."""
    counts = apportion(size, split_by)
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def replan(plan: Plan | None, measured: Sequence[float], size: int, threshold: float) -> Plan:
    """The plan to go on with: ``plan`` (None: equal shares) or one by the ``measured`` speeds.

    A rank without a measurement (0) counts as the median of the others.
    """
    current = plan if plan is not None else Plan((1.0,) * len(measured), "equal shares")
    known = [speed for speed in measured if speed > 0]
    if not known:
        return current
    middle = statistics.median(known)
    filled = tuple(speed if speed > 0 else middle for speed in measured)
    now, then = seconds(size, current.speeds, filled), seconds(size, filled, filled)
    if now <= (1 + threshold) * then:
        return replace(current, reason=f"new shares would gain {now / then - 1:.0%}")
    split = ":".join(str(count) for count in apportion(size, filled))
    return Plan(filled, f"shares {split} make steps {now / then:.2f} times as fast")
