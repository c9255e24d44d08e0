"""All-reduce as functions that leave their argument alone and return a new array."""

from __future__ import annotations

from typing import Any

import numpy as np

from potluck import hints
from potluck.context.arrays import is_tensor
from potluck.context.collectives import Collectives

_FIRST = "the context comes first: potluck.{}(ctx, array)"


@hints.arguments({}, _FIRST.format("all_reduce_sum"))
def all_reduce_sum(context: Collectives, array: Any) -> Any:
    """The sum of all ranks' arrays, as a new array of the same kind, dtype and shape.

    Numbers and (nested) lists of numbers are taken for NumPy arrays. ``context`` may be a
    sub-group.
    """
    _check_order(context, "all_reduce_sum")
    return context.all_reduce(_copy(array), "sum")


@hints.arguments({}, _FIRST.format("all_reduce_mean"))
def all_reduce_mean(context: Collectives, array: Any) -> Any:
    """The mean of all ranks' arrays (floats only), as a new array.

    Numbers and lists are taken as by ``all_reduce_sum``; whole ones become float64.
    """
    _check_order(context, "all_reduce_mean")
    copied = _copy(array)
    if isinstance(array, int | list | tuple) and copied.dtype.kind in "iu":
        copied = copied.astype(np.float64)
    return context.all_reduce(copied, "mean")


def _copy(array: Any) -> Any:
    return array.detach().clone() if is_tensor(array) else np.array(array)


def _check_order(context: object, name: str) -> None:
    if not isinstance(context, Collectives):
        raise TypeError(f"{_FIRST.format(name)}; the first argument is a {type(context).__name__}")
