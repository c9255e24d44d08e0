"""The compressor ``TopK``: only the elements of largest magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck._core import native
from potluck._core.codecs import codec_of, kernels
from potluck._core.codecs.codec import Bytes, Floats
from potluck.compressors import options
from potluck.compressors.base import Compressor, Cost, Shape

Positions = NDArray[np.uint32]


class Sizes(NamedTuple):
    """How many values are selected: ``k`` of each chunk of ``chunk``, ``last_k`` of a shorter last
    one."""

    chunk: int
    k: int
    last_k: int

    def total(self, count: int) -> int:
        """The number of values selected from ``count``."""
        return count // self.chunk * self.k + self.last_k


@dataclass(frozen=True)
class TopK(Compressor):
    """The ``ratio`` of elements with the largest magnitude, as positions and values.

    With ``chunk`` the largest of each chunk of so many elements are taken: a selection that stays
    in the cache, several times faster than that over the whole array (``chunk=None``, exact), and
    that no layer with large gradients has to itself. At least one element of each chunk is taken.
    ``bits`` sends the values as integers of 8, 4 or 2 bits, as ``Quantize`` does.

    The payload: the positions (``pack_positions``), then the values. Its size depends on the number
    of elements only. Ranks select unlike elements, so payloads can't be summed: they are gathered.
    (Lin et al., "Deep Gradient Compression", 2018; chunk by chunk: Sarfi et al., "Communication
    Efficient LLM Pre-training with SparseLoCo", 2025.)

    ValueError unless 0 < ``ratio`` <= 1, ``chunk`` is positive, and ``bits`` is 8, 4, 2 or None;
    TypeError for options that are no numbers.
    """

    ratio: float
    chunk: int | None = 4096
    bits: Literal[8, 4, 2] | None = None

    def __post_init__(self) -> None:
        options.put(self, ratio=options.ratio("TopK", self.ratio))
        if self.chunk is not None:
            options.put(self, chunk=options.integer("TopK", "chunk", self.chunk))
            if self.chunk < 1:
                raise ValueError(
                    f"TopK(chunk={self.chunk}): chunk is a positive number of elements, or None"
                )
        if self.bits is not None:
            options.put(self, bits=options.integer("TopK", "bits", self.bits))
            if self.bits not in (8, 4, 2):
                raise ValueError(f"TopK(bits={self.bits}): bits must be 8, 4, 2 or None")

    def sizes(self, count: int) -> Sizes:
        """How many of ``count`` elements are taken, chunk by chunk."""
        chunk = max(1, min(self.chunk or count, count))
        return Sizes(chunk, self._num(chunk), self._num(count % chunk))

    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        lost = None if residual is None else residual.reshape(-1)
        places, values = select(source.reshape(-1), lost, self.sizes(source.size))
        at = positions_bytes(source.size, places.size)
        payload = np.empty(at + self._value_bytes(places.size), np.uint8)
        payload[:at] = pack_positions(places, source.size)
        if self.bits is None:
            payload[at:] = values.view(np.uint8)
        else:
            kernels.encode(codec_of(f"int{self.bits}"), payload[at:], values)
        if lost is not None:
            with np.errstate(invalid="ignore"):
                lost[places] -= self._values(payload[at:], places.size)
            if not np.isfinite(values).all():
                lost[~np.isfinite(lost)] = 0
        return payload

    def decompress(self, payload: Bytes, shape: Shape, step: int) -> Floats:
        target = np.zeros(shape, np.float32)
        self.add_to(target, payload, step)
        return target

    def add_to(self, target: Floats, payload: Bytes, step: int) -> None:
        places, values = self._split(payload, target.size)
        target.reshape(-1)[places] += values

    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        # NaN and inf are the largest, so they are among the values.
        num = self.sizes(source.size).total(source.size)
        at = positions_bytes(source.size, num)
        return bool(np.isfinite(self._values(payload[at:], num)).all())

    def cost(self, shapes: Sequence[Shape]) -> Cost:
        return Cost(gathered_bytes=self.payload_bytes(sum(map(math.prod, shapes))))

    def payload_bytes(self, count: int) -> int:
        """The size of the payload of ``count`` elements."""
        num = self.sizes(count).total(count)
        return positions_bytes(count, num) + self._value_bytes(num)

    def _num(self, count: int) -> int:
        return min(count, max(1, round(self.ratio * count)))

    def _value_bytes(self, num: int) -> int:
        return 4 * num if self.bits is None else codec_of(f"int{self.bits}").encoded_bytes(num)

    def _split(self, payload: Bytes, count: int) -> tuple[Positions, Floats]:
        num = self.sizes(count).total(count)
        at = positions_bytes(count, num)
        return unpack_positions(payload[:at], count, num), self._values(payload[at:], num)

    def _values(self, encoded: Bytes, num: int) -> Floats:
        values = np.empty(num, np.float32)
        if self.bits is None:
            values.view(np.uint8)[:] = encoded
        else:
            kernels.decode(codec_of(f"int{self.bits}"), values, encoded)
        return values


def select(source: Floats, residual: Floats | None, sizes: Sizes) -> tuple[Positions, Floats]:
    """The positions, ascending, and the values of the largest of ``source``, or with a residual of
    ``source + residual``, which the residual then holds.

    Magnitudes are compared as integers, the bits of float32 without the sign. These have the order
    of the values, with NaN above infinity. Of equal magnitudes the first are taken.
    """
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


def positions_bytes(count: int, num: int) -> int:
    """The size of ``num`` ascending positions among ``count`` elements.

    They are coded by the gaps between them: a gap is the number of elements left out before a
    position. In a code of w bytes with the largest number M = 2^(8 w) - 1, a word below M is a gap
    that ends at a position; the word M leaves out M elements and names none. k positions among n
    take at most k + n // M words, and the rest is filled with M: so the size depends on n and k
    only. w is 1 or 2, whichever gives fewer bytes.
    """
    width = _width(count, num)
    return width * _num_words(count, num, width)


def pack_positions(positions: Positions, count: int) -> Bytes:
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


def unpack_positions(packed: Bytes, count: int, num: int) -> Positions:
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
