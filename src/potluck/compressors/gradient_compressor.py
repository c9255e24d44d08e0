"""The compressor of gradients without a network, with one residual for each name."""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from potluck._core.codecs.codec import LARGEST, Bytes
from potluck.compressors import options
from potluck.compressors.base import (
    Array,
    Compressor,
    Shape,
    cast,
    compress_any,
    largest_of,
    text_of,
)
from potluck.compressors.encoded import Quantize, checked
from potluck.compressors.reduction import Residuals
from potluck.compressors.topk import TopK

_log = logging.getLogger(__name__)

_DTYPES = tuple(map(np.dtype, (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)))


@dataclass(frozen=True, eq=False)
class Compressed:
    """An array that ``compressor`` has compressed into ``payload``, a flat uint8 array.

    ``shape`` and ``dtype`` are the array's, ``step`` is the number of the call. ``num_nonfinite``
    is how many elements of the array were inf or NaN, or beyond the range of the compressor.
    """

    compressor: Compressor
    payload: Bytes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    step: int = 0
    num_nonfinite: int = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes of the payload."""
        return self.payload.nbytes

    @property
    def ratio(self) -> float:
        """How many times more bytes the array has; infinity for an empty array."""
        whole = int(np.prod(self.shape)) * self.dtype.itemsize
        return whole / self.nbytes if self.nbytes else float("inf")

    def decompress(self) -> NDArray[Any]:
        """The array that the payload stands for, of the original shape and dtype."""
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = self.compressor.decompress(self.payload, self.shape, self.step)
            return cast(decoded, self.dtype)


class GradientCompressor:
    """Compresses gradients by a ``compressor``, with error feedback.

        compressor = GradientCompressor(TopK(0.01))
        small = compressor.compress(gradient, "layer.weight")
        restored = compressor.decompress(small)

    With ``error_feedback`` what a call loses is kept and added to the next array of the same name,
    so that over all calls the sum of what was decompressed is the sum of what was compressed minus
    the residual (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al.,
    "Error Feedback Fixes SignSGD", 2019). The residual has float32's precision (of float64 arrays
    float64's) and the array's number of elements.

    Elements that are inf or NaN stay visible in what is decompressed; for those beyond the range of
    the compressor the largest number of its range stands. Both are counted in ``num_nonfinite`` by
    name and reported with the name in a warning. They never enter a residual.
    """

    def __init__(self, compressor: Compressor, error_feedback: bool = True) -> None:
        self.compressor = checked(compressor, f"compressor is {compressor!r}")
        if not isinstance(error_feedback, bool):
            raise TypeError(f"error_feedback is {error_feedback!r}; it must be True or False")
        self.error_feedback = error_feedback
        self.num_nonfinite: Counter[str] = Counter()
        """By name: how many elements of all calls were inf, NaN or beyond the range."""
        self._steps: Counter[str] = Counter()
        self._residuals = Residuals()
        self._kinds: dict[str, tuple[Shape, np.dtype[Any]]] = {}  # of the residuals
        self._payloads: dict[str, Bytes] = {}

    def compress(self, array: Array, name: str = "gradient") -> Compressed:
        """Compress a float32, float64, float16 or bfloat16 array of any shape.

        Arrays of one name must have one shape and dtype, for they share a residual. TypeError for
        other dtypes and objects, ValueError for another shape or dtype than before.
        """
        source = _checked(array, name)
        residual = self._residual(name, array) if self.error_feedback else None
        step = self._steps[name]
        if array.dtype == np.float32:
            payload, num_beyond = self.compressor.compress_counted(
                *(source, residual, step), lambda num_bytes: self._memory(name, num_bytes)
            )
        else:
            payload, wide = compress_any(self.compressor, source, residual, step)
            limit = min(LARGEST, largest_of(array.dtype))
            num_beyond = self.compressor.num_beyond(payload, wide, limit)
        self._steps[name] += 1
        made = Compressed(self.compressor, payload, array.shape, array.dtype, step)
        return self._with_count(made, array, name, num_beyond) if num_beyond else made

    def decompress(self, compressed: Compressed) -> Array:
        """The array that ``compressed`` stands for, of its shape and dtype."""
        if not isinstance(compressed, Compressed):
            raise TypeError(
                f"decompress takes what compress returned, not a {type(compressed).__name__}"
            )
        return compressed.decompress()

    def residual(self, name: str = "gradient") -> Array | None:
        """What earlier calls have lost, a copy in the shape of the array; None before the first."""
        return self._kept(name).copy() if name in self._kinds else None

    def state_dict(self) -> dict[str, Any]:
        """The residuals and steps by name, copies, with the compressor that they belong to."""
        return {
            "compressor": text_of(self.compressor),
            "steps": dict(self._steps),
            "residuals": {name: self._kept(name).copy() for name in self._kinds},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict()``. ValueError for the state of another compressor."""
        if not isinstance(state, Mapping):
            raise TypeError(f"a state_dict() is a dict, not a {type(state).__name__}")
        missing = {"compressor", "steps", "residuals"} - state.keys()
        if missing:
            raise ValueError(f"not the state of a GradientCompressor: it has no {min(missing)!r}")
        if state["compressor"] != text_of(self.compressor):
            raise ValueError(
                f"the state belongs to {state['compressor']}, this compressor is "
                f"{self.compressor!r}: a residual means nothing to another compressor; start from "
                "zeros instead"
            )
        self._steps = Counter(state["steps"])
        owed = {name: np.asarray(each) for name, each in state["residuals"].items()}
        self._kinds = {name: (each.shape, each.dtype) for name, each in owed.items()}
        self._residuals.restore([owed], {name: each.dtype for name, each in owed.items()})

    def _memory(self, name: str, num_bytes: int) -> Bytes:
        """Memory for a payload: that of the last one of this name if nothing refers to it any more.

        New memory costs as much as encoding: the system clears each page of it.
        """
        kept = self._payloads.get(name)
        # References: the dict's, `kept`, and getrefcount's argument. A view holds one, too.
        if kept is None or kept.nbytes != num_bytes or sys.getrefcount(kept) > 3:
            kept = self._payloads[name] = np.empty(num_bytes, np.uint8)
        return kept

    def _residual(self, name: str, array: Array) -> Array:
        wide = np.dtype(np.float64 if array.dtype == np.float64 else np.float32)
        shape, dtype = self._kinds.setdefault(name, (array.shape, wide))
        if shape != array.shape or dtype != wide:
            raise ValueError(
                f"{name} is {array.dtype} of shape {array.shape}, but its residual is {dtype} "
                f"of shape {shape}: an array of another shape needs a name of its own"
            )
        return self._kept(name)

    def _kept(self, name: str) -> Array:
        """The residual of a name, to be changed in place."""
        shape, dtype = self._kinds[name]
        return self._residuals.flat(name, {name: math.prod(shape)}, dtype).reshape(shape)

    def _with_count(self, made: Compressed, array: Array, name: str, num_beyond: int) -> Compressed:
        num = int(np.count_nonzero(~np.isfinite(array)))
        where = "is inf or NaN" if num else f"is beyond the range of {self.compressor!r}"
        num = num or max(num_beyond, int(np.count_nonzero(~np.isfinite(made.decompress()))))
        self.num_nonfinite[name] += num
        _log.warning("%s: %d of %d elements: a value %s", name, num, array.size, where)
        return Compressed(made.compressor, made.payload, made.shape, made.dtype, made.step, num)


