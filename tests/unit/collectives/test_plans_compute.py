"""A second reader of the plans: real arithmetic on NumPy arrays, in any order the rules allow.

It shares nothing with ``verify``. Links have buffers here; chunks may be empty; garbage is NaN.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan
from potluck._core.collectives.registry import ROOTED, algorithms_for, make_plan

Array = NDArray[np.float64]
COMPUTING = [operation for operation in Operation if operation is not Operation.BARRIER]
PAIRS = [(operation, a) for operation in COMPUTING for a in algorithms_for(operation)]
WORLDS = [
    (1, (0,)),
    (2, (0, 1)),
    (3, (0, 1, 1)),
    (5, (2, 0, 2, 2, 1)),
    (6, (0, 0, 1, 1, 2, 2)),
    (9, (0, 0, 0, 0, 1, 1, 2, 3, 3)),
]


def execute(plans: list[Plan], chunks: list[dict[int, Array]], rng: random.Random) -> None:
    """Run all plans; of the steps that may run, ``rng`` picks the next."""
    links: dict[tuple[int, int], deque[tuple[int, Array]]] = {}
    waiting = {(plan.rank, index) for plan in plans for index in range(len(plan.steps))}
    while waiting:
        ready = []
        for plan in plans:
            chunks_seen: set[int] = set()
            links_seen: set[tuple[int, bool]] = set()
            for index, (action, peer, chunk) in enumerate(plan.steps):
                if (plan.rank, index) not in waiting:
                    continue
                link = (peer, action is Action.SEND)
                arrived = action is Action.SEND or links.get((peer, plan.rank))
                if chunk not in chunks_seen and link not in links_seen and arrived:
                    ready.append((plan.rank, index))
                chunks_seen.add(chunk)
                links_seen.add(link)
        assert ready, "the plans are stuck"
        rank, index = rng.choice(ready)
        waiting.remove((rank, index))
        action, peer, chunk = plans[rank].steps[index]
        if action is Action.SEND:
            link_buffer = links.setdefault((rank, peer), deque())
            link_buffer.append((chunk, chunks[rank][chunk].copy()))
            continue
        arrived_chunk, theirs = links[peer, rank].popleft()
        assert arrived_chunk == chunk
        if action is Action.COPY:
            chunks[rank][chunk] = theirs
        else:
            chunks[rank][chunk] = chunks[rank][chunk] + theirs
    assert not any(links.values()), "frames were left on a link"


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_the_result_is_what_the_operation_promises(
    operation: Operation, algorithm: Algorithm
) -> None:
    for world_size, nodes in WORLDS:
        check_result(operation, algorithm, world_size, nodes)


def check_result(
    operation: Operation, algorithm: Algorithm, world_size: int, nodes: tuple[int, ...]
) -> None:
    seed = f"{operation} {algorithm} {world_size}"
    rng, numbers = random.Random(seed), np.random.default_rng(list(seed.encode()))
    root = rng.randrange(world_size) if operation in ROOTED else 0
    plans = [
        make_plan(operation, algorithm, world_size, rank, root=root, nodes=nodes)
        for rank in range(world_size)
    ]
    num_chunks = plans[0].num_chunks
    sizes = [rng.randrange(4) for _ in range(num_chunks)]
    given = [[numbers.standard_normal(size) for size in sizes] for _ in range(world_size)]
    garbage = [np.full(size, np.nan) for size in sizes]
    chunks = [dict(enumerate(garbage)) for _ in range(world_size)]
    expected: list[dict[int, Array]] = [{} for _ in range(world_size)]
    for rank in range(world_size):
        for chunk in range(num_chunks):
            total = np.sum([given[r][chunk] for r in range(world_size)], axis=0)
            match operation:
                case Operation.ALL_REDUCE:
                    has, wants = True, total
                case Operation.REDUCE:
                    has, wants = True, total if rank == root else None
                case Operation.REDUCE_SCATTER:
                    has, wants = True, total if chunk == rank else None
                case Operation.BROADCAST:
                    has, wants = rank == root, given[root][chunk]
                case Operation.SCATTER:
                    has = rank == root
                    wants = given[root][chunk] if chunk == rank or has else None
                case Operation.ALL_GATHER:
                    has, wants = chunk == rank, given[chunk][chunk]
                case Operation.GATHER:
                    has = chunk == rank
                    wants = given[chunk][chunk] if rank == root or has else None
                case _:
                    src, dst = divmod(chunk, world_size)
                    has = src == rank
                    wants = given[src][chunk] if rank in (src, dst) else None
            if has:
                chunks[rank][chunk] = given[rank][chunk].copy()
            if wants is not None:
                expected[rank][chunk] = wants
    execute(plans, chunks, rng)
    for rank in range(world_size):
        for chunk, wants in expected[rank].items():
            found = chunks[rank][chunk]
            np.testing.assert_allclose(found, wants, rtol=1e-12, atol=1e-12)
            if operation is Operation.ALL_REDUCE:
                assert found.tobytes() == chunks[0][chunk].tobytes(), "bits differ between ranks"


def test_the_order_of_addition_does_not_depend_on_the_schedule() -> None:
    """Additions of floats do not associate, so equal bits mean equal order."""
    values = np.random.default_rng(5).standard_normal((7, 64)) * 1e8
    for algorithm in algorithms_for(Operation.ALL_REDUCE):
        plans = [
            make_plan(Operation.ALL_REDUCE, algorithm, 7, rank, nodes=(0, 0, 0, 1, 1, 1, 1))
            for rank in range(7)
        ]
        outcomes = set()
        for seed in range(5):
            chunks = [
                dict(enumerate(np.array_split(values[rank], plans[0].num_chunks)))
                for rank in range(7)
            ]
            execute(plans, chunks, random.Random(seed))
            outcomes |= {
                b"".join(mine[chunk].tobytes() for chunk in sorted(mine)) for mine in chunks
            }
        assert len(outcomes) == 1
