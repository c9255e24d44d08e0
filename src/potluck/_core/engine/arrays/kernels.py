"""The arithmetic of the engine: the native kernels where they are and pay, else their twins.

Both give the same bits (``reduction.py``), so ranks with and without the native core
work in one group.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from potluck._core import native
from potluck._core.engine.arrays import reduction
from potluck._core.engine.arrays.layout import Array
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import code_of

# NumPy's own loops are as fast for what processors compute with; 16-bit floats it takes one by one.
_PAYS = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})


def combine(op: ReduceOp, mine: Array, theirs: Array) -> None:
    """``mine = op(mine, theirs)``. Integers wrap around as in NumPy."""
    if native.available and mine.dtype in _PAYS:
        native.core.combine(code_of(mine.dtype), op, mine.view(np.uint8), theirs.view(np.uint8))
    else:
        reduction.combine(op, mine, theirs)


def divide(array: Array, divisor: float) -> None:
    """``array /= divisor``, in its dtype, as ``reduction.divide``: the last step of a mean, and the
    first one of those that are scaled."""
    if native.available and array.dtype in _PAYS:
        native.core.divide(code_of(array.dtype), array.view(np.uint8), divisor)
    else:
        reduction.divide(array, divisor)
