"""The interface of compressors: an array in fewer bytes, and the sum of the ranks' arrays."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from potluck._core.codecs.codec import LARGEST, Bytes, Codec, Floats

Array = NDArray[Any]
Shape = tuple[int, ...]


class Pending(Protocol):
    """A collective under way."""

    def then(self, finish: Callable[[Any], Any], /) -> Pending:
        """The same, with the result ``finish(result)``."""

    def wait(self) -> Any:
        """Block until it has ended; returns the result."""


class Coded(Protocol):
    """A compressor that is a codec."""

    @property
    def codec(self) -> Codec: ...


class Collectives(Protocol):
    """The collectives of a reduction: those of a context, or of a process group of torch.

    Arrays are flat and contiguous. A call returns at once, and ranks make all calls in one order.
    """

    @property
    def world_size(self) -> int: ...

    @property
    def divisor(self) -> int:
        """What a sum over the ranks is divided by: 1, or the world size where a mean is wanted."""

    def all_reduce(self, array: Array, /) -> Pending:
        """The sum over all ranks, in place. It is not divided."""

    def all_reduce_encoded(
        self, array: Array, compressor: Coded, residual: Array | None, /
    ) -> Pending:
        """The sum over all ranks, divided, in place, sent encoded by the compressor's codec."""

    def all_gather(self, payload: Bytes, /) -> Pending:
        """The payloads of all ranks, one row for each."""


class Cost(NamedTuple):
    """What the sum of some gradients costs a rank, for a planner."""

    reduced_bytes: int = 0
    """Of a dense array that is all-reduced."""
    encoded_bytes: int = 0
    """Of an array that a codec encodes inside an all_reduce."""
    gathered_bytes: int = 0
    """Of the payload that each rank sends to every other."""
    passes: int = 1
    """Copies of the gradients in memory that encoding takes beside the measured encoding."""


class Compressor(ABC):
    """A way to compress gradients. Immutable and stateless: the residual belongs to the caller.

    Arrays are contiguous float32 arrays of any shape; ``DDP`` passes a bucket of several gradients
    as one flat array. ``step`` is the number of the call, equal on all ranks: random choices follow
    from it. The result is the same on all machines and engines, and the size of a payload follows
    from the shape.
    """

    start_step: int = 0
    """The first step of a training in which gradients are compressed."""
    needs_matrices: ClassVar[bool] = False
    """Whether the tensors of a whole backward are summed together, as matrices (``matrices``)."""
    encodes_first: ClassVar[bool] = True
    """Whether a rank encodes before the collective starts, and not inside of it: work that a thread
    does beside backward."""

    @property
    def limit(self) -> float:
        """The magnitude from which on elements are beyond the range."""
        return math.inf

    @property
    def largest(self) -> float:
        """What stands for finite elements beyond the range."""
        return math.inf

    def applies_to(self, shape: Shape) -> bool:
        """Whether a tensor of this shape is compressed. Others are sent as they are."""
        return True

    def sum_dtype(self, *, is_double: bool) -> np.dtype[Any]:
        """What arrays are summed as, and residuals kept as; ``is_double``: they are float64."""
        return np.dtype(np.float64 if is_double else np.float32)

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

    def compress_counted(
        self, source: Floats, residual: Floats | None, step: int, memory: Callable[[int], Bytes]
    ) -> tuple[Bytes, int]:
        """``compress``, and how many elements are inf, NaN or beyond the range. The payload may lie
        in ``memory(num_bytes)``."""
        payload = self.compress(source, residual, step)
        is_finite = self.looks_finite(payload, source)
        return payload, 0 if is_finite else self.num_beyond(payload, source, LARGEST)

    def num_beyond(self, payload: Bytes, source: Floats, limit: float) -> int:
        """How many elements of ``source``, which the payload stands for, are inf, NaN, beyond the
        range or not below ``limit``."""
        is_below = np.abs(source) < np.float32(min(limit, self.limit))
        num = int(np.count_nonzero(~is_below))
        return num or int(not self.looks_finite(payload, source))

    def exchange(
        self, comm: Collectives, array: Array, residual: Array | None, step: int
    ) -> Pending:
        """Start the sum of ``array`` over all ranks, divided as ``comm`` says, in place.

        ``array`` and ``residual`` are flat, contiguous, of one length and of ``sum_dtype``. All
        ranks end with the same bits. Until what this returns has ended, both belong to it: what is
        lost may be written to ``residual`` at once, as here, or by the last ``then``. Cost: here
        one all_gather of the payloads, which are added in rank order.
        """
        payload, _ = compress_any(self, array, residual, step)

        def add(payloads: Any) -> Array:
            array[:] = 0
            with np.errstate(over="ignore", invalid="ignore"):
                for each in payloads.reshape(comm.world_size, -1):
                    self.add_to(array, each, step)
            return divide(array, comm)

        return comm.all_gather(payload).then(add)

    def matrices(self, qs: Mapping[Any, Array], step: int) -> Any:
        """A ``LowRankSum`` of a backward's matrices, where ``needs_matrices``. ``qs``: what the sum
        of the step before has left, by name, equal on all ranks."""
        raise NotImplementedError(f"{self!r} sums bucket by bucket: call exchange")

    def cost(self, shapes: Sequence[Shape]) -> Cost:
        """What the sum of float32 tensors of these shapes costs."""
        count = sum(map(math.prod, shapes))
        return Cost(gathered_bytes=self.compress(np.zeros(count, np.float32), None, 0).nbytes)

    def halves(
        self, source: Array, residual: Array, target: Array
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """The work of one rank for a matrix ``source`` before the network and after it, as two
        functions, for measurements of their time."""
        payload: list[Bytes] = []

        def encode() -> None:
            payload[:] = [self.compress(source.reshape(-1), residual.reshape(-1), 0)]

        return encode, lambda: self._take(target.reshape(-1), payload[0])

    def _take(self, target: Floats, payload: Bytes) -> None:
        self.add_to(target, payload, 0)


def divide(array: Array, comm: Collectives) -> Array:
    """A sum over the ranks, in place, divided as ``comm`` says."""
    if comm.divisor != 1:
        np.divide(array, array.dtype.type(comm.divisor), out=array)
    return array


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
