"""Combining contributions, element by element: the oracle that the native kernels are held to.

The engine itself goes through ``kernels.py``, which takes the native kernel where there is
one. Which NaN a NaN is (its sign and payload) is nowhere specified; every other bit is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from potluck._core.engine.arrays.layout import Array
from potluck._core.types import ReduceOp

_KERNELS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_SCALED = frozenset(
    map(np.dtype, (np.float32, np.float64, ml_dtypes.bfloat16, np.complex64, np.complex128))
)
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})


def check(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """TypeError for a combination that has no meaning."""
    if op in _BITWISE and dtype.kind not in "iub":
        raise TypeError(f"op={op.value!r} combines bits, so it needs integers or bool, not {dtype}")
    if op in _ORDERED and dtype.kind == "c":
        raise TypeError(f"{dtype} values have no order, so there is no op={op.value!r} of them")
    if op is ReduceOp.MEAN and dtype.kind in "iub":
        raise TypeError(
            f"the mean of {dtype} values is not {dtype}; use op='sum' and divide, or a float array"
        )


def combine(op: ReduceOp, mine: Array, theirs: Array) -> None:
    """``mine = op(mine, theirs)``. Integers wrap around as in NumPy."""
    _KERNELS[op](mine, theirs, out=mine)


def canonicalize_nans(array: Array) -> None:
    """Replace every NaN by the canonical one. Where each rank computes the result itself, the NaNs
    of two ranks may differ in sign and payload."""
    if array.dtype.kind in "iub":
        return
    parts = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    parts[np.isnan(parts)] = np.nan


def scale_of(dtype: np.dtype[Any], world_size: int) -> float:
    """What the contributions to a mean are divided by before they are summed, so that no sum
    overflows: a power of two, at least twice the number of ranks: a division by it is exact but
    below the smallest normal numbers. 1 for dtypes that are summed in a wider one."""
    is_scaled = dtype in _SCALED and world_size > 1
    return 2.0 ** (1 + (world_size - 1).bit_length()) if is_scaled else 1.0


def divide(array: Array, divisor: float) -> None:
    """Divide ``array`` in its dtype, complex numbers part by part. With a divisor below 1 what is
    finite stays finite: what rounding has carried beyond the largest number becomes that number."""
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    if divisor == 1:
        return
    if divisor > 1:
        np.divide(array, array.dtype.type(divisor), out=array)
        return
    finite, negative = np.isfinite(array), np.signbit(array)
    with np.errstate(over="ignore"):
        np.divide(array, array.dtype.type(divisor), out=array)
    beyond = finite & ~np.isfinite(array)
    bounds: Any = ml_dtypes.finfo  # untyped
    largest = array.dtype.type(bounds(array.dtype).max)
    array[beyond & ~negative], array[beyond & negative] = largest, -largest
