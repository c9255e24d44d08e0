"""What a codec is: an element-wise encoding of float32 on the wire.

Encoded bytes have no header: their size follows from the number of elements and both ends know the
codec from the call. Memory is always contiguous. Encodings are the same on every machine, bit by
bit (except which NaN a NaN is), so a segment may be encoded by one engine and decoded by another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Codec(ABC):
    """One encoding. Stateless: what error feedback keeps lies outside."""

    name: str
    """As callers write it: ``codec="int8"``."""
    code: int
    """As the native core numbers it."""

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Bytes that ``count`` elements take."""

    @abstractmethod
    def encode(self, encoded: Bytes, source: Floats) -> None:
        """Fill ``encoded`` (of exactly ``encoded_bytes``) with what stands for ``source``."""

    @abstractmethod
    def decode(self, target: Floats, encoded: Bytes) -> None:
        """Fill ``target`` with what ``encoded`` stands for."""

    def decode_accumulate(self, target: Floats, encoded: Bytes) -> None:
        """Add what ``encoded`` stands for to ``target``, in float32."""
        decoded = np.empty_like(target)
        self.decode(decoded, encoded)
        np.add(target, decoded, out=target)

    @abstractmethod
    def error_bound(self, largest: float) -> float:
        """How far off a decoded value may be when no magnitude in its block exceeds ``largest``.

        Holds up to the largest magnitude that the codec holds (fp16: 65504; bf16 and int8: a hair
        below float32's own); what is not finite decodes to something that is not finite.
        """

    def __str__(self) -> str:
        return self.name


def check_dtype(codec: Codec, dtype: np.dtype[Any]) -> None:
    """TypeError unless ``dtype`` is what codecs encode."""
    if dtype != np.float32:
        raise TypeError(
            f"codec={codec.name!r} encodes float32 arrays, not {dtype}; "
            "convert the array or leave the codec out"
        )
