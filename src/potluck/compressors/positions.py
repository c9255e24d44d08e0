"""Ascending positions in few bytes of a fixed number: the gaps between them, delta-coded.

A gap is the number of elements left out before a position. In a code of w bytes with the largest
number M = 2^(8 w) - 1, a word below M is a gap that ends at a position; the word M leaves out M
elements and names none. k positions among n take at most k + n // M words, and the rest is filled
with M: so the size depends on n and k only. w is 1 or 2, whichever gives fewer bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck._core.codecs.codec import Bytes

Positions = NDArray[np.uint32]


def num_bytes(count: int, num: int) -> int:
    """The size of ``num`` positions among ``count`` elements."""
    width = _width(count, num)
    return width * _num_words(count, num, width)


def pack(positions: Positions, count: int) -> Bytes:
    """The code of ascending ``positions`` below ``count``."""
    width = _width(count, positions.size)
    most = (1 << 8 * width) - 1
    words = np.full(_num_words(count, positions.size, width), most, f"<u{width}")
    if positions.size:
        gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
        skipped, rest = np.divmod(gaps, most)
        words[np.cumsum(skipped + 1) - 1] = rest
    packed: Bytes = words.view(np.uint8)
    return packed


def unpack(packed: Bytes, count: int, num: int) -> Positions:
    """The positions. ValueError for bytes that are not the code of ``num`` below ``count``."""
    width = _width(count, num)
    words = packed.view(f"<u{width}")
    is_position = words != (1 << 8 * width) - 1
    positions = np.cumsum(words + is_position.astype(np.int64))[is_position] - 1
    if positions.size != num or (num and int(positions[-1]) >= count):
        raise ValueError(
            f"{packed.size} bytes are not the code of {num} positions among {count} elements"
        )
    found: Positions = positions.astype(np.uint32)
    return found


def _width(count: int, num: int) -> int:
    return min((1, 2), key=lambda width: width * _num_words(count, num, width))


def _num_words(count: int, num: int, width: int) -> int:
    return num + count // ((1 << 8 * width) - 1)
