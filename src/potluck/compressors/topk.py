"""The strategy ``TopK``: only the elements of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from potluck._core.codecs import codec_of, kernels
from potluck._core.codecs.codec import Bytes, Floats
from potluck.compressors import options
from potluck.compressors import positions as coded_positions
from potluck.compressors.selection import Sizes, select
from potluck.compressors.strategy import Shape, Strategy


@dataclass(frozen=True)
class TopK(Strategy):
    """The ``ratio`` of elements with the largest magnitude, as positions and values.

    With ``chunk`` the largest of each chunk of so many elements are taken: a selection that stays
    in the cache, several times faster than that over the whole array (``chunk=None``, exact), and
    that no layer with large gradients has to itself. At least one element of each chunk is taken.
    ``bits`` sends the values as integers of 8, 4 or 2 bits, as ``Int`` does.

    The payload: the positions (``positions.py``), then the values. Its size depends on the number
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
        at = coded_positions.num_bytes(source.size, places.size)
        payload = np.empty(at + self._value_bytes(places.size), np.uint8)
        payload[:at] = coded_positions.pack(places, source.size)
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
        at = coded_positions.num_bytes(source.size, num)
        return bool(np.isfinite(self._values(payload[at:], num)).all())

    def payload_bytes(self, count: int) -> int:
        """The size of the payload of ``count`` elements."""
        num = self.sizes(count).total(count)
        return coded_positions.num_bytes(count, num) + self._value_bytes(num)

    def _num(self, count: int) -> int:
        return min(count, max(1, round(self.ratio * count)))

    def _value_bytes(self, num: int) -> int:
        return 4 * num if self.bits is None else codec_of(f"int{self.bits}").encoded_bytes(num)

    def _split(self, payload: Bytes, count: int) -> tuple[coded_positions.Positions, Floats]:
        num = self.sizes(count).total(count)
        at = coded_positions.num_bytes(count, num)
        return coded_positions.unpack(payload[:at], count, num), self._values(payload[at:], num)

    def _values(self, encoded: Bytes, num: int) -> Floats:
        values = np.empty(num, np.float32)
        if self.bits is None:
            values.view(np.uint8)[:] = encoded
        else:
            kernels.decode(codec_of(f"int{self.bits}"), values, encoded)
        return values
