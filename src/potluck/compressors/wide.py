"""Strategies for arrays that are not float32: the residual keeps what float32 can't hold."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from potluck._core.codecs.codec import LARGEST, Bytes, Floats
from potluck.compressors.strategy import Strategy

Array = NDArray[Any]


def compress_any(
    strategy: Strategy, array: Array, residual: Array | None, step: int
) -> tuple[Bytes, Floats]:
    """The payload of a float ``array`` of any dtype, and the float32 array that was compressed.

    ``residual`` is float64 for a float64 array, else float32. It becomes what was lost in the
    array's own dtype, with the rounding to float32. The largest float32 stands for finite elements
    beyond it; what is beyond is lost.
    """
    if array.dtype == np.float32:
        return strategy.compress(array, residual, step), array
    single = np.dtype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if residual is None:
            source = cast(array, single)
            return strategy.compress(source, None, step), source
        residual += array.astype(residual.dtype, copy=False)
        source = residual.copy() if residual.dtype == single else cast(residual, single)
        payload = strategy.compress(source, np.zeros_like(source), step)
        decoded = strategy.decompress(payload, array.shape, step)
        residual -= cast(decoded, array.dtype).astype(residual.dtype)
    residual[~np.isfinite(residual) | (np.abs(source) == np.float32(LARGEST))] = 0
    return payload, source


def largest_of(dtype: np.dtype[Any]) -> float:
    """The largest finite number of a float ``dtype``."""
    bounds: Any = ml_dtypes.finfo  # untyped
    return float(bounds(dtype).max)


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """``array`` in ``dtype``, with its largest number in place of finite elements beyond it."""
    if dtype == array.dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        made: Array = array.astype(dtype)
    is_beyond = ~np.isfinite(made) & np.isfinite(array)
    if is_beyond.any():
        largest = np.full_like(made, largest_of(dtype))
        made[is_beyond] = np.copysign(largest, made)[is_beyond]
    return made
