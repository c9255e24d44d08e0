"""Layout against the naming rules of chunks, and every plan run on it without any engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from potluck._core.collectives.plan import Action, Operation, Plan
from potluck._core.collectives.registry import ROOTED, algorithms_for, make_plan
from potluck._core.engine.arrays.layout import Array, Chunks, bounds, lay_out

WORLDS = (1, 2, 3, 5)
COUNTS = (0, 1, 3, 7)


def test_parts_are_near_equal_and_cover_all() -> None:
    parts = [range(*bounds(10, 4, index)) for index in range(4)]
    assert [len(each) for each in parts] == [2, 3, 2, 3]
    assert np.concatenate(parts).tolist() == list(range(10))
    assert [len(range(*bounds(2, 5, index))) for index in range(5)].count(1) == 2


def chunks_of(plan: Plan, source: Array | None, result: Array | None) -> Chunks:
    """The memory of the plan's chunks in a call on these arrays."""
    sizes = [None if array is None else array.size for array in (source, result)]
    layout = lay_out(plan, *sizes)
    return layout.chunks(layout.buffers(source, result))


def run(plans: list[Plan], chunks: list[Chunks]) -> None:
    """All ranks' plans, step by step, as the three rules allow it."""
    wires: dict[tuple[int, int], list[Array]] = {}
    positions = [0] * len(plans)
    while any(at < len(plan.steps) for at, plan in zip(positions, plans, strict=True)):
        moved = False
        for rank, plan in enumerate(plans):
            while positions[rank] < len(plan.steps):
                action, peer, chunk = plan.steps[positions[rank]]
                mine = chunks[rank][chunk]
                if action is Action.SEND:
                    wires.setdefault((rank, peer), []).append(mine.copy())
                elif wires.get((peer, rank)):
                    theirs = wires[peer, rank].pop(0)
                    mine[:] = mine + theirs if action is Action.REDUCE else theirs
                else:
                    break
                positions[rank] += 1
                moved = True
        assert moved, "the plans wait for each other"


def pairs(*operations: Operation) -> list[tuple[Operation, str]]:
    return [(operation, a) for operation in operations for a in algorithms_for(operation)]


def cases(operation: Operation) -> list[tuple[int, int, int]]:
    """World sizes, counts of elements and roots."""
    return [
        (world, count, root)
        for world, count in itertools.product(WORLDS, COUNTS)
        for root in sorted({0, world - 1} if operation in ROOTED else {0})
    ]


def plans_of(operation: Operation, algorithm: str, world: int, root: int) -> list[Plan]:
    nodes = tuple(rank * 2 // world for rank in range(world))
    return [
        make_plan(operation, algorithm, world, rank, root=root, nodes=nodes)
        for rank in range(world)
    ]


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    pairs(Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE),
)
def test_operations_on_one_buffer(operation: Operation, algorithm: str) -> None:
    for world, count, root in cases(operation):
        check_one_buffer(operation, algorithm, world, count, root)


def check_one_buffer(
    operation: Operation, algorithm: str, world: int, count: int, root: int
) -> None:
    plans = plans_of(operation, algorithm, world, root)
    arrays = [np.arange(count) + 100 * rank for rank in range(world)]
    before = [array.copy() for array in arrays]
    results = [
        array if operation is not Operation.REDUCE or rank == root else None
        for rank, array in enumerate(arrays)
    ]
    run(
        plans,
        [
            chunks_of(plan, array, result)
            for plan, array, result in zip(plans, arrays, results, strict=True)
        ],
    )
    total = np.sum(before, axis=0)
    for rank, array in enumerate(arrays):
        if operation is Operation.BROADCAST:
            wanted = before[root]
        elif operation is Operation.REDUCE and rank != root:
            wanted = before[rank]
        else:
            wanted = total
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    pairs(
        Operation.ALL_GATHER,
        Operation.GATHER,
        Operation.SCATTER,
        Operation.REDUCE_SCATTER,
        Operation.ALL_TO_ALL,
    ),
)
def test_operations_with_a_part_for_each_rank(operation: Operation, algorithm: str) -> None:
    for world, count, root in cases(operation):
        check_parts(operation, algorithm, world, count, root)


def check_parts(operation: Operation, algorithm: str, world: int, count: int, root: int) -> None:
    plans = plans_of(operation, algorithm, world, root)
    gathers = operation in (Operation.ALL_GATHER, Operation.GATHER)
    whole, one = world * count, count
    sources: list[Array | None] = []
    results: list[Array | None] = []
    for rank in range(world):
        length = one if gathers else whole
        out = one if operation in (Operation.SCATTER, Operation.REDUCE_SCATTER) else whole
        has_source = operation is not Operation.SCATTER or rank == root
        has_result = operation is not Operation.GATHER or rank == root
        sources.append(np.arange(length) + 1000 * rank if has_source else None)
        results.append(np.full(out, -1) if has_result else None)
    before = [None if array is None else array.copy() for array in sources]
    run(
        plans,
        [
            chunks_of(plan, source, result)
            for plan, source, result in zip(plans, sources, results, strict=True)
        ],
    )
    for rank in range(world):
        if before[rank] is not None:
            np.testing.assert_array_equal(sources[rank], before[rank])
        if results[rank] is None:
            continue
        if gathers:
            wanted = np.concatenate([array for array in before if array is not None])
        elif operation is Operation.SCATTER:
            source = before[root]
            assert source is not None
            wanted = source.reshape(world, count)[rank]
        else:
            table = np.array(before).reshape(world, world, count)
            wanted = (
                table.sum(axis=0)[rank]
                if operation is Operation.REDUCE_SCATTER
                else table[:, rank].reshape(-1)
            )
        np.testing.assert_array_equal(results[rank], wanted)


def test_no_memory_is_taken_where_the_users_can_be_used() -> None:
    array = np.zeros(12)
    plan = make_plan(Operation.ALL_REDUCE, "ring", 3, 0)
    for chunk in chunks_of(plan, array, array).values():
        assert np.shares_memory(chunk, array)
    output, mine = np.zeros(12), np.ones(4)
    plan = make_plan(Operation.ALL_GATHER, "ring", 3, 1)
    for chunk in chunks_of(plan, mine, output).values():
        assert np.shares_memory(chunk, output)


def test_inputs_that_may_not_be_written_are_only_read() -> None:
    for operation, algorithm in pairs(
        Operation.REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL
    ):
        for world, count, root in cases(operation):
            for plan in plans_of(operation, algorithm, world, root):
                source = np.arange(
                    world * count
                    if operation in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)
                    else count
                )
                source.flags.writeable = False
                if operation is Operation.REDUCE:
                    if plan.rank == root:
                        continue
                    result = None
                else:
                    result = np.zeros(
                        count if operation is Operation.REDUCE_SCATTER else world * count, dtype=int
                    )
                chunks = chunks_of(plan, source, result)
                for step in plan.steps:
                    if step.action is not Action.SEND:
                        assert chunks[step.chunk].flags.writeable


def test_a_layout_serves_call_after_call() -> None:
    """What was compiled knows no memory: each call has its own arrays, and its own scratch."""
    plan = make_plan(Operation.REDUCE_SCATTER, "ring", 3, 0)
    layout = lay_out(plan, 6, 2)
    first, second = (
        layout.chunks(layout.buffers(np.full(6, value), np.zeros(2, int))) for value in (1, 2)
    )
    for chunk in first:
        assert not np.shares_memory(first[chunk], second[chunk])
        assert first[chunk].tolist() == [1, 1]
        assert second[chunk].tolist() == [2, 2]
