"""A compiled plan: everything about a call that does not change from one call to the next.

Training makes the same calls over and over. What was asked is compiled once: the plan, the text and
fingerprint by which ranks compare it, where its chunks lie in the caller's arrays, how they are cut
into segments, and the order of the steps. A call adds its arrays, its sequence number and its
deadline (``running.py`` and ``native/core/loop/plan.hpp``, which both read this).
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck._core import native
from potluck._core.codecs import Codec
from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan
from potluck._core.engine.arrays import kernels, reduction
from potluck._core.engine.arrays.coding import coded_steps, residual_places, takers_of
from potluck._core.engine.arrays.layout import Array, Buffers, Layout
from potluck._core.engine.call import Call
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import code_of

if TYPE_CHECKING:
    from potluck._core._native import CompiledPlan as NativePlan


class CompiledPlan:
    """One rank's part in one kind of call on one channel. Immutable; calls share it."""

    def __init__(
        self,
        plan: Plan,
        call: Call,
        layout: Layout,
        *,
        channel: int,
        peers: tuple[int, ...],
        dtype: np.dtype[Any],
        num_result: int | None = None,
        codec: Codec | None = None,
        nodes: tuple[int, ...] = (),
        num_residual: int | None = None,
    ) -> None:
        """``peers`` maps the plan's ranks to those of the whole group, ``nodes`` to their nodes
        (a codec in a hierarchical plan needs them). ``num_result`` and ``num_residual`` are the
        elements of these arrays, None where there is none."""
        self.plan = plan
        self.call = call
        self.layout = layout
        self.is_widened = call.op is ReduceOp.MEAN and call.dtype != str(dtype)
        """Whether the mean of float16 arrays is computed in float32."""
        world, is_mean = plan.world_size, call.op is ReduceOp.MEAN
        self.scale = reduction.scale_of(dtype, world) if layout.scaled else 1.0
        """What contributions to a mean are divided by, so that no sum overflows."""
        is_late = is_mean and codec is not None and not codec.keeps_range
        is_late = is_late and plan.operation is Operation.ALL_REDUCE
        is_late = is_late and (plan.algorithm is Algorithm.DIRECT or len(set(nodes)) > 1)
        self.late_scale = reduction.scale_of(dtype, world) if is_late else 1.0
        """What sums are divided by before their owner encodes them, where contributions are not."""
        self.divisor = world / (self.scale * self.late_scale) if is_mean else 1.0
        """Of the result, in the end."""
        self.channel = channel
        self.peers = peers
        self.dtype = dtype
        self.codec = codec
        self.nbytes = prod(call.shape) * dtype.itemsize
        """Of one rank's part, for the metrics."""
        self.segment_elements = max(1, call.segment_bytes // dtype.itemsize)
        self.num_segments = {
            chunk: max(1, -(-place.size // self.segment_elements))
            for chunk, place in layout.places.items()
        }
        self.sends: dict[int, tuple[int, ...]] = {}
        """By peer: the steps of its queue (rule 2), as indices into the plan's steps."""
        self.receives: dict[int, tuple[int, ...]] = {}
        self.previous: list[int] = []
        """By step: the one before it on the same chunk (rule 1), -1 for none."""
        latest: dict[int, int] = {}
        for index, step in enumerate(plan.steps):
            queues = self.sends if step.action == Action.SEND else self.receives
            peer = peers[step.peer]
            queues[peer] = (*queues.get(peer, ()), index)
            self.previous.append(latest.get(step.chunk, -1))
            latest[step.chunk] = index
        self.coded = None if codec is None else coded_steps(plan, nodes)
        """By step: whether its bytes are encoded; None without a codec."""
        self.takers = {} if self.coded is None else takers_of(plan, self.coded)
        """As ``takers_of`` says."""
        self._num_result = num_result
        self._num_residual = num_residual

    def buffers(self, source: Array | None, result: Array | None) -> Buffers:
        """The buffers of one call on these arrays, ready for the plan's first step."""
        with np.errstate(all="ignore"):
            if not self.is_widened:
                buffers = self.layout.buffers(source, result)
            else:
                wide = None if source is None else source.astype(self.dtype)
                into = (
                    wide
                    if source is result or result is None
                    else np.empty(result.shape, self.dtype)
                )
                into = None if result is None else into
                buffers = self.layout.buffers(wide, into)._replace(narrowed=result)
            for place in self.layout.scaled if self.scale != 1 else ():
                kernels.divide(buffers.at(place), self.scale)
        return buffers

    @property
    def is_computed_by_all(self) -> bool:
        """Whether each rank computes the result itself, so that they may have different NaNs."""
        return self.plan.algorithm is Algorithm.DOUBLING

    def num_segments_of(self, step: int) -> int:
        """How many segments step number ``step`` moves."""
        return self.num_segments[self.plan.steps[step].chunk]

    @cached_property
    def native(self) -> NativePlan:
        """The same for the native loop."""
        plan, places = self.plan, self.layout.places
        index_of = {chunk: index for index, chunk in enumerate(places)}
        is_concluded = self.divisor != 1 or self.is_computed_by_all
        residuals = {} if self._num_residual is None else residual_places(plan, self._num_residual)
        return native.core.CompiledPlan(
            call=str(self.call),
            fingerprint=self.call.fingerprint,
            channel=self.channel,
            dtype=code_of(self.dtype),
            op=self.call.op or ReduceOp.SUM,
            segment_bytes=self.call.segment_bytes,
            ranks=self.peers,
            chunks=[
                (
                    chunk,
                    *place,
                    residuals[chunk][0] if chunk in residuals else -1,
                    self.takers.get(chunk, 0),
                )
                for chunk, place in places.items()
            ],
            steps=[
                (step.action, step.peer, index_of[step.chunk], is_coded)
                for step, is_coded in zip(
                    plan.steps, self.coded or [False] * len(plan.steps), strict=True
                )
            ],
            num_concluded=(self._num_result or 0) if is_concluded else 0,
            divisor=self.divisor,
            scale=self.scale,
            late_scale=self.late_scale,
            is_computed_by_all=self.is_computed_by_all,
            codec=0 if self.codec is None else self.codec.code,
        )
