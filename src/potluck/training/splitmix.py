"""A hash of 64-bit numbers, for random numbers that are a function of a position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def hashed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64, element by element (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", figure 18). A permutation of all uint64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""What SplitMix64 adds to its state for each number: 2**64 over the golden ratio."""
