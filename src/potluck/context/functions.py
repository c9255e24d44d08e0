"""All-reduce as functions that leave their argument alone and return a new array."""

from __future__ import annotations

from typing import Any

import numpy as np

from potluck.context.arrays import is_tensor
from potluck.context.collectives import Collectives


def all_reduce_sum(context: Collectives, array: Any) -> Any:
    """The sum of all ranks' arrays, as a new array of the same kind, dtype and shape."""
    return context.all_reduce(_copy(array), "sum")


def all_reduce_mean(context: Collectives, array: Any) -> Any:
    """The mean of all ranks' arrays (floats only), as a new array."""
    return context.all_reduce(_copy(array), "mean")


def _copy(array: Any) -> Any:
    return array.detach().clone() if is_tensor(array) else np.array(array)
