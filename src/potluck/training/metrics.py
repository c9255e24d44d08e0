"""Metrics of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from potluck.context import DistributedContext


def average(
    ctx: DistributedContext, metrics: Mapping[str, Any], *, weight: float = 1.0
) -> dict[str, float]:
    """The mean of each metric over all ranks, weighed by ``weight`` (a rank's samples, say).

    Every rank calls it with the same names in any order; a rank's NaN is left out of that metric's
    mean, and what no rank knows is NaN. Values are numbers or tensors of one element. Costs one
    all_reduce of 16 bytes per metric.
    """
    if not weight >= 0:
        raise ValueError(f"weight is {weight}; it must not be negative")
    names = sorted(metrics)
    values = [float(metrics[name]) for name in names]
    known = [not math.isnan(value) and weight > 0 for value in values]
    sums = np.zeros((2, len(names)), np.float64)
    sums[0] = [weight * v if k else 0.0 for v, k in zip(values, known, strict=True)]
    sums[1] = [weight if k else 0.0 for k in known]
    ctx.all_reduce(sums)
    return {
        name: float(total / part) if part else math.nan
        for name, total, part in zip(names, *sums, strict=True)
    }