def quantize_gradients(
    gradients: Array, num_bits: Literal[8, 4, 2] = 8, *, name: str = "gradients"
) -> Compressed:
    """``gradients`` as integers of 8, 4 or 2 bits with one scale for 256 elements, without error
    feedback.

    ``.decompress()`` of the result gives the array. Takes what ``GradientCompressor`` takes.
    """
    return GradientCompressor(Quantize(num_bits), error_feedback=False).compress(gradients, name)


def sparsify_gradients(
    gradients: Array, sparsity: float = 0.99, *, name: str = "gradients"
) -> Compressed:
    """The elements of ``gradients`` with the largest magnitudes, all but the share ``sparsity``.

    Exact over the whole array, without error feedback. ``.decompress()`` of the result gives the
    array with zeros. Takes what ``GradientCompressor`` takes; ValueError unless 0 <= ``sparsity`` <
    1.
    """
    sparsity = options.number("sparsify_gradients", "sparsity", sparsity)
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity is {sparsity}; it must be at least 0 and below 1")
    compressor = TopK(1 - sparsity, chunk=None)
    return GradientCompressor(compressor, error_feedback=False).compress(gradients, name)


def _checked(array: Array, name: str) -> Array:
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a {type(array).__name__}; compress takes NumPy arrays (of a torch "
            "tensor: tensor.cpu().numpy())"
        )
    if array.dtype not in _DTYPES:
        raise TypeError(
            f"{name} is {array.dtype}; float32, float64, float16 and bfloat16 can be compressed"
        )
    return np.ascontiguousarray(array).reshape(array.shape)
