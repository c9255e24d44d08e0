"""A plan, compiled and under way: which segment each link may move next. Decides only; moves no
bytes.

Training makes the same calls over and over. What was asked is compiled once (``CompiledPlan``): the
plan, the text and fingerprint by which ranks compare it, where its chunks lie in the caller's
arrays, how they are cut into segments, and the order of the steps. A call adds its arrays, its
sequence number and its deadline (``RunningPlan`` and ``native/core/loop/plan.hpp``, which both read
it).

``RunningPlan`` is where the three rules of ``collectives.plan`` live. Per link and direction there
is a queue of steps (rule 2). A segment of a step may move once the step before it on the same chunk
has finished that segment (rule 1). Segments of a step move in order, so one counter a step is
enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from potluck._core import native
from potluck._core.codecs import Codec
from potluck._core.codecs.codec import saturating_sum
from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan
from potluck._core.engine.arrays import kernels, reduction
from potluck._core.engine.arrays.coding import Coding, coded_steps, residual_places, takers_of
from potluck._core.engine.arrays.layout import Array, Buffers, Layout
from potluck._core.engine.call import Call
from potluck._core.engine.work import Work
from potluck._core.types import ReduceOp
from potluck._core.wire.dtypes import code_of

if TYPE_CHECKING:
    from potluck._core._native import CompiledPlan as NativePlan


@dataclass(eq=False, repr=False)
class CompiledPlan:
    """One rank's part in one kind of call on one channel. Immutable; calls share it.

    ``peers`` maps the plan's ranks to those of the whole group, ``nodes`` to their nodes
    (a codec in a hierarchical plan needs them). ``num_result`` and ``num_residual`` are the
    elements of these arrays, None where there is none.
    """

    plan: Plan
    call: Call
    layout: Layout
    _: KW_ONLY
    channel: int
    peers: tuple[int, ...]
    dtype: np.dtype[Any]
    num_result: int | None = None
    codec: Codec | None = None
    nodes: tuple[int, ...] = ()
    num_residual: int | None = None

    def __post_init__(self) -> None:
        self.is_widened = self.call.op is ReduceOp.MEAN and self.call.dtype != str(self.dtype)
        """Whether the mean of float16 arrays is computed in float32."""
        world, is_mean = self.plan.world_size, self.call.op is ReduceOp.MEAN
        self.scale = reduction.scale_of(self.dtype, world) if self.layout.scaled else 1.0
        """What contributions to a mean are divided by, so that no sum overflows."""
        is_late = is_mean and self.codec is not None and not self.codec.keeps_range
        is_late = is_late and self.plan.operation is Operation.ALL_REDUCE
        is_late = is_late and (self.plan.algorithm is Algorithm.DIRECT or len(set(self.nodes)) > 1)
        self.late_scale = reduction.scale_of(self.dtype, world) if is_late else 1.0
        """What sums are divided by before their owner encodes them, where contributions are not."""
        self.divisor = world / (self.scale * self.late_scale) if is_mean else 1.0
        """Of the result, in the end."""
        self.nbytes = prod(self.call.shape) * self.dtype.itemsize
        """Of one rank's part, for the metrics."""
        self.segment_elements = max(1, self.call.segment_bytes // self.dtype.itemsize)
        self.num_segments = {
            chunk: max(1, -(-place.size // self.segment_elements))
            for chunk, place in self.layout.places.items()
        }
        self.sends: dict[int, tuple[int, ...]] = {}
        """By peer: the steps of its queue (rule 2), as indices into the plan's steps."""
        self.receives: dict[int, tuple[int, ...]] = {}
        self.previous: list[int] = []
        """By step: the one before it on the same chunk (rule 1), -1 for none."""
        latest: dict[int, int] = {}
        for index, step in enumerate(self.plan.steps):
            queues = self.sends if step.action == Action.SEND else self.receives
            peer = self.peers[step.peer]
            queues[peer] = (*queues.get(peer, ()), index)
            self.previous.append(latest.get(step.chunk, -1))
            latest[step.chunk] = index
        self.coded = None if self.codec is None else coded_steps(self.plan, self.nodes)
        """By step: whether its bytes are encoded; None without a codec."""
        self.takers = {} if self.coded is None else takers_of(self.plan, self.coded)
        """As ``takers_of`` says."""

    def buffers(self, source: Array | None, result: Array | None) -> Buffers:
        """The buffers of one call on these arrays, ready for the plan's first step."""
        if not self.is_widened and self.scale == 1:
            return self.layout.buffers(source, result)  # no arithmetic: errstate takes 0.7 us
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
        residuals = {} if self.num_residual is None else residual_places(plan, self.num_residual)
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
            num_concluded=(self.num_result or 0) if is_concluded else 0,
            divisor=self.divisor,
            scale=self.scale,
            late_scale=self.late_scale,
            is_computed_by_all=self.is_computed_by_all,
            codec=0 if self.codec is None else self.codec.code,
        )


_BYTES = np.dtype(np.uint8)


class Segment(NamedTuple):
    """One segment of one step. ``data`` is a view of the chunk's memory."""

    step: int
    chunk: int
    number: int
    data: Array


class RunningPlan:
    """One collective under way on one rank: how far a call of a compiled plan is."""

    def __init__(
        self,
        compiled: CompiledPlan,
        buffers: Buffers,
        *,
        sequence: int,
        deadline: float,
        work: Work,
        residual: Array | None = None,
    ) -> None:
        """``residual``: what a codec has lost before, if it is kept."""
        self.compiled = compiled
        self.call = compiled.call
        self.channel = compiled.channel
        self.peers = compiled.peers
        self.sequence = sequence
        self.deadline = deadline
        self.work = work
        self.started = 0.0
        self.has_queried = False
        self.told_begun: set[int] = set()
        """Peers that BEGUN was sent to."""
        self.is_overdue = False
        self.early: dict[int, deque[tuple[Segment, bytearray]]] = {}
        """By peer: segments that have arrived and wait for their memory, in the plan's order."""
        self._steps = compiled.plan.steps
        self._chunks = compiled.layout.chunks(buffers)
        self._result = None if buffers.result is None else buffers.result.reshape(-1)
        self._narrowed = buffers.narrowed
        self._coding: Coding | None = None
        if compiled.codec is not None:
            self._coding = Coding(
                *(compiled.codec, compiled.plan, compiled.takers, residual),
                scale=compiled.scale,
                late_scale=compiled.late_scale,
            )
        self._sends = {peer: deque(steps) for peer, steps in compiled.sends.items()}
        self._receives = {peer: deque(steps) for peer, steps in compiled.receives.items()}
        self._started = [0] * len(self._steps)
        """By step: segments whose sending has begun, or that have arrived."""
        self._done = [0] * len(self._steps)
        self._unissued = {
            peer: sum(map(compiled.num_segments_of, steps))
            for peer, steps in compiled.sends.items()
        }
        self._left = sum(map(compiled.num_segments_of, range(len(self._steps))))

    # -- sending

    @property
    def send_peers(self) -> tuple[int, ...]:
        return tuple(self.compiled.sends)

    @property
    def receive_peers(self) -> tuple[int, ...]:
        return tuple(self.compiled.receives)

    def next_send(self, peer: int) -> Segment | None:
        """The segment to send to ``peer`` now, None if there is none (yet)."""
        queue = self._sends.get(peer)
        if not queue:
            return None
        step = queue[0]
        segment = self._started[step]
        if not self._is_ready(step, segment):
            return None
        return self._segment(step, segment)

    def issue(self, peer: int, segment: Segment) -> None:
        """``segment`` is being sent; the next call of next_send gives the one after it."""
        self._unissued[peer] -= 1
        self._start(self._sends[peer], segment)

    def is_ahead(self, peer: int, other: int) -> bool:
        """Whether ``peer`` has less left to come than ``other``, by more than a segment."""
        return self._unissued[peer] + 1 < self._unissued[other]

    def wire_bytes(self, segment: Segment) -> int:
        """How many bytes ``segment`` takes on the wire."""
        coding = self._coding_of(segment)
        if coding is None:
            return segment.data.nbytes
        return coding.codec.encoded_bytes(segment.data.shape[0])

    def payload(self, segment: Segment) -> memoryview:
        """What goes over the wire for ``segment``; asked for once, when it is being sent."""
        coding = self._coding_of(segment)
        if coding is None:
            return as_bytes(segment.data)
        start = segment.number * self.compiled.segment_elements
        return coding.outgoing(segment.chunk, segment.number, start, segment.data).data

    def sent(self, segment: Segment) -> None:
        """The bytes of ``segment`` have left its memory."""
        self._advance(segment.step)

    # -- receiving

    def next_receive(self, peer: int) -> Segment | None:
        """The segment that ``peer`` must send next, None if nothing more may come from it."""
        queue = self._receives.get(peer)
        if not queue:
            return None
        step = queue[0]
        return self._segment(step, self._started[step])

    def arrived(self, peer: int, segment: Segment) -> None:
        """All bytes of ``segment`` are here; next_receive gives the segment after it."""
        self._start(self._receives[peer], segment)

    def is_ready(self, segment: Segment) -> bool:
        """Whether the memory of a segment to receive may be written now."""
        return self._is_ready(segment.step, segment.number)

    def combines(self, segment: Segment) -> bool:
        """Whether the arriving bytes are combined with what is there (else they replace it)."""
        return self._steps[segment.step].action == Action.REDUCE

    def is_stored(self, segment: Segment) -> bool:
        """Whether the arriving bytes are the segment's own, so that they may be read in place."""
        return self._coding_of(segment) is None and not self.combines(segment)

    def apply(self, segment: Segment, payload: Any = None) -> None:
        """Use a segment that has arrived: in its own memory already, or in ``payload``."""
        if payload is not None:
            coding = self._coding_of(segment)
            theirs = from_bytes(payload, segment.data.dtype if coding is None else _BYTES)
            if coding is not None:
                coding.arrived(segment.data, theirs, combines=self.combines(segment))
            elif self.combines(segment) and self._coding is not None:
                segment.data[:] = saturating_sum(segment.data, theirs)
            elif self.combines(segment):
                kernels.combine(self.call.op or ReduceOp.SUM, segment.data, theirs)
            else:
                np.copyto(segment.data, theirs)
        self._advance(segment.step)

    # -- the whole

    @property
    def num_beyond(self) -> int:
        """How many elements this rank has encoded that are beyond the codec's range."""
        return 0 if self._coding is None else self._coding.num_beyond

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def conclude(self) -> None:
        """What is left to do once all steps are done: a mean divides, NaNs become alike."""
        if self._result is None or self.call.op is None:
            return
        if self.compiled.divisor != 1:
            kernels.divide(self._result, self.compiled.divisor)
        if self.compiled.is_computed_by_all:
            reduction.canonicalize_nans(self._result)
        if self._narrowed is not None:
            self._narrowed[...] = self._result.reshape(self._narrowed.shape)

    def awaited(self) -> list[tuple[int, str]]:
        """(peer, what is missing) for every link this rank still waits on, for errors."""
        waits: list[tuple[int, str]] = []
        for queues in (self._receives, self._sends):
            for peer, queue in queues.items():
                if queue:
                    step = self._steps[queue[0]]
                    what = f"step {queue[0] + 1} of {len(self._steps)}"
                    waits.append((peer, f"{what}, {step.action.name} chunk {step.chunk}"))
        return waits

    def needs(self, peer: int) -> bool:
        """Whether ``peer`` must still take a segment, or send one."""
        return bool(self._sends.get(peer) or self._receives.get(peer))

    def missing(self, departed: Set[int]) -> int | None:
        """The first of the departed ranks that this operation still needs."""
        return next((peer for peer in sorted(departed) if self.needs(peer)), None)

    def __str__(self) -> str:
        return f"{self.call} #{self.sequence}"

    # -- inside

    def _coding_of(self, segment: Segment) -> Coding | None:
        """How the segment's bytes are encoded; None: they are not."""
        coded = self.compiled.coded
        return self._coding if coded is not None and coded[segment.step] else None

    def _is_ready(self, step: int, segment: int) -> bool:
        # Rule 1, for one segment: the step before this one on the same chunk has finished it.
        previous = self.compiled.previous[step]
        return previous < 0 or self._done[previous] > segment

    def _segment(self, step: int, index: int) -> Segment:
        chunk = self._steps[step].chunk
        elements = self.compiled.segment_elements
        return Segment(
            step, chunk, index, self._chunks[chunk][index * elements : (index + 1) * elements]
        )

    def _start(self, queue: deque[int], segment: Segment) -> None:
        self._started[segment.step] += 1
        if self._started[segment.step] == self.compiled.num_segments[segment.chunk]:
            queue.popleft()

    def _advance(self, step: int) -> None:
        self._done[step] += 1
        self._left -= 1


def as_bytes(array: Array) -> memoryview:
    """The memory of a contiguous array as bytes, whatever its dtype."""
    return array.view(np.uint8).reshape(-1).data if array.size else memoryview(bytearray())


def from_bytes(data: Any, dtype: np.dtype[Any]) -> Array:
    """Bytes as a one-dimensional array of ``dtype``, without a copy."""
    return np.frombuffer(data, dtype=dtype)
