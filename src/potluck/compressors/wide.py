"""Strategies for arrays that are not float32: the residual keeps what float32 can't hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.codecs.codec import Bytes, Floats
from potluck.compressors.strategy import Strategy

Array = NDArray[Any]


def compress_any(
    strategy: Strategy, array: Array, residual: Array | None, step: int
) -> tuple[Bytes, Floats]:
    """The payload of a float ``array`` of any dtype, and the float32 array that was compressed.

    ``residual`` is float64 for a float64 array, else float32. It becomes what was lost in the
    array's own dtype, with the rounding to float32.
    """
    if array.dtype == np.float32:
        return strategy.compress(array, residual, step), array
    with np.errstate(over="ignore", invalid="ignore"):
        if residual is None:
            source = array.astype(np.float32)
            return strategy.compress(source, None, step), source
        residual += array.astype(residual.dtype, copy=False)
        source = residual.astype(np.float32)
        payload = strategy.compress(source, np.zeros_like(source), step)
        decoded = strategy.decompress(payload, array.shape, step)
        residual -= decoded.astype(array.dtype).astype(residual.dtype)
    residual[~np.isfinite(residual)] = 0
    return payload, source
