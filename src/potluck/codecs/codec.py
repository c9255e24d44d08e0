"""The interface of codecs: element-wise encodings of float32.

Encoded bytes have no header: their size follows from the number of elements, and both ranks know
the codec from the call. Arrays are contiguous. Encodings are bit-identical on all machines and
engines (except for the payload of NaN), so a segment may be encoded by one engine and decoded by
another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Codec(ABC):
    """An encoding. Stateless: the residual of error feedback belongs to the caller."""

    name: str
    """The value of the argument ``codec``."""
    code: int = 0
    """The codec's number in the native core; 0 for one of your own, which is not there."""
    keeps_range: bool = True
    """Whether it encodes small and large float32 alike."""

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """The number of bytes of ``count`` encoded elements."""

    @abstractmethod
    def encode(self, encoded: Bytes, source: Floats) -> None:
        """Encode ``source`` into ``encoded``, of exactly ``encoded_bytes`` bytes."""

    @abstractmethod
    def decode(self, target: Floats, encoded: Bytes) -> None:
        """Decode ``encoded`` into ``target``."""

    def decode_accumulate(self, target: Floats, encoded: Bytes) -> None:
        """Decode ``encoded`` and add it to ``target``, in float32."""
        decoded = np.empty_like(target)
        self.decode(decoded, encoded)
        np.add(target, decoded, out=target)

    def encode_with_residual(self, encoded: Bytes, residual: Floats, source: Floats) -> None:
        """Encode ``source + residual``; ``residual`` becomes what that loses (error feedback).

        It becomes zero where that is not finite (a gradient was inf or NaN, or beyond fp16's
        range): one bad step is visible in what is decoded, and not in all steps after it.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            sent = residual + source
            self.encode(encoded, sent)
            self.decode(residual, encoded)
            np.subtract(sent, residual, out=residual)
        residual[~np.isfinite(residual)] = 0

    def is_finite(self, encoded: Bytes, count: int) -> bool:
        """Whether no element of ``encoded`` decodes to inf or NaN."""
        decoded = np.empty(count, np.float32)
        self.decode(decoded, encoded)
        return bool(np.isfinite(decoded).all())

    @abstractmethod
    def error_bound(self, largest: float) -> float:
        """The largest error of a decoded value if no magnitude in its block exceeds ``largest``.

        Valid up to the largest magnitude of the codec (fp16: 65504; others: slightly below
        float32's). Values that are not finite decode to values that are not finite.
        """

    def __str__(self) -> str:
        return self.name


def check_dtype(codec: Codec, dtype: np.dtype[Any]) -> None:
    """TypeError unless ``dtype`` is float32."""
    if dtype != np.float32:
        raise TypeError(
            f"codec={codec.name!r} encodes float32 arrays, not {dtype}; "
            "convert the array or omit the codec"
        )
