"""A plan under way: which segment each link may move next. Decides only; moves no bytes.

This is where the three rules of ``collectives.plan`` live. Per link and direction there is a queue
of steps (rule 2). A segment of a step may move once the step before it on the same chunk has
finished that segment (rule 1). Segments of a step move in order, so one counter a step is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np

from potluck.collectives.plan import Action, Algorithm, Plan
from potluck.engine.arrays import kernels, reduction
from potluck.engine.arrays.coding import Coding
from potluck.engine.arrays.layout import Array, Chunks
from potluck.engine.call import Call
from potluck.engine.work import Work
from potluck.types import ReduceOp
from potluck.wire.frames import Frame

_BYTES = np.dtype(np.uint8)


class Segment(NamedTuple):
    """One segment of one step. ``data`` is a view of the chunk's memory."""

    step: int
    chunk: int
    number: int
    data: Array


class RunningPlan:
    """One collective under way on one rank."""

    def __init__(
        self,
        *,
        plan: Plan,
        call: Call,
        chunks: Chunks,
        channel: int,
        sequence: int,
        deadline: float,
        work: Work,
        peers: tuple[int, ...],
        nbytes: int,
        result: Array | None = None,
        coding: Coding | None = None,
    ) -> None:
        """``peers`` maps the plan's ranks to engine ranks; ``result`` is the whole of what this
        rank ends with, if anything.

        ``coding`` says how segments look on the wire, None: as in memory.
        """
        self.plan = plan
        self.call = call
        self.channel = channel
        self.sequence = sequence
        self.deadline = deadline
        self.work = work
        self.nbytes = nbytes
        self.started = 0.0
        self.has_asked = False
        self.announced: set[int] = set()
        self.is_overdue = False
        self.peers = peers
        self.early: dict[int, deque[tuple[Frame, bytearray]]] = {}
        self._chunks = chunks
        self._result = result
        self.coding = coding
        self._sends: dict[int, deque[int]] = {}
        self._receives: dict[int, deque[int]] = {}
        self._previous: list[int] = []
        self._issued = [0] * len(plan.steps)
        self._done = [0] * len(plan.steps)
        latest: dict[int, int] = {}
        for index, step in enumerate(plan.steps):
            queues = self._sends if step.action == Action.SEND else self._receives
            queues.setdefault(peers[step.peer], deque()).append(index)
            self._previous.append(latest.get(step.chunk, -1))
            latest[step.chunk] = index
        self._elements: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        for chunk in latest:
            array = chunks[chunk]
            elements = max(1, call.segment_bytes // array.itemsize)
            self._elements[chunk] = elements
            self._segments[chunk] = max(1, -(-array.shape[0] // elements))
        self._left = sum(self._segments[step.chunk] for step in plan.steps)
        self._unissued = {
            peer: sum(self._segments[plan.steps[index].chunk] for index in queue)
            for peer, queue in self._sends.items()
        }

    @property
    def chunks(self) -> Chunks:
        """The memory of every chunk that the plan names."""
        return self._chunks

    @property
    def unfinished(self) -> Array | None:
        """What is left to be worked on once all steps are done, if anything is."""
        is_mean = self.call.op is ReduceOp.MEAN
        return self._result if is_mean or self.is_computed_by_all else None

    @property
    def is_computed_by_all(self) -> bool:
        """Whether each rank computes the result itself, so that they may have different NaNs."""
        return self.plan.algorithm is Algorithm.DOUBLING

    # -- sending

    @property
    def send_peers(self) -> tuple[int, ...]:
        return tuple(self._sends)

    @property
    def receive_peers(self) -> tuple[int, ...]:
        return tuple(self._receives)

    def next_send(self, peer: int) -> Segment | None:
        """The segment to send to ``peer`` now, None if there is none (yet)."""
        queue = self._sends.get(peer)
        if not queue:
            return None
        step = queue[0]
        segment = self._issued[step]
        if not self._is_ready(step, segment):
            return None
        return self._segment(step, segment)

    def issue(self, peer: int, segment: Segment) -> None:
        """``segment`` is being sent; the next call of next_send gives the one after it."""
        self._issued[segment.step] += 1
        self._unissued[peer] -= 1
        if self._issued[segment.step] == self._segments[segment.chunk]:
            self._sends[peer].popleft()

    def is_ahead(self, peer: int, other: int) -> bool:
        """Whether ``peer`` has less left to come than ``other``, by more than a segment."""
        return self._unissued[peer] + 1 < self._unissued[other]

    def wire_bytes(self, segment: Segment) -> int:
        """How many bytes ``segment`` takes on the wire."""
        if self.coding is None:
            return segment.data.nbytes
        return self.coding.codec.encoded_bytes(segment.data.shape[0])

    def payload(self, segment: Segment) -> memoryview:
        """What goes over the wire for ``segment``; asked for once, when it is being sent."""
        if self.coding is None:
            return as_bytes(segment.data)
        start = segment.number * self._elements[segment.chunk]
        return self.coding.outgoing(segment.chunk, segment.number, start, segment.data).data

    def sent(self, segment: Segment) -> None:
        """The bytes of ``segment`` have left its memory."""
        self._advance(segment.step)

    # -- receiving

    def next_receive(self, peer: int) -> Segment | None:
        """The segment that ``peer`` must send next, None if nothing more is due from it."""
        queue = self._receives.get(peer)
        if not queue:
            return None
        step = queue[0]
        return self._segment(step, self._done[step])

    def is_ready(self, segment: Segment) -> bool:
        """Whether the memory of a due segment may be written now."""
        return self._is_ready(segment.step, segment.number)

    def combines(self, segment: Segment) -> bool:
        """Whether the arriving bytes are combined with what is there (else they replace it)."""
        return self.plan.steps[segment.step].action == Action.REDUCE

    def is_stored(self, segment: Segment) -> bool:
        """Whether the arriving bytes are the segment's own, so that they may be read in place."""
        return self.coding is None and not self.combines(segment)

    def received(self, peer: int, segment: Segment, payload: Any = None) -> None:
        """``segment`` has arrived: in its own memory already, or in the bytes of ``payload``."""
        if payload is not None:
            theirs = from_bytes(payload, segment.data.dtype if self.coding is None else _BYTES)
            if self.coding is not None:
                self.coding.arrived(segment.data, theirs, combines=self.combines(segment))
            elif self.combines(segment):
                kernels.combine(self.call.op or ReduceOp.SUM, segment.data, theirs)
            else:
                np.copyto(segment.data, theirs)
        if segment.number + 1 == self._segments[segment.chunk]:
            self._receives[peer].popleft()
        self._advance(segment.step)

    # -- the whole

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def conclude(self) -> None:
        array = self.unfinished
        if array is not None and self.call.op is not None:
            kernels.conclude(self.call.op, array, self.plan.world_size)
            if self.is_computed_by_all:
                reduction.make_nans_alike(array)

    def awaited(self) -> list[tuple[int, str]]:
        """(peer, what is missing) for every link this rank still waits on, for errors."""
        waits: list[tuple[int, str]] = []
        for queues in (self._receives, self._sends):
            for peer, queue in queues.items():
                if queue:
                    step = self.plan.steps[queue[0]]
                    what = f"step {queue[0] + 1} of {len(self.plan.steps)}"
                    waits.append((peer, f"{what}, {step.action.name} chunk {step.chunk}"))
        return waits

    def needs(self, peer: int) -> bool:
        """Whether ``peer`` must still take a segment, or send one that is not in ``early`` yet."""
        if self._sends.get(peer):
            return True
        due = sum(
            self._segments[self.plan.steps[step].chunk] - self._done[step]
            for step in self._receives.get(peer, ())
        )
        return due > len(self.early.get(peer, ()))

    def missing(self, departed: Set[int]) -> int | None:
        """The first of the departed ranks that this operation still needs."""
        return next((peer for peer in sorted(departed) if self.needs(peer)), None)

    def __str__(self) -> str:
        return f"{self.call} #{self.sequence}"

    # -- inside

    def _is_ready(self, step: int, segment: int) -> bool:
        previous = self._previous[step]
        return previous < 0 or self._done[previous] > segment

    def _segment(self, step: int, index: int) -> Segment:
        chunk = self.plan.steps[step].chunk
        elements = self._elements[chunk]
        return Segment(
            step, chunk, index, self._chunks[chunk][index * elements : (index + 1) * elements]
        )

    def _advance(self, step: int) -> None:
        self._done[step] += 1
        self._left -= 1


def as_bytes(array: Array) -> memoryview:
    """The memory of a contiguous array as bytes, whatever its dtype."""
    return array.view(np.uint8).reshape(-1).data if array.size else memoryview(bytearray())


def from_bytes(data: Any, dtype: np.dtype[Any]) -> Array:
    """Bytes as a one-dimensional array of ``dtype``, without a copy."""
    return np.frombuffer(data, dtype=dtype)
