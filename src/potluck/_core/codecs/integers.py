"""The codecs ``int8``, ``int4`` and ``int2``: blocks of 256 values with one scale each.

The encoded form of n values, with b = ceil(n / 256) blocks:

======================  ========================================================
4 * b bytes             one little-endian float32 scale per block
ceil(n * bits / 8)      one signed code per value: -127 to 127, -7 to 7, -1 to 1
======================  ========================================================

A value is ``code * scale``. For a block whose largest magnitude is m, with L the largest code, all
in float32: ``scale = m / L`` (the number below it where ``scale * L`` would be infinite) and
``code = round(x * (L / m))``, ties to even. Two kinds of blocks are special. Below m = 2^-100 all
codes and the scale are zero. If a value is inf or NaN, the scale is NaN and the codes are zero, so
that the whole block decodes to NaN.
(Symmetric block-wise quantization, as in Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2021, with a linear code.)

Zero is a code, and a code is the nearest one, so that no value's error exceeds the value: what
error feedback keeps can't grow. With four levels but no zero it could (one large value among 255
zeros).

Codes of less than a byte are packed block by block. Byte i of a block holds, from its low bits on,
the codes i, i + s, i + 2 s, ..., where s is the number of bytes of the block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck._core.codecs.codec import Bytes, Codec, Floats

BLOCK = 256
_TINY = np.float32(2.0**-100)

Codes = NDArray[np.int8]


class Int(Codec):
    """Linear symmetric quantization to ``bits`` with one float32 scale for 256 values."""

    def __init__(self, bits: int, code: int) -> None:
        self.name = f"int{bits}"
        self.code = code
        self._bits = bits
        self._levels = np.float32((1 << (bits - 1)) - 1)

    def encoded_bytes(self, count: int) -> int:
        return 4 * _num_blocks(count) + -(-count * self._bits // 8)

    def encode(self, encoded: Bytes, source: Floats) -> None:
        count = source.shape[0]
        at = 4 * _num_blocks(count)
        blocks = np.zeros((_num_blocks(count), BLOCK), np.float32)
        blocks.reshape(-1)[:count] = source
        with np.errstate(all="ignore"):
            largest = np.abs(blocks).max(axis=1, initial=0)
            is_finite = np.isfinite(largest)
            is_plain = is_finite & (largest >= _TINY)
            inverse = np.where(is_plain, self._levels / largest, np.float32(0))
            scales = largest / self._levels
            scales = np.where(np.isinf(scales * self._levels), np.nextafter(scales, 0), scales)
            encoded[:at].view("<f4")[:] = np.where(
                is_plain,
                scales,
                np.where(is_finite, np.float32(0), np.float32(np.nan)),
            )
            blocks[~is_plain] = 0
            codes = np.rint(blocks * inverse[:, None]).astype(np.int8).reshape(-1)[:count]
        whole = count // BLOCK * BLOCK
        middle = at + whole * self._bits // 8
        _pack(encoded[at:middle].reshape(-1, BLOCK * self._bits // 8), codes[:whole], self._bits)
        _pack(encoded[None, middle:], codes[whole:], self._bits)

    def decode(self, target: Floats, encoded: Bytes) -> None:
        count = target.shape[0]
        at = 4 * _num_blocks(count)
        scales = encoded[:at].view("<f4")
        whole = count // BLOCK * BLOCK
        middle = at + whole * self._bits // 8
        packed = encoded[at:middle].reshape(-1, BLOCK * self._bits // 8)
        with np.errstate(over="ignore", invalid="ignore"):
            blocks = target[:whole].reshape(-1, BLOCK)
            blocks[:] = _unpack(packed, self._bits)
            blocks *= scales[: whole // BLOCK, None]
            if whole < count:
                codes = _unpack(encoded[None, middle:], self._bits).reshape(-1)[: count - whole]
                target[whole:] = codes.astype(np.float32) * scales[-1]

    def error_bound(self, largest: float) -> float:
        return max(largest / float(self._levels) * 0.5001, 2.0**-100)


def _num_blocks(count: int) -> int:
    return -(-count // BLOCK)


def _pack(packed: Bytes, codes: Codes, bits: int) -> None:
    """Pack a row of ``packed`` for each block of equal length in ``codes``."""
    num_rows, size = packed.shape
    if not codes.size:
        return
    padded = np.zeros((num_rows, 8 // bits, size), np.uint8)
    length = codes.size // num_rows
    padded.reshape(num_rows, 8 // bits * size)[:, :length] = codes.view(np.uint8).reshape(
        num_rows, length
    )
    packed[:] = 0
    for row in range(8 // bits):
        packed |= (padded[:, row] & np.uint8((1 << bits) - 1)) << np.uint8(row * bits)


def _unpack(packed: Bytes, bits: int) -> Codes:
    """A row of codes for each row of ``packed``."""
    num_rows, size = packed.shape
    sign = np.int8(1 << (bits - 1)) if bits < 8 else np.int8(0)
    codes = np.empty((num_rows, 8 // bits, size), np.int8)
    for row in range(8 // bits):
        part = packed >> np.uint8(row * bits) & np.uint8((1 << bits) - 1)
        codes[:, row] = (part.view(np.int8) ^ sign) - sign
    return codes.reshape(num_rows, 8 // bits * size)
