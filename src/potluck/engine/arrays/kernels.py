"""The arithmetic of the engine: the native kernels where they are and pay, else their twins.

Both give the same bits (``reduction.py``, ``codecs/``), so ranks with and without the native core
work in one group.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from potluck import native
from potluck.codecs.codec import Bytes, Codec, Floats
from potluck.engine.arrays import reduction
from potluck.engine.arrays.layout import Array
from potluck.types import ReduceOp
from potluck.wire.dtypes import code_of

# NumPy's own loops are as fast for what processors compute with; 16-bit floats it takes one by one.
_PAYS = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})


def combine(op: ReduceOp, mine: Array, theirs: Array) -> None:
    """``mine = op(mine, theirs)``. Integers wrap around as in NumPy."""
    if native.available and mine.dtype in _PAYS:
        native.core.combine(code_of(mine.dtype), op, mine.view(np.uint8), theirs.view(np.uint8))
    else:
        reduction.combine(op, mine, theirs)


def conclude(op: ReduceOp, array: Array, world_size: int) -> None:
    """What is left to do once all contributions are in: a mean divides, in the array's dtype."""
    if native.available and op is ReduceOp.MEAN and array.dtype in _PAYS:
        native.core.divide(code_of(array.dtype), array.view(np.uint8), world_size)
    else:
        reduction.conclude(op, array, world_size)


def encode(codec: Codec, encoded: Bytes, source: Floats) -> None:
    """``encoded`` is filled with what stands for ``source``."""
    if native.available:
        native.core.encode(codec.code, encoded, source)
    else:
        codec.encode(encoded, source)


def encode_with_residual(codec: Codec, encoded: Bytes, residual: Floats, source: Floats) -> None:
    """``encoded`` stands for ``source + residual``; what that loses becomes the new residual."""
    np.add(residual, source, out=residual)
    if native.available:
        native.core.encode_with_residual(codec.code, encoded, residual, residual)
    else:
        codec.encode(encoded, residual)
        decoded = np.empty_like(residual)
        codec.decode(decoded, encoded)
        np.subtract(residual, decoded, out=residual)


def decode(codec: Codec, target: Floats, encoded: Bytes) -> None:
    """``target`` is filled with what ``encoded`` stands for."""
    if native.available:
        native.core.decode(codec.code, target, encoded)
    else:
        codec.decode(target, encoded)


def decode_accumulate(codec: Codec, target: Floats, encoded: Bytes) -> None:
    """What ``encoded`` stands for is added to ``target``."""
    if native.available:
        native.core.decode_accumulate(codec.code, target, encoded)
    else:
        codec.decode_accumulate(target, encoded)
