"""All-reduce as functions that return a new array and do not change their argument."""

from __future__ import annotations

from typing import Any

import numpy as np

from potluck._core import hints
from potluck._core.context.collectives import Collectives
from potluck._core.wire.tensors import is_tensor

_FIRST = "the context comes first: potluck.{}(ctx, array)"


@hints.arguments({}, _FIRST.format("all_reduce_sum"))
def all_reduce_sum(context: Collectives, array: Any) -> Any:
    """Return the sum of all ranks' arrays, as a new array of the same kind, dtype and shape.

    ``array`` is a NumPy array, a torch tensor, a number or a (nested) list of numbers, of the same
    shape and dtype on all ranks, and stays as it is. ``context`` may be a sub-group. Cost and
    errors are those of ``all_reduce``; TypeError if the context does not come first.
    """
    _check_order(context, "all_reduce_sum")
    return context.all_reduce(_copy(array), "sum")


@hints.arguments({}, _FIRST.format("all_reduce_mean"))
def all_reduce_mean(context: Collectives, array: Any) -> Any:
    """Return the mean of all ranks' arrays, as a new array of the same kind, dtype and shape.

    As ``all_reduce_sum``, for floats and complex numbers. Integers and lists of integers become
    float64; an array of integers is a TypeError.
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
