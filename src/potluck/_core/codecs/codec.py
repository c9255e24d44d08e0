"""The interface of codecs: element-wise encodings of float32.

Encoded bytes have no header: their size follows from the number of elements, and both ranks know
the codec from the call. Arrays are contiguous. Encodings are bit-identical on all machines and
engines (except for the payload of NaN), so a segment may be encoded by one engine and decoded by
another.

Codecs saturate: a finite value, or a sum of finite values, beyond the codec's range becomes the
largest number of its sign, and is counted. What is inf or NaN is counted, too, and decodes to what
is not finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = float(np.finfo(np.float32).max)
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
    limit: float = LARGEST
    """The magnitude from which on elements count as beyond the range."""
    largest: float = LARGEST
    """What stands for finite elements beyond the range."""

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """The number of bytes of ``count`` encoded elements."""

    @abstractmethod
    def encode(self, encoded: Bytes, source: Floats) -> None:
        """Encode ``source`` into ``encoded``, of exactly ``encoded_bytes`` bytes. No finite element
        decodes to what is not finite."""

    @abstractmethod
    def decode(self, target: Floats, encoded: Bytes) -> None:
        """Decode ``encoded`` into ``target``."""

    def decode_accumulate(self, target: Floats, encoded: Bytes) -> None:
        """Decode ``encoded`` and add it to ``target``, in float32, saturating."""
        decoded = np.empty_like(target)
        self.decode(decoded, encoded)
        target[:] = saturating_sum(target, decoded)

    def encode_with_residual(self, encoded: Bytes, residual: Floats, source: Floats) -> int:
        """Encode ``source + residual``; ``residual`` becomes what that loses (error feedback).
        Returns how many elements are beyond the range.

        What is beyond the range is lost, and so is not in the residual; this is zero where an
        element was inf or NaN: one bad step is visible in what is decoded, and not in all steps
        after it.
        """
        total = saturating_sum(residual, source)
        num_beyond = self.num_beyond(total)
        with np.errstate(over="ignore", invalid="ignore"):
            sent = self.saturated(total)
            self.encode(encoded, sent)
            self.decode(residual, encoded)
            np.subtract(sent, residual, out=residual)
        residual[~np.isfinite(residual)] = 0
        return num_beyond

    def num_beyond(self, source: Floats) -> int:
        """How many elements are beyond the range, with those that are inf or NaN."""
        return int(np.count_nonzero(~(np.abs(source) < np.float32(self.limit))))

    def saturated(self, source: Floats) -> Floats:
        """``source`` with ``largest`` in place of finite elements beyond the range."""
        is_beyond = np.isfinite(source) & (np.abs(source) >= np.float32(self.limit))
        if not is_beyond.any():
            return source
        return np.where(is_beyond, np.copysign(np.float32(self.largest), source), source)

    @abstractmethod
    def error_bound(self, largest: float) -> float:
        """The largest error of a decoded value if no magnitude in its block exceeds ``largest``.

        Valid below ``limit``. Values that are not finite decode to values that are not finite.
        """

    def __str__(self) -> str:
        return self.name


def saturating_sum(a: Floats, b: Floats) -> Floats:
    """``a + b``, where a sum of finite elements is no more than the largest float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add(a, b)
    is_beyond = np.isinf(total) & np.isfinite(a) & np.isfinite(b)
    if is_beyond.any():
        total[is_beyond] = np.copysign(np.float32(LARGEST), total[is_beyond])
    return total


def check_dtype(codec: Codec, dtype: np.dtype[Any]) -> None:
    """TypeError unless ``dtype`` is float32."""
    if dtype != np.float32:
        raise TypeError(
            f"codec={codec.name!r} encodes float32 arrays, not {dtype}; "
            "convert the array or omit the codec"
        )
