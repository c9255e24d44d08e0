"""The compressors ``FP16``, ``BF16`` and ``Quantize``: every element in fewer bits, by a codec."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from potluck._core.codecs import Codec, codec_of, kernels
from potluck._core.codecs.codec import Bytes, Floats
from potluck.compressors import options
from potluck.compressors.base import Array, Collectives, Compressor, Cost, Pending, Shape


class Encoded(Compressor):
    """A compressor that is a codec. On links the codec works inside the reduction."""

    encodes_first = False

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """The codec, whose docstring describes the format."""

    @property
    def limit(self) -> float:
        return self.codec.limit

    @property
    def largest(self) -> float:
        return self.codec.largest

    def sum_dtype(self, *, is_double: bool) -> np.dtype[Any]:
        return np.dtype(np.float32)  # what codecs encode

    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        payload, _ = self.compress_counted(source, residual, step, _new_memory)
        return payload

    def compress_counted(
        self, source: Floats, residual: Floats | None, step: int, memory: Callable[[int], Bytes]
    ) -> tuple[Bytes, int]:
        payload, flat = memory(self.codec.encoded_bytes(source.size)), source.reshape(-1)
        if residual is None:
            return payload, kernels.encode(self.codec, payload, flat)
        kept = residual.reshape(-1)
        return payload, kernels.encode_with_residual(self.codec, payload, kept, flat)

    def decompress(self, payload: Bytes, shape: Shape, step: int) -> Floats:
        target = np.empty(shape, np.float32)
        kernels.decode(self.codec, target.reshape(-1), payload)
        return target

    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        return bool(np.isfinite(source).all())

    def exchange(
        self, comm: Collectives, array: Array, residual: Array | None, step: int
    ) -> Pending:
        """Cost: one all_reduce of encoded bytes."""
        return comm.all_reduce_encoded(array, self, residual)

    def cost(self, shapes: Sequence[Shape]) -> Cost:
        # A residual is copied, too, so that it can be taken back.
        count = sum(map(math.prod, shapes))
        return Cost(encoded_bytes=self.codec.encoded_bytes(count), passes=2)

    def _take(self, target: Floats, payload: Bytes) -> None:
        self.decompress(payload, target.shape, 0)


def _new_memory(num_bytes: int) -> Bytes:
    return np.empty(num_bytes, np.uint8)


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
class Quantize(Encoded):
    """Integers of 8, 4 or 2 bits with one float32 scale for 256 elements.

    3.94, 7.76 and 15.1 times fewer bytes than float32. ValueError for other ``bits``, TypeError for
    what is no int.
    """

    bits: Literal[8, 4, 2] = 8

    def __post_init__(self) -> None:
        options.put(self, bits=options.integer("Quantize", "bits", self.bits))
        if self.bits not in (8, 4, 2):
            raise ValueError(f"Quantize(bits={self.bits}): bits must be 8, 4 or 2")

    @property
    def codec(self) -> Codec:
        return codec_of(f"int{self.bits}")


def of_codec(name: str) -> Encoded | None:
    """The compressor that sends gradients by the codec ``name`` of an all_reduce, such as
    ``Quantize(8)`` for ``"int8"``; None for another name."""
    own = (FP16(), BF16(), Quantize(8), Quantize(4), Quantize(2))
    return next((each for each in own if each.codec.name == name.lower()), None)


def checked(value: object, said: str, also: str = "") -> Compressor:
    """``value``, if it is a compressor; else TypeError: ``said``, such as "compression is 3", and
    what it must be. ``also``: what else it may be."""
    if isinstance(value, Compressor):
        return value
    meant = of_codec(value) if isinstance(value, str) else None
    hint = "" if meant is None else f"; the codec {value!r} is {meant!r} here"
    raise TypeError(f"{said}; it must be one such as TopK(0.01) or Quantize(bits=8){also}{hint}")
