"""Combining two contributions, element by element, in place (the Python twin of the kernels)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from potluck.engine.layout import Array
from potluck.types import ReduceOp

_KERNELS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def check(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """TypeError for a combination that has no meaning."""
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        raise TypeError(
            f"the mean of {dtype} values is not {dtype}; use op='sum' and divide, or a float array"
        )


def combine(op: ReduceOp, mine: Array, theirs: Array) -> None:
    """``mine = op(mine, theirs)``. Integers wrap around as in NumPy."""
    _KERNELS[op](mine, theirs, out=mine)


def conclude(op: ReduceOp, array: Array, world_size: int) -> None:
    """What is left to do once all contributions are in: a mean divides, in the array's dtype."""
    if op is ReduceOp.MEAN and world_size > 1:
        np.divide(array, array.dtype.type(world_size), out=array)
