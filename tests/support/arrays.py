"""Arrays that hold what number formats trip over, at addresses that nothing is aligned to."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from potluck._core.wire.dtypes import NAMES

Array = NDArray[Any]

DTYPES = tuple(np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in NAMES)


def odd_array(dtype: np.dtype[Any], count: int, *, offset: int, seed: int) -> Array:
    """``count`` elements, ``offset`` bytes into their memory.

    Floats are a mix of random bits (so of every magnitude, with NaN and subnormals), of ordinary
    values, and of zeros of both signs, infinities, NaN and the ends of the range.
    """
    rng = np.random.default_rng(seed)
    memory = np.zeros(count * dtype.itemsize + offset, np.uint8)[offset:]
    memory[:] = np.frombuffer(rng.bytes(memory.size), np.uint8)
    array = memory.view(dtype)
    if dtype == np.bool_:
        memory &= 1
    elif is_float(dtype):
        parts = array.view(_part(dtype))
        kind = rng.integers(0, 3, parts.size)
        with np.errstate(all="ignore"):
            ordinary = rng.standard_normal(parts.size).astype(np.float32).astype(parts.dtype)
            special = _special(parts.dtype)[rng.integers(0, 12, parts.size)]
            np.copyto(parts, ordinary, where=kind == 1)
            np.copyto(parts, special, where=kind == 2)
    return array


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are equal bit by bit, any NaN counting as equal to any other."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if is_float(one.dtype):
        one, other = one.view(_part(one.dtype)), other.view(_part(other.dtype))
        nan = np.isnan(one)
        if not np.array_equal(nan, np.isnan(other)):
            return False
        one, other = one[~nan], other[~nan]
    return one.tobytes() == other.tobytes()


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` has NaN: floats of all widths, and complex numbers of them."""
    return dtype.kind in "fcV" or dtype == ml_dtypes.bfloat16


def _part(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def _special(dtype: np.dtype[Any]) -> Array:
    about: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    values = [0.0, np.inf, np.nan, about.max, about.smallest_normal, about.smallest_subnormal]
    return np.array([*values, *(-value for value in values)]).astype(dtype)
