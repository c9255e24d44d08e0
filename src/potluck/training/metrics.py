"""Means of metrics over all ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

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
    names = sorted(metrics)
    values = [float(metrics[name]) for name in names]
    # The sums alone would not show that ranks passed other names. So a checksum of the names and
    # its square are summed, too: all checksums are equal to mine if the mean of the checksums is
    # mine and the mean of the squares is my square (then their variance is 0).
    # 20 bits: the squares of 8192 ranks are summed exactly.
    check = float(zlib.crc32("\0".join(names).encode()) >> 12)
    known = [not math.isnan(value) and weight > 0 for value in values]
    sums = np.zeros((2, len(names) + 1), np.float64)
    sums[0] = [*(weight * v if k else 0.0 for v, k in zip(values, known, strict=True)), check]
    sums[1] = [*(weight if k else 0.0 for k in known), check * check]
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
