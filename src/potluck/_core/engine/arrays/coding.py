"""What a lossy codec does to the segments of one plan on one rank.

The plan is the direct one, or for an all_reduce the hierarchical one whose nodes exchange directly
(``hierarchical.coded_all_reduce``): a value is encoded at most twice, whatever the world size. What
a rank contributes to a chunk of another's is encoded as it goes out, and added as it comes in. A
chunk that a rank owns is final when the rank sends it: it is encoded once, the same bytes go to
all, and the owner decodes its own, so all ranks end with the same bits.

In the hierarchical plan the ranks that carry a chunk do this with the sums of their nodes. Within a
node nothing is encoded, and the owner's node gets what the owner has decoded.

Error feedback hooks in as the *residual*: one float32 per element of the buffer that belongs to the
caller. What was lost last time is added before an element is encoded, and what is lost now takes
its place. Both hops use it and never the same element: a rank encodes the parts that others own on
the first hop, and its own parts on the second. (Error feedback on both hops: Tang et al.,
"DoubleSqueeze", 2019.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from potluck._core.codecs import Codec, check_dtype, kernels
from potluck._core.codecs.codec import Bytes, Floats
from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan
from potluck._core.engine.arrays import kernels as arithmetic
from potluck._core.engine.arrays.layout import Array, Chunks, bounds
from potluck._core.types import ReduceOp


class Encoding(NamedTuple):
    """How a call wants its bytes on the wire; ``residual`` is as long as its array."""

    codec: Codec
    residual: Array | None = None


class Coding:
    """The encoding of one plan's segments."""

    def __init__(
        self,
        codec: Codec,
        plan: Plan,
        takers: Mapping[int, int],
        residual: Floats | None = None,
        *,
        scale: float = 1.0,
        late_scale: float = 1.0,
    ) -> None:
        """``takers`` is as of ``takers_of``; ``residual`` is as long as the buffer that the rank
        contributes. ``scale`` is what this rank's contributions to a mean were divided by, and
        ``late_scale`` what the sums that it owns are divided by before they are encoded; the
        residual is in the units of the caller's array. Both are powers of two."""
        self.codec = codec
        self.num_beyond = 0
        """How many elements were encoded that are beyond the codec's range."""
        self._scale = scale
        self._late_scale = late_scale
        self._takers = takers
        self._residuals: Chunks = {}
        if residual is not None:
            places = residual_places(plan, residual.size)
            self._residuals = {chunk: residual[a:b] for chunk, (a, b) in places.items()}
        self._encoded: dict[tuple[int, int], tuple[Bytes, int]] = {}

    def outgoing(self, chunk: int, number: int, start: int, data: Floats) -> Bytes:
        """The encoded form of a segment that is about to go out.

        ``start`` is the segment's first element in its chunk. A segment of an own chunk is changed
        to what all others decode it to.
        """
        if chunk not in self._takers:
            return self._encode(chunk, start, data, self._scale)
        key = chunk, number
        encoded, num_left = self._encoded.pop(key, (None, self._takers[chunk]))
        if encoded is None:
            if self._late_scale != 1:
                arithmetic.divide(data, self._late_scale)
            encoded = self._encode(chunk, start, data, self._scale * self._late_scale)
            kernels.decode(self.codec, data, encoded)
        if num_left > 1:
            self._encoded[key] = encoded, num_left - 1
        return encoded

    def arrived(self, data: Floats, encoded: Bytes, *, combines: bool) -> None:
        """A segment has come in: it is added to what is there, or takes its place."""
        if combines:
            kernels.decode_accumulate(self.codec, data, encoded)
        else:
            kernels.decode(self.codec, data, encoded)

    def _encode(self, chunk: int, start: int, data: Floats, unit: float) -> Bytes:
        encoded = np.empty(self.codec.encoded_bytes(data.shape[0]), np.uint8)
        if chunk in self._residuals:
            left = self._residuals[chunk][start : start + data.shape[0]]
            if unit != 1:
                arithmetic.divide(left, unit)
            num = kernels.encode_with_residual(self.codec, encoded, left, data)
            if unit != 1:
                arithmetic.divide(left, 1 / unit)
        else:
            num = kernels.encode(self.codec, encoded, data)
        self.num_beyond += num
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
    if not codec.code:
        raise ValueError(
            f"codec={codec.name!r} is a registered one, for all_reduce of a context only, without "
            "algorithm"
        )
    if op not in (None, ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"codec={codec.name!r} adds what it decodes: op must be sum or mean, not {op}"
        )
    if algorithm not in (None, Algorithm.DIRECT) and (algorithm, operation) != (
        Algorithm.HIERARCHICAL,
        Operation.ALL_REDUCE,
    ):
        raise ValueError(
            f"codec={codec.name!r} is lossy, and only the direct plan, or a hierarchical "
            f"all_reduce, encodes a value no more than twice; leave algorithm={str(algorithm)!r} "
            "out, or the codec"
        )
    if residual is not None and (residual.dtype != np.float32 or residual.size != array.size):
        raise ValueError(
            f"{operation}: the residual holds one float32 for each of the {array.size} elements, "
            f"not {residual.size} of {residual.dtype}"
        )


def coded_steps(plan: Plan, nodes: tuple[int, ...]) -> tuple[bool, ...]:
    """By step: whether its bytes are encoded. In a hierarchical plan, those between nodes are."""
    return tuple(
        plan.algorithm is not Algorithm.HIERARCHICAL or nodes[step.peer] != nodes[plan.rank]
        for step in plan.steps
    )


def takers_of(plan: Plan, coded: tuple[bool, ...]) -> dict[int, int]:
    """By chunk that this rank owns, and so encodes once: to how many ranks it sends these bytes."""
    if plan.operation is Operation.REDUCE_SCATTER:
        return {}
    steps = [step for step, is_coded in zip(plan.steps, coded, strict=True) if is_coded]
    takers = Counter(step.chunk for step in steps if step.action is Action.SEND)
    for step in steps:
        if step.action is Action.COPY:  # another rank owns it
            takers.pop(step.chunk, None)
    return dict(takers)


def residual_places(plan: Plan, count: int) -> dict[int, tuple[int, int]]:
    """By chunk: which of the ``count`` elements of a residual are its own, from and to."""
    if plan.operation is Operation.ALL_GATHER:
        return {plan.rank: (0, count)}
    return {
        chunk: bounds(count, plan.num_chunks, chunk)
        for chunk in range(plan.num_chunks)
        if chunk != plan.rank or plan.operation is not Operation.REDUCE_SCATTER
    }
