"""Comparing what machines have computed that round differently. Pure.

``distance`` is that of two states which were equal some steps ago, in units of what rounding
explains; ``tolerant_hash`` is for numbers that may differ in their last bits only. Machines that
apply the same updates and round them differently come apart by some units in the last place for
each step, which add up like a random walk. An update that only one of them has applied, or another
learning rate, moves parameters by much more.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from potluck.checkpoint.state import Entry, State, flatten

ROUNDINGS = 256
"""Units in the last place of a tensor's largest value that one step explains."""
MOST = 0.25
"""Of a tensor's largest value: what rounding never explains, however coarse the dtype is."""
_OF_NUMBERS = 1e-6
"""Of a number: schedules of learning rates use functions that systems' libraries round differently,
and the last rate of a cosine has many times the error of ``cos``."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Distance:
    """The part of two states that is the farthest apart. ``excess``: how many times what rounding
    explains, inf for what is no rounding; ``where``: its path; ``what``: the difference in
    words."""

    excess: float = 0.0
    where: str = ""
    what: str = "equal"


def distance(mine: State, theirs: State, num_steps: int) -> Distance:
    """How far ``mine`` is from ``theirs``; they were equal ``num_steps`` steps ago. Floating-point
    tensors and numbers may differ, all else may not. Of the hyperparameters of a group, those count
    that both have: releases of torch know unlike ones. TypeError for a value that a state can't
    hold. Cost: reads every number once."""
    own, other = dict(_leaves(mine, "")), dict(_leaves(theirs, ""))
    both = {_group_of(where) for where in own} & {_group_of(where) for where in other}
    if missing := [where for where in own.keys() ^ other.keys() if _group_of(where) not in both]:
        return Distance(math.inf, min(missing), "missing in one of them")
    worst = Distance()
    for where in sorted(own.keys() & other.keys()):
        found = _of_leaves(own[where], other[where], where, num_steps)
        worst = max(worst, found, key=lambda each: each.excess)
    return worst


def _group_of(where: str) -> str:
    """The path of the parameter group that a hyperparameter belongs to; of others their own."""
    parts = where.split("/")
    return "/".join(parts[:3]) if parts[0] == "hyperparameters" else where


def _leaves(value: State, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        parts: Any = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        yield path, value
        return
    for key, part in parts:
        yield from _leaves(part, f"{path}/{key}" if path else str(key))


def _of_leaves(mine: Any, theirs: Any, where: str, num_steps: int) -> Distance:
    own, other = _tensor(mine), _tensor(theirs)
    if own is not None and other is not None:
        return _of_tensors(own, other, where, num_steps)
    what = f"{mine!r:.60}, not {theirs!r:.60}"
    if type(mine) is float and type(theirs) is float:
        if mine == theirs or (math.isnan(mine) and math.isnan(theirs)):
            return Distance()
        is_near = math.isclose(mine, theirs, rel_tol=_OF_NUMBERS)
        apart = abs(mine - theirs) / max(abs(mine), abs(theirs)) if is_near else math.inf
        return Distance(apart / _OF_NUMBERS, where, what)
    is_equal = own is other and type(mine) is type(theirs) and mine == theirs
    return Distance() if is_equal else Distance(math.inf, where, what)


def _tensor(value: Any) -> Entry | None:
    return next(iter(flatten(value)[1].values()), None)


def _of_tensors(mine: Entry, theirs: Entry, where: str, num_steps: int) -> Distance:
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return Distance(math.inf, where, "of another dtype or shape")
    if np.array_equal(mine.data, theirs.data):
        return Distance()
    dtype: Any = ml_dtypes.bfloat16 if mine.dtype == "bfloat16" else np.dtype(mine.dtype)
    if not (mine.dtype == "bfloat16" or np.issubdtype(dtype, np.inexact)):
        return Distance(math.inf, where, f"unequal, and of dtype {mine.dtype}")
    number: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    apart, largest = _largest(mine.data.view(dtype), theirs.data.view(dtype))
    if not apart < math.inf:
        return Distance(math.inf, where, "NaN or inf in one of them")
    explained = min(MOST, ROUNDINGS * float(number.eps) * math.sqrt(max(1, num_steps)))
    allowed = explained * largest + float(number.smallest_normal)
    what = f"{apart:.1e} apart, where the largest value is {largest:.1e}"
    return Distance(apart / allowed, where, what)


def _largest(mine: NDArray[Any], theirs: NDArray[Any]) -> tuple[float, float]:
    """The largest difference, inf where only one of them is finite, and the largest finite
    value."""
    apart = largest = 0.0
    for start in range(0, mine.size, _CHUNK):
        one, other = (_wide(each[start : start + _CHUNK]) for each in (mine, theirs))
        with np.errstate(invalid="ignore"):
            same = (one == other) | (np.isnan(one) & np.isnan(other))
            between = np.where(same, 0.0, np.abs(one - other))
        apart = max(apart, float(np.nan_to_num(between, nan=math.inf, posinf=math.inf).max()))
        largest = max(largest, float(np.abs(other[np.isfinite(other)]).max(initial=0.0)))
    return apart, largest


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


_IGNORED_BITS = 24
"""Mantissa bits of a float64, of 52, that ``tolerant_hash`` ignores: ``1 + cos(x)`` near its zero,
the end of a schedule, loses about as many."""
_HALF = 24
"""Bits of each of the two hashes."""


def tolerant_hash(value: Any) -> int:
    """A hash, below 2**48, of a nesting of dict, list and tuple over numbers, tensors and texts,
    for ``nearly_equal``.

    Floats are rounded on two grids, one half a cell beside the other: two floats that are close to
    each other, but on two sides of a border of the first grid, are in one cell of the second.
    """
    halves = []
    for offset in (0, 1 << (_IGNORED_BITS - 1)):
        text = repr(_rounded(value, offset)).encode()
        halves.append(int.from_bytes(hashlib.sha256(text).digest()[: _HALF // 8], "little"))
    return halves[0] << _HALF | halves[1]


def nearly_equal(one: int, other: int) -> bool:
    """Whether two results of ``tolerant_hash`` are of nearly equal values.

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
        return (bits + offset) >> _IGNORED_BITS
    return value
