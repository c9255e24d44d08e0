"""Where a plan's chunks lie in this rank's memory.

A layout is made once per plan and array size, and says for every chunk in which buffer it lies, and
where. A call then brings its buffers: the caller's two arrays, and scratch memory for chunks that
the plan only relays, or changes although the caller's array must stay as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from potluck._core.collectives.plan import Action, Operation, Plan

Array = NDArray[Any]
Chunks = dict[int, Array]


class Buffer(IntEnum):
    """A buffer of a call. The native core counts them alike."""

    SOURCE = 0
    """What the rank contributes."""
    RESULT = 1
    """Where it wants the outcome."""
    SCRATCH = 2


class Place(NamedTuple):
    """``size`` elements of a buffer, from element ``start`` on."""

    buffer: Buffer
    start: int
    size: int


class Buffers(NamedTuple):
    """The buffers of one call, C-contiguous, in the order of ``Buffer``."""

    source: Array | None
    result: Array | None
    scratch: Array | None = None
    narrowed: Array | None = None
    """The caller's float16 array, which ``result`` is rounded into in the end."""

    def at(self, place: Place) -> Array:
        """The elements at ``place``, as a view."""
        buffer = self[place.buffer]
        assert buffer is not None
        return buffer.reshape(-1)[place.start : place.start + place.size]


@dataclass(slots=True)
class Layout:
    """The place of every chunk that a plan names on its rank."""

    places: dict[int, Place] = field(default_factory=dict)
    copies: list[tuple[Place, Place]] = field(default_factory=list)
    """(to, from): what needs no network, and the caller's elements that scratch begins with."""
    num_scratch: int | None = None
    """None: no chunk lies there."""
    scaled: list[Place] = field(default_factory=list)
    """What a mean scales before the first step: this rank's contributions."""

    def buffers(self, source: Array | None, result: Array | None) -> Buffers:
        """The buffers of one call on these arrays, ready for the plan's first step."""
        scratch = None
        if self.num_scratch is not None:
            like = result if result is not None else source
            assert like is not None
            scratch = np.empty(self.num_scratch, like.dtype)
        buffers = Buffers(source, result, scratch)
        for target, origin in self.copies:
            buffers.at(target)[:] = buffers.at(origin)
        return buffers

    def chunks(self, buffers: Buffers) -> Chunks:
        """The memory of every chunk, as views of a call's buffers."""
        return {chunk: buffers.at(place) for chunk, place in self.places.items()}

    def scratch(self, count: int) -> Place:
        """Room for ``count`` more elements in the scratch buffer."""
        start = self.num_scratch or 0
        self.num_scratch = start + count
        return Place(Buffer.SCRATCH, start, count)

    def copied(self, origin: Place) -> Place:
        """Scratch that begins as a copy of ``origin``."""
        place = self.scratch(origin.size)
        self.copies.append((place, origin))
        return place


def lay_out(
    plan: Plan, num_source: int | None, num_result: int | None, *, scales: bool = False
) -> Layout:
    """Where the chunks of ``plan`` lie, for a source and a result of so many elements.

    None: this rank has no such array. For operations in place both are the same array. ``scales``:
    contributions are scaled first, so those that the caller's array must keep lie in scratch.
    """
    source = None if num_source is None else Place(Buffer.SOURCE, 0, num_source)
    result = None if num_result is None else Place(Buffer.RESULT, 0, num_result)
    changed = {step.chunk for step in plan.steps if step.action != Action.SEND}
    if plan.operation in _WHOLE:
        return _whole(plan, source, result, changed, scales)
    if plan.operation is Operation.ALL_TO_ALL:
        return _all_to_all(plan, source, result)
    return _by_rank(plan, source, result, changed, scales)


def bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """From where to where the ``index``-th of ``parts`` near-equal parts goes."""
    return index * count // parts, (index + 1) * count // parts


def _cut(whole: Place, parts: int, index: int) -> Place:
    start, end = bounds(whole.size, parts, index)
    return Place(whole.buffer, whole.start + start, end - start)


_WHOLE = frozenset({Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE, Operation.BARRIER})


def _whole(
    plan: Plan, source: Place | None, result: Place | None, changed: set[int], scales: bool
) -> Layout:
    """The buffer itself, cut; a scratch copy where a non-root rank's input would be changed."""
    layout = Layout()
    buffer = result if result is not None else source
    assert buffer is not None
    if result is None and (changed or scales):
        buffer = layout.copied(buffer)
    if scales:
        layout.scaled.append(buffer)
    for chunk in range(plan.num_chunks):
        layout.places[chunk] = _cut(buffer, plan.num_chunks, chunk)
    return layout


def _by_rank(
    plan: Plan, source: Place | None, result: Place | None, changed: set[int], scales: bool
) -> Layout:
    """One chunk per rank: gathers end with all of them, scatters begin with all of them."""
    layout, rank, world = Layout(), plan.rank, plan.world_size
    gathers = plan.operation in (Operation.ALL_GATHER, Operation.GATHER)
    mine, whole = (source, result) if gathers else (result, source)
    assert mine is not None
    if whole is not None:
        layout.places = {chunk: _cut(whole, world, chunk) for chunk in range(world)}
        own = layout.places[rank]
        layout.copies.append((own, mine) if gathers else (mine, own))
    if not gathers or whole is None:
        layout.places[rank] = mine
    if plan.operation is Operation.REDUCE_SCATTER and whole is not None:
        for chunk in sorted((set(range(world)) if scales else changed) - {rank}):
            layout.places[chunk] = layout.copied(layout.places[chunk])
        if scales:
            layout.scaled += layout.places.values()
    for step in plan.steps:
        if step.chunk not in layout.places:
            layout.places[step.chunk] = layout.scratch(mine.size)
    return layout


def _all_to_all(plan: Plan, source: Place | None, result: Place | None) -> Layout:
    assert source is not None
    assert result is not None
    layout, rank, world = Layout(), plan.rank, plan.world_size
    for other in range(world):
        layout.places[rank * world + other] = _cut(source, world, other)
        if other != rank:
            layout.places[other * world + rank] = _cut(result, world, other)
    layout.copies.append((_cut(result, world, rank), _cut(source, world, rank)))
    for step in plan.steps:
        if step.chunk not in layout.places:
            layout.places[step.chunk] = layout.scratch(_cut(source, world, 0).size)
    return layout
