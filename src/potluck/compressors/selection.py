"""The k values of largest magnitude in each chunk, exactly: the twin of ``select.cpp``, and the
choice between the two.

Magnitudes are compared as integers, the bits of float32 without the sign. These have the order of
the values, with NaN above infinity. Of equal magnitudes the first are taken.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from potluck._core import native
from potluck._core.codecs.codec import Floats
from potluck.compressors.positions import Positions


class Sizes(NamedTuple):
    """How many values are selected: ``k`` of each chunk of ``chunk``, ``last_k`` of a shorter last
    one."""

    chunk: int
    k: int
    last_k: int

    def total(self, count: int) -> int:
        """The number of values selected from ``count``."""
        return count // self.chunk * self.k + self.last_k


def select(source: Floats, residual: Floats | None, sizes: Sizes) -> tuple[Positions, Floats]:
    """The positions, ascending, and the values of the largest of ``source``, or with a residual of
    ``source + residual``, which the residual then holds."""
    if not native.available:
        return select_in_python(source, residual, sizes)
    positions = np.empty(sizes.total(source.size), np.uint32)
    values = np.empty(positions.size, np.float32)
    native.core.select_largest(positions, values, source, residual, *sizes)
    return positions, values


def select_in_python(
    source: Floats, residual: Floats | None, sizes: Sizes
) -> tuple[Positions, Floats]:
    """The twin of the native kernel."""
    if residual is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            residual += source
        source = residual
    magnitudes = source.view(np.uint32) & np.uint32(0x7FFFFFFF)
    whole = source.size // sizes.chunk * sizes.chunk
    parts = [_largest(magnitudes[:whole].reshape(-1, sizes.chunk), sizes.k)]
    parts.append(_largest(magnitudes[None, whole:], sizes.last_k))
    positions = np.flatnonzero(np.concatenate(parts)).astype(np.uint32)
    return positions, source[positions]


def _largest(rows: Positions, k: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """A flat mask of the ``k`` largest of each row."""
    if not rows.size:
        return np.zeros(0, np.bool_)
    least = np.partition(rows, -k, axis=1)[:, -k, None]
    is_equal = rows == least
    num_equal = k - (rows > least).sum(axis=1, keepdims=True)
    taken = (rows > least) | (is_equal & (is_equal.cumsum(axis=1) <= num_equal))
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = taken.reshape(-1)
    return mask
