"""A compressed gradient: bytes, and what is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck._core.codecs.codec import Bytes
from potluck.compressors.strategy import Strategy
from potluck.compressors.wide import cast


@dataclass(frozen=True, eq=False)
class Compressed:
    """An array that ``strategy`` has compressed into ``payload``, a flat uint8 array.

    ``shape`` and ``dtype`` are the array's, ``step`` is the number of the call. ``num_nonfinite``
    is how many elements of the array were inf or NaN, or beyond the range of the strategy.
    """

    strategy: Strategy
    payload: Bytes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    step: int = 0
    num_nonfinite: int = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes of the payload."""
        return self.payload.nbytes

    @property
    def ratio(self) -> float:
        """How many times more bytes the array has; infinity for an empty array."""
        whole = int(np.prod(self.shape)) * self.dtype.itemsize
        return whole / self.nbytes if self.nbytes else float("inf")

    def decompress(self) -> NDArray[Any]:
        """The array that the payload stands for, of the original shape and dtype."""
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = self.strategy.decompress(self.payload, self.shape, self.step)
            return cast(decoded, self.dtype)
