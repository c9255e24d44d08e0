"""The strategies ``FP16``, ``BF16`` and ``Int``: every element in fewer bits, by a codec."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from potluck.codecs import Codec, codec_of, kernels
from potluck.codecs.codec import Bytes, Floats
from potluck.compressors.strategy import Shape, Strategy


class Encoded(Strategy):
    """A strategy that is a codec. On links the codec works inside the reduction."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """The codec, whose docstring describes the format."""

    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        payload, flat = (
            np.empty(self.codec.encoded_bytes(source.size), np.uint8),
            source.reshape(-1),
        )
        if residual is None:
            kernels.encode(self.codec, payload, flat)
        else:
            kernels.encode_with_residual(self.codec, payload, residual.reshape(-1), flat)
        return payload

    def decompress(self, payload: Bytes, shape: Shape, step: int) -> Floats:
        target = np.empty(shape, np.float32)
        kernels.decode(self.codec, target.reshape(-1), payload)
        return target


class _Half(Encoded):
    """A strategy of two bytes an element; ``_exponent`` are the bits that are set in inf and NaN
    only."""

    _exponent: np.uint16

    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        words, exponent = payload.view("<u2"), int(self._exponent)
        # As signed integers positive values have their order, as unsigned ones negative values. In
        # pieces, which the second look finds in the cache.
        pieces = (words[at : at + 65536] for at in range(0, words.size, 65536))
        return not any(
            int(piece.view("<i2").max()) >= exponent or int(piece.max()) >= 0x8000 + exponent
            for piece in pieces
        )


@dataclass(frozen=True)
class FP16(_Half):
    """IEEE half precision: 2 bytes an element, 11 significant bits.

    Values beyond 65504 become infinity, which is counted and reported.
    """

    _exponent = np.uint16(0x7C00)

    @property
    def codec(self) -> Codec:
        return codec_of("fp16")


@dataclass(frozen=True)
class BF16(_Half):
    """bfloat16: 2 bytes an element, 8 significant bits, the range of float32."""

    _exponent = np.uint16(0x7F80)

    @property
    def codec(self) -> Codec:
        return codec_of("bf16")


@dataclass(frozen=True)
class Int(Encoded):
    """Integers of 8, 4 or 2 bits with one float32 scale for 256 elements.

    3.94, 7.76 and 15.1 times fewer bytes than float32. ValueError for other ``bits``.
    """

    bits: Literal[8, 4, 2] = 8

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise ValueError(f"Int(bits={self.bits}): bits must be 8, 4 or 2")

    @property
    def codec(self) -> Codec:
        return codec_of(f"int{self.bits}")

    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        # A block with such a value has the scale NaN.
        scales = payload[: 4 * -(-source.size // 256)].view("<f4")
        return bool(np.isfinite(scales).all())
