"""The codec ``int8``: blocks of 256 values with one scale each, in 1/4 + 1/256 of float32's bytes.

The encoded form of n values, with b = ceil(n / 256) blocks:

==============  ============================================================
4 * b bytes     one little-endian float32 scale per block
n bytes         one signed code per value, -127 to 127
==============  ============================================================

A value is ``code * scale``. For a block whose largest magnitude is m, all in float32: ``scale = m /
127`` and ``code = round(x * (127 / m))``, ties to even. Two kinds of blocks are special. Below m =
2^-100 all codes and the scale are zero. If a value is not finite, the scale is NaN and the codes
are zero, so that the whole block decodes to NaN and an overflow stays visible. (Symmetric
block-wise quantization, as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
2021, with a linear code.)
"""

from __future__ import annotations

import numpy as np

from potluck.codecs.codec import Bytes, Codec, Floats

BLOCK = 256
_LEVELS = np.float32(127)
_TINY = np.float32(2.0**-100)


class Int8(Codec):
    """Linear symmetric quantization with one float32 scale for 256 values."""

    name = "int8"
    code = 3

    def encoded_bytes(self, count: int) -> int:
        return count + 4 * _num_blocks(count)

    def encode(self, encoded: Bytes, source: Floats) -> None:
        count = source.shape[0]
        scales, codes = _split(encoded, count)
        blocks = np.zeros((_num_blocks(count), BLOCK), np.float32)
        blocks.reshape(-1)[:count] = source
        with np.errstate(all="ignore"):
            largest = np.abs(blocks).max(axis=1, initial=0)
            is_finite = np.isfinite(largest)
            is_plain = is_finite & (largest >= _TINY)
            inverse = np.where(is_plain, _LEVELS / largest, np.float32(0))
            scales[:] = np.where(
                is_plain, largest / _LEVELS, np.where(is_finite, np.float32(0), np.float32(np.nan))
            )
            blocks[~is_plain] = 0
            codes[:] = np.rint(blocks * inverse[:, None]).astype(np.int8).reshape(-1)[:count]

    def decode(self, target: Floats, encoded: Bytes) -> None:
        count = target.shape[0]
        scales, codes = _split(encoded, count)
        whole = count // BLOCK * BLOCK
        with np.errstate(over="ignore", invalid="ignore"):
            target[:whole].reshape(-1, BLOCK)[:] = codes[:whole].reshape(-1, BLOCK)
            target[:whole].reshape(-1, BLOCK)[:] *= scales[: whole // BLOCK, None]
            if whole < count:
                target[whole:] = codes[whole:].astype(np.float32) * scales[-1]

    def error_bound(self, largest: float) -> float:
        return max(largest / 127 * 0.5001, 2.0**-100)


def _num_blocks(count: int) -> int:
    return -(-count // BLOCK)


def _split(encoded: Bytes, count: int) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.int8]]]:
    """The scales and the codes as views of ``encoded``."""
    at = 4 * _num_blocks(count)
    return encoded[:at].view("<f4"), encoded[at:].view(np.int8)
