"""What a lossy codec does to the segments of one plan on one rank.

The plan is the direct one: a value is encoded at most twice, whatever the world size. What a rank
contributes to a chunk of another's is encoded as it goes out, and added as it comes in. A chunk
that a rank owns is final when the rank sends it: it is encoded once, the same bytes go to all, and
the owner decodes its own, so all ranks end with the same bits.

Error feedback hooks in as the *residual*: one float32 per element of the buffer that belongs to the
caller. What was lost last time is added before an element is encoded, and what is lost now takes
its place. Both hops use it and never the same element: a rank encodes the parts that others own on
the first hop, and its own part on the second. (Error feedback on both hops: Tang et al.,
"DoubleSqueeze", 2019.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from potluck.codecs import Codec, check_dtype
from potluck.codecs.codec import Bytes, Floats
from potluck.collectives.plan import Action, Algorithm, Operation, Plan
from potluck.engine.arrays import kernels
from potluck.engine.arrays.layout import Array, Chunks, bounds
from potluck.types import ReduceOp


class Encoding(NamedTuple):
    """How a call wants its bytes on the wire; ``residual`` is as long as its array."""

    codec: Codec
    residual: Array | None = None


class Coding:
    """The encoding of one plan's segments."""

    def __init__(self, codec: Codec, plan: Plan, residual: Floats | None = None) -> None:
        """``residual`` is as long as the buffer that the rank contributes."""
        self.codec = codec
        self.own = own_chunk(plan)
        self._residuals: Chunks = {}
        if residual is not None:
            places = residual_places(plan, residual.size)
            self._residuals = {chunk: residual[a:b] for chunk, (a, b) in places.items()}
        self._num_takers = sum(
            step.action is Action.SEND and step.chunk == self.own for step in plan.steps
        )
        self._encoded: dict[int, tuple[Bytes, int]] = {}

    def outgoing(self, chunk: int, number: int, start: int, data: Floats) -> Bytes:
        """The encoded form of a segment that is about to go out.

        ``start`` is the segment's first element in its chunk. A segment of the own chunk is changed
        to what all others decode it to.
        """
        if chunk != self.own:
            return self._encode(chunk, start, data)
        encoded, num_left = self._encoded.pop(number, (None, self._num_takers))
        if encoded is None:
            encoded = self._encode(chunk, start, data)
            kernels.decode(self.codec, data, encoded)
        if num_left > 1:
            self._encoded[number] = encoded, num_left - 1
        return encoded

    def arrived(self, data: Floats, encoded: Bytes, *, combines: bool) -> None:
        """A segment has come in: it is added to what is there, or takes its place."""
        if combines:
            kernels.decode_accumulate(self.codec, data, encoded)
        else:
            kernels.decode(self.codec, data, encoded)

    def _encode(self, chunk: int, start: int, data: Floats) -> Bytes:
        encoded = np.empty(self.codec.encoded_bytes(data.shape[0]), np.uint8)
        if chunk in self._residuals:
            left = self._residuals[chunk][start : start + data.shape[0]]
            kernels.encode_with_residual(self.codec, encoded, left, data)
        else:
            kernels.encode(self.codec, encoded, data)
        return encoded


def check(
    encoding: Encoding,
    operation: Operation,
    array: Array,
    op: ReduceOp | None,
    algorithm: str | None,
) -> None:
    """TypeError or ValueError unless ``array``, which the rank contributes, can be encoded so."""
    codec, residual = encoding
    check_dtype(codec, array.dtype)
    if op not in (None, ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"codec={codec.name!r} adds what it decodes: op must be sum or mean, not {op}"
        )
    if algorithm not in (None, Algorithm.DIRECT):
        raise ValueError(
            f"codec={codec.name!r} is lossy, and the direct plan encodes a value only twice; "
            f"leave algorithm={str(algorithm)!r} out, or the codec"
        )
    if residual is not None and (residual.dtype != np.float32 or residual.size != array.size):
        raise ValueError(
            f"{operation}: the residual holds one float32 for each of the {array.size} elements, "
            f"not {residual.size} of {residual.dtype}"
        )


def own_chunk(plan: Plan) -> int:
    """The chunk whose sends are final, so that it is encoded once; -1 for none."""
    return -1 if plan.operation is Operation.REDUCE_SCATTER else plan.rank


def residual_places(plan: Plan, count: int) -> dict[int, tuple[int, int]]:
    """By chunk: which of the ``count`` elements of a residual are its own, from and to."""
    if plan.operation is Operation.ALL_GATHER:
        return {plan.rank: (0, count)}
    return {
        chunk: bounds(count, plan.num_chunks, chunk)
        for chunk in range(plan.num_chunks)
        if chunk != plan.rank or plan.operation is not Operation.REDUCE_SCATTER
    }
