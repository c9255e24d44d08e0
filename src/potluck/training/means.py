"""Means of figures over all ranks, such as losses and accuracies."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.training.shares import EQUAL, Costs, apportion

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext


def average(
    ctx: DistributedContext, metrics: Mapping[str, Any], *, weight: float = 1.0
) -> dict[str, float]:
    """The mean of each metric over all ranks, weighted by ``weight`` (for example, samples).

    A collective call with the same names on every rank, in any order. Values are numbers or tensors
    of one element. A rank's NaN is left out of that metric's mean; without any value the mean is
    NaN. ValueError on all ranks if their names differ. Cost: one all_reduce of 16 bytes, and 16 for
    each metric.
    """
    if not weight >= 0:
        raise ValueError(f"weight is {weight}; it must not be negative")
    values = {name: float(value) for name, value in metrics.items()}
    known = {name: not math.isnan(value) and weight > 0 for name, value in values.items()}
    return means(ctx, {n: (weight * v, weight) if known[n] else (0, 0) for n, v in values.items()})


def means(ctx: DistributedContext, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """By name the quotient of two sums over all ranks, of a total and of what it counts; NaN for a
    count of 0. A collective call, with the names, errors and cost of ``average``."""
    names = sorted(totals)
    # The sums alone would not show that ranks passed other names. So a checksum of the names and
    # its square are summed, too: all checksums are equal to mine if the mean of the checksums is
    # mine and the mean of the squares is my square (then their variance is 0).
    # 20 bits: the squares of 8192 ranks are summed exactly.
    check = float(zlib.crc32("\0".join(names).encode()) >> 12)
    sums = np.array([*(totals[name] for name in names), (check, check * check)], np.float64).T
    sums = np.ascontiguousarray(sums)
    ctx.all_reduce(sums)
    if (sums[:, -1] != ctx.world_size * np.array([check, check * check])).any():
        raise ValueError(
            f"ranks average metrics of different names; those of {ctx.group.describe(ctx.rank)} "
            f"are {', '.join(names)}"
        )
    return {
        name: float(total / part) if part else math.nan
        for name, total, part in zip(names, *sums[:, :-1], strict=True)
    }


def part_of(ctx: DistributedContext, num: int, costs: Costs | None) -> range:
    """Which of ``num`` samples this rank evaluates, by the ``costs`` of the ranks; maybe none."""
    counts = apportion(num, costs or (EQUAL,) * ctx.world_size)
    begin = sum(counts[: ctx.rank])
    return range(begin, begin + counts[ctx.rank])


def plain(value: Any) -> Any:
    """``value`` as a plain number if it is an array or tensor of one element."""
    return value.item() if hasattr(value, "item") else value
