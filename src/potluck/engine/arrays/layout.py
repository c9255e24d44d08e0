"""Where a plan's chunks lie in this rank's memory. Pure: arrays in, views out, no I/O.

Arrays are one-dimensional and contiguous. Chunks that the plan only relays, or changes although
the caller's array must stay as it is, get scratch memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.collectives.plan import Action, Operation, Plan

Array = NDArray[Any]
Chunks = dict[int, Array]


def lay_out(plan: Plan, source: Array | None, result: Array | None) -> Chunks:
    """The memory of every chunk that ``plan`` names on its rank.

    ``source`` is what the rank contributes, ``result`` where it wants the outcome; for operations
    in place they are the same array. What needs no network (my own part) is copied here.
    """
    changed = {step.chunk for step in plan.steps if step.action != Action.SEND}
    if plan.operation in _WHOLE:
        return _whole(plan, source, result, changed)
    if plan.operation is Operation.ALL_TO_ALL:
        return _all_to_all(plan, source, result)
    return _by_rank(plan, source, result, changed)


def part(array: Array, parts: int, index: int) -> Array:
    """The ``index``-th of ``parts`` near-equal parts."""
    count = array.shape[0]
    return array[index * count // parts : (index + 1) * count // parts]


_WHOLE = frozenset({Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE, Operation.BARRIER})


def _whole(plan: Plan, source: Array | None, result: Array | None, changed: set[int]) -> Chunks:
    """The buffer itself, cut; a scratch copy where a non-root rank's input would be changed."""
    buffer = result if result is not None else source
    assert buffer is not None
    if result is None and changed:
        buffer = buffer.copy()
    return {chunk: part(buffer, plan.num_chunks, chunk) for chunk in range(plan.num_chunks)}


def _by_rank(plan: Plan, source: Array | None, result: Array | None, changed: set[int]) -> Chunks:
    """One chunk per rank: gathers end with all of them, scatters begin with all of them."""
    rank, world = plan.rank, plan.world_size
    gathers = plan.operation in (Operation.ALL_GATHER, Operation.GATHER)
    mine = source if gathers else result
    assert mine is not None
    chunks: Chunks = {}
    if gathers:
        if result is not None:
            chunks = {chunk: part(result, world, chunk) for chunk in range(world)}
            chunks[rank][:] = mine
        else:
            chunks[rank] = mine
    else:
        if source is not None:
            chunks = {chunk: part(source, world, chunk) for chunk in range(world)}
            mine[:] = chunks[rank]
        chunks[rank] = mine
        if source is not None and plan.operation is Operation.REDUCE_SCATTER:
            for chunk in changed - {rank}:
                chunks[chunk] = chunks[chunk].copy()
    for step in plan.steps:
        if step.chunk not in chunks:
            chunks[step.chunk] = np.empty_like(mine)
    return chunks


def _all_to_all(plan: Plan, source: Array | None, result: Array | None) -> Chunks:
    assert source is not None
    assert result is not None
    rank, world = plan.rank, plan.world_size
    chunks: Chunks = {}
    for other in range(world):
        chunks[rank * world + other] = part(source, world, other)
        if other != rank:
            chunks[other * world + rank] = part(result, world, other)
    part(result, world, rank)[:] = part(source, world, rank)
    for step in plan.steps:
        if step.chunk not in chunks:
            chunks[step.chunk] = np.empty_like(part(source, world, 0))
    return chunks
