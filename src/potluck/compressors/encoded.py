"""The compressors ``FP16``, ``BF16`` and ``Int``: every element in fewer bits, by a codec."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from potluck._core.codecs import Codec, codec_of, kernels
from potluck._core.codecs.codec import Bytes, Floats
from potluck.compressors import options
from potluck.compressors.base import Compressor, Shape


class Encoded(Compressor):
    """A compressor that is a codec. On links the codec works inside the reduction."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """The codec, whose docstring describes the format."""

    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        payload = np.empty(self.codec.encoded_bytes(source.size), np.uint8)
        self.compress_into(payload, source, residual)
        return payload

    def compress_into(self, payload: Bytes, source: Floats, residual: Floats | None) -> int:
        """``compress`` into memory of the right size. Returns how many elements are beyond the
        codec's range, with those that are inf or NaN."""
        flat = source.reshape(-1)
        if residual is None:
            return kernels.encode(self.codec, payload, flat)
        return kernels.encode_with_residual(self.codec, payload, residual.reshape(-1), flat)

    def decompress(self, payload: Bytes, shape: Shape, step: int) -> Floats:
        target = np.empty(shape, np.float32)
        kernels.decode(self.codec, target.reshape(-1), payload)
        return target

    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        return bool(np.isfinite(source).all())


@dataclass(frozen=True)
class FP16(Encoded):
    """IEEE half precision: 2 bytes an element, 11 significant bits.

    65504 stands for values beyond it, which are counted and reported.
    """

    @property
    def codec(self) -> Codec:
        return codec_of("fp16")


@dataclass(frozen=True)
class BF16(Encoded):
    """bfloat16: 2 bytes an element, 8 significant bits, the range of float32."""

    @property
    def codec(self) -> Codec:
        return codec_of("bf16")


@dataclass(frozen=True)
class Int(Encoded):
    """Integers of 8, 4 or 2 bits with one float32 scale for 256 elements.

    3.94, 7.76 and 15.1 times fewer bytes than float32. ValueError for other ``bits``, TypeError for
    what is no int.
    """

    bits: Literal[8, 4, 2] = 8

    def __post_init__(self) -> None:
        options.put(self, bits=options.integer("Int", "bits", self.bits))
        if self.bits not in (8, 4, 2):
            raise ValueError(f"Int(bits={self.bits}): bits must be 8, 4 or 2")

    @property
    def codec(self) -> Codec:
        return codec_of(f"int{self.bits}")
