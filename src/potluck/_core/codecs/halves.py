"""The codecs ``fp16`` and ``bf16``: each value is rounded to the nearest 16-bit float, ties to
even.

``fp16`` keeps 11 significant bits of values up to 65504, which stands for larger ones, and below
2^-14 the resolution is 2^-24. ``bf16`` keeps 8 significant bits over the whole range of float32. An
element has two little-endian bytes, half of float32's.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from potluck._core.codecs.codec import Bytes, Codec, Floats


class Fp16(Codec):
    """IEEE 754 binary16."""

    name = "fp16"
    code = 1
    keeps_range = False
    limit = 65520.0
    largest = 65504.0

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, encoded: Bytes, source: Floats) -> None:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            encoded.view("<f2")[:] = self.saturated(source)

    def decode(self, target: Floats, encoded: Bytes) -> None:
        with np.errstate(invalid="ignore"):
            target[:] = encoded.view("<f2")

    def error_bound(self, largest: float) -> float:
        return max(largest * 2.0**-11, 2.0**-25)


class Bf16(Codec):
    """bfloat16: the upper half of float32."""

    name = "bf16"
    code = 2
    limit = float.fromhex("0x1.FFp127")
    largest = float.fromhex("0x1.FEp127")

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, encoded: Bytes, source: Floats) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            encoded.view(ml_dtypes.bfloat16)[:] = self.saturated(source)

    def decode(self, target: Floats, encoded: Bytes) -> None:
        target[:] = encoded.view(ml_dtypes.bfloat16)

    def error_bound(self, largest: float) -> float:
        return max(largest * 2.0**-8, 2.0**-134)
