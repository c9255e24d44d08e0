"""Hashes of numbers that may differ in their last bits, as those of ``cos`` on two systems."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

_BITS = 24
"""Of a float64's 52 after the point, those that may differ. Many, for ``1 + cos(x)`` near its zero,
the end of a schedule, has many times the error of ``cos``."""
_HALF = 24


def two_grids(value: Any) -> int:
    """A hash, below 2**48, of a nesting of dict, list and tuple over numbers, tensors and texts,
    for ``nearly_equal``.

    Floats are rounded on two grids, one half a cell beside the other: two floats that are close to
    each other, but on two sides of a border of the first grid, are in one cell of the second.
    """
    halves = []
    for offset in (0, 1 << (_BITS - 1)):
        text = repr(_rounded(value, offset)).encode()
        halves.append(int.from_bytes(hashlib.sha256(text).digest()[: _HALF // 8], "little"))
    return halves[0] << _HALF | halves[1]


def nearly_equal(one: int, other: int) -> bool:
    """Whether two results of ``two_grids`` are of nearly equal values.

    True if one number is at most 9e-10 of its size off and all others are equal. Of several that
    are off, two may be on borders, each of another grid: at 1e-12 of their size with a probability
    below one in a million for a pair.
    """
    below = (1 << _HALF) - 1
    return one >> _HALF == other >> _HALF or one & below == other & below


def _rounded(value: Any, offset: int) -> Any:
    if isinstance(value, dict):
        return [(key, _rounded(each, offset)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_rounded(each, offset) for each in value]
    if hasattr(value, "tolist"):
        return _rounded(value.tolist(), offset)
    if isinstance(value, float):
        # The bits of a float, as a whole number, grow as its size does, also over a power of two.
        (bits,) = struct.unpack("<q", struct.pack("<d", value))
        return (bits + offset) >> _BITS
    return value
