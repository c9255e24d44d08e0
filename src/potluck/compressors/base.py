"""The interface of compressors: how a float32 array becomes fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from potluck._core.codecs.codec import LARGEST, Bytes, Floats

Array = NDArray[Any]
Shape = tuple[int, ...]


class Compressor(ABC):
    """A way to compress gradients. Immutable and stateless: the residual belongs to the caller.

    Arrays are contiguous float32 arrays of any shape; ``DDP`` passes a bucket of several gradients
    as one flat array. ``step`` is the number of the call, equal on all ranks: random choices follow
    from it. The result is the same on all machines and engines, and the size of a payload follows
    from the shape.
    """

    start_step: int = 0
    """The first step of a training in which gradients are compressed."""

    def applies_to(self, shape: Shape) -> bool:
        """Whether a tensor of this shape is compressed. Others are sent as they are."""
        return True

    @abstractmethod
    def compress(self, source: Floats, residual: Floats | None, step: int) -> Bytes:
        """The payload that stands for ``source``, or with a residual for ``source + residual``.

        The residual, of the shape of ``source``, becomes what the payload has lost, and zero where
        that is not finite.
        """

    @abstractmethod
    def decompress(self, payload: Bytes, shape: Shape, step: int) -> Floats:
        """The array of this shape that the payload stands for, a new one."""

    def add_to(self, target: Floats, payload: Bytes, step: int) -> None:
        """Add what the payload stands for to ``target``, which may be float64."""
        target += self.decompress(payload, target.shape, step)

    @abstractmethod
    def looks_finite(self, payload: Bytes, source: Floats) -> bool:
        """False if ``source`` or what the payload stands for may hold inf or NaN. Cheap: it reads
        the payload where that shows every such value."""


def text_of(compressor: Compressor) -> str:
    """The class with its options that are numbers or text: equal for equal compressors on all ranks
    and in all processes, where a ``repr`` may hold addresses."""
    plain = int | float | str | bytes | None
    options = getattr(compressor, "__dict__", {}).items()
    shown = ", ".join(f"{name}={value!r}" for name, value in options if isinstance(value, plain))
    return f"{type(compressor).__name__}({shown})"


def compress_any(
    compressor: Compressor, array: Array, residual: Array | None, step: int
) -> tuple[Bytes, Floats]:
    """The payload of a float ``array`` of any dtype, and the float32 array that was compressed.

    ``residual`` is float64 for a float64 array, else float32. It becomes what was lost in the
    array's own dtype, with the rounding to float32. The largest float32 stands for finite elements
    beyond it; what is beyond is lost.
    """
    if array.dtype == np.float32:
        return compressor.compress(array, residual, step), array
    single = np.dtype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if residual is None:
            source = cast(array, single)
            return compressor.compress(source, None, step), source
        residual += array.astype(residual.dtype, copy=False)
        source = residual.copy() if residual.dtype == single else cast(residual, single)
        payload = compressor.compress(source, np.zeros_like(source), step)
        decoded = compressor.decompress(payload, array.shape, step)
        residual -= cast(decoded, array.dtype).astype(residual.dtype)
    residual[~np.isfinite(residual) | (np.abs(source) == np.float32(LARGEST))] = 0
    return payload, source


def largest_of(dtype: np.dtype[Any]) -> float:
    """The largest finite number of a float ``dtype``."""
    bounds: Any = ml_dtypes.finfo  # untyped
    return float(bounds(dtype).max)


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """``array`` in ``dtype``, with its largest number in place of finite elements beyond it."""
    if dtype == array.dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        made: Array = array.astype(dtype)
    is_beyond = ~np.isfinite(made) & np.isfinite(array)
    if is_beyond.any():
        largest = np.full_like(made, largest_of(dtype))
        made[is_beyond] = np.copysign(largest, made)[is_beyond]
    return made
