"""The arithmetic of PowerSGD whose results must be equal on all machines.

Ranks have the same sums P and Q, and each computes an orthonormal basis and the product P Q^T of
them by itself. A matrix library's sums differ in their last bits between processors. So these
functions use only operations that IEEE 754 defines exactly, in a fixed order, and no fused
multiply-add.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck._core import native
from potluck._core.wire.dtypes import code_of

Matrix = NDArray[Any]
"""Two dimensions, float32 or float64."""

_LANES = 128
_BLOCK = 1 << 15
"""Elements of one piece of a product: two such pieces fit into the L2 cache."""
_NOTHING_LEFT = 2.0**-40
"""Below this share of its squared length, what is left of a float32 column is rounding."""


def uniform(rows: int, columns: int, seed: int, name: str, step: int) -> NDArray[np.float64]:
    """Random numbers between -1 and 1, the same on all machines; other ones for each name and
    step."""
    words = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    stream = np.random.PCG64(np.random.SeedSequence([seed, words, step]))
    raw = stream.random_raw(rows * columns).astype(np.uint64) >> np.uint64(11)
    return (raw.astype(np.float64) * 2.0**-52 - 1).reshape(rows, columns)


def orthonormal(matrix: Matrix) -> NDArray[np.float64]:
    """The columns made orthonormal from left to right; zero where a column depends on those before.

    Gram-Schmidt in float64, each column twice ("twice is enough": Giraud et al., 2005). NaN and
    inf stay visible.
    """
    rows, rank = matrix.shape
    columns = np.zeros((rank, -(-rows // _LANES) * _LANES))
    columns[:, :rows] = matrix.T
    with np.errstate(over="ignore", invalid="ignore"):
        for index, column in enumerate(columns):
            before = float(_sums(column[None] * column)[0])
            for _ in range(2 if index else 0):
                done = columns[:index]
                for share, other in zip(_sums(done * column), done, strict=True):
                    column -= share * other
            left = float(_sums(column[None] * column)[0])
            if left <= before * _NOTHING_LEFT or left < 2.0**-1000:
                column[:] = 0
            else:
                column /= math.sqrt(left)
    return np.ascontiguousarray(columns[:, :rows].T)


def product_into(target: Matrix, left: Matrix, right: Matrix) -> None:
    """target = left right^T, for matrices of few columns, n x r and m x r, of one dtype."""
    across = np.ascontiguousarray(right.T)
    if not (native.available and target.flags.c_contiguous):
        return product_in_python(target, left, across)
    down = np.ascontiguousarray(left)
    native.core.multiply(code_of(target.dtype), target, down, across, left.shape[1])


def product_in_python(target: Matrix, left: Matrix, across: Matrix) -> None:
    """The twin of the native kernel, target = left across."""
    rows = max(1, _BLOCK // max(1, target.shape[1]))
    part = np.empty((rows, target.shape[1]), target.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, target.shape[0], rows):
            block = target[begin : begin + rows]
            down, scratch = left[begin : begin + rows], part[: len(block)]
            np.multiply(down[:, :1], across[0], out=block)
            for index in range(1, left.shape[1]):
                np.multiply(down[:, index : index + 1], across[index], out=scratch)
                block += scratch


def _sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of each row, of a multiple of 128 elements, in an order that is always the same."""
    lanes = np.add.reduce(rows.reshape(len(rows), -1, _LANES), axis=1)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums: NDArray[np.float64] = lanes[:, 0]
    return sums
