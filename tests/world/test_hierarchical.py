"""Hierarchical plans: several nodes with several workers, shared memory inside, links between."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core.context import DistributedContext
from potluck.errors import Desync, OperationTimeout, PeerLost
from support.worlds import NATIVE_KINDS, open_world

KINDS = ("tls+shm", *(("native+shm", "mixed+shm") if NATIVE_KINDS else ()))
"""Every rank's loop in Python, natively, and every second rank's."""

HIERARCHICAL = "hierarchical"

Act = Callable[[DistributedContext], object]


def check_all(ctx: DistributedContext, count: int, seed: int) -> None:
    """Every operation on whole numbers, which add exactly in any order, against NumPy."""
    size, rank = ctx.world_size, ctx.rank
    rng = np.random.default_rng(seed)
    everyones = rng.integers(-50, 50, (size, size, count)).astype(np.float32)
    mine = everyones[rank]
    root = seed % size
    total = everyones.sum(0)

    for op, wanted in (
        ("sum", total),
        ("mean", total / np.float32(size)),
        ("max", everyones.max(0)),
    ):
        result = ctx.all_reduce(mine.copy(), op, algorithm=HIERARCHICAL)
        np.testing.assert_array_equal(result, wanted)
    kept = mine.copy()
    result = ctx.reduce(kept, root, algorithm=HIERARCHICAL)
    np.testing.assert_array_equal(result, total if rank == root else mine)
    result = ctx.broadcast(mine.copy(), root, algorithm=HIERARCHICAL)
    np.testing.assert_array_equal(result, everyones[root])
    kept = mine.copy()
    result = ctx.reduce_scatter(kept, "mean", algorithm=HIERARCHICAL)
    np.testing.assert_array_equal(result, (total / np.float32(size))[rank])
    np.testing.assert_array_equal(kept, mine)
    result = ctx.all_gather(mine[0], algorithm=HIERARCHICAL)
    np.testing.assert_array_equal(result, everyones[:, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 0, 1), (0, 0, 1, 2)])
def test_every_operation_over_every_kind_of_link(kind: str, nodes: tuple[int, ...]) -> None:
    with open_world(kind, len(nodes), nodes=nodes, segment_bytes=4096) as world:
        for count in (0, 1, 5, 3001):
            world.run(lambda ctx, count=count: check_all(ctx, count, count + 1))


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), data=st.data())
def test_any_number_of_workers_on_each_node(sizes: list[int], data: st.DataObject) -> None:
    """One to three nodes of one to three workers, in any order of ranks."""
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    nodes = data.draw(st.permutations(nodes))
    count = data.draw(st.integers(0, 20_000))
    seed = data.draw(st.integers(0, 100))
    with open_world(KINDS[-1], len(nodes), nodes=nodes, segment_bytes=8192) as world:
        world.run(lambda ctx: check_all(ctx, count, seed))


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_overlap_give_what_each_should(kind: str) -> None:
    """Many calls under way, of several kinds and algorithms, waited for in another order."""

    def act(ctx: DistributedContext) -> None:
        works = []
        for number in range(30):
            array = np.full(number * 37, float(ctx.rank + number))
            algorithm = (HIERARCHICAL, None, "direct")[number % 3]
            if number % 4 == 1:
                work = ctx.broadcast(array, number % 5, algorithm=algorithm, async_op=True)
                wanted = float(number % 5 + number)
            else:
                work = ctx.all_reduce(array, algorithm=algorithm, async_op=True)
                wanted = float(5 * number + 10)
            works.append((work, wanted))
        for work, wanted in works[::-1] if ctx.rank % 2 else works:
            assert (work.wait() == wanted).all()

    with open_world(kind, 5, nodes=(0, 0, 1, 1, 1)) as world:
        world.run(act)


x = np.ones


def begin(ctx: DistributedContext) -> None:
    """Once through all steps, so that the links are there."""
    ctx.all_reduce(x(10), algorithm=HIERARCHICAL)


DISAGREEMENTS: dict[str, tuple[Act, Act]] = {
    "shape": (
        lambda ctx: ctx.all_reduce(x(1000), algorithm=HIERARCHICAL),
        lambda ctx: ctx.all_reduce(x(1001), algorithm=HIERARCHICAL),
    ),
    "op": (
        lambda ctx: ctx.all_reduce(x(1000), "sum", algorithm=HIERARCHICAL),
        lambda ctx: ctx.all_reduce(x(1000), "mean", algorithm=HIERARCHICAL),
    ),
    "dtype": (
        lambda ctx: ctx.all_reduce(x(1000, "f4"), algorithm=HIERARCHICAL),
        lambda ctx: ctx.all_reduce(x(1000, "i4"), algorithm=HIERARCHICAL),
    ),
    "operation": (
        lambda ctx: ctx.all_reduce(x(1000), algorithm=HIERARCHICAL),
        lambda ctx: ctx.broadcast(x(1000), algorithm=HIERARCHICAL),
    ),
    "algorithm": (
        lambda ctx: ctx.all_reduce(x(1000), algorithm=HIERARCHICAL),
        lambda ctx: ctx.all_reduce(x(1000), algorithm="ring"),
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("odd", [0, 2, 3])
def test_ranks_that_disagree_all_hear_of_it(what: str, odd: int) -> None:
    usual, other = DISAGREEMENTS[what]

    def act(ctx: DistributedContext) -> None:
        with pytest.raises(Desync, match="ranks disagree in epoch 1"):
            (other if ctx.rank == odd else usual)(ctx)

    with open_world(KINDS[odd % len(KINDS)], 4, nodes=(0, 0, 1, 1), timeout_s=20) as world:
        world.run(begin)
        world.run(act)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("silent", [0, 3])
def test_a_rank_that_does_not_call_is_named_on_all(kind: str, silent: int) -> None:
    called = threading.Barrier(3)

    def act(ctx: DistributedContext) -> None:
        if ctx.rank != silent:
            # All callers call before the deadline: a rank that is late is named, and rightly.
            called.wait(20)
            work = ctx.all_reduce(x(100_000), algorithm=HIERARCHICAL, timeout=1.5, async_op=True)
            called.wait(20)
            with pytest.raises(OperationTimeout, match="all_reduce") as caught:
                work.wait()
            assert caught.value.rank == silent, caught.value
            assert HIERARCHICAL in caught.value.operation

    with open_world(kind, 4, nodes=(0, 0, 1, 1)) as world:
        world.run(begin)
        world.run(act)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_leaves_is_lost_to_every_rank_of_every_node(kind: str) -> None:
    def act(ctx: DistributedContext) -> None:
        if ctx.rank == 3:
            ctx.close()
        else:
            with pytest.raises(PeerLost) as caught:
                ctx.all_reduce(x(100_000), algorithm=HIERARCHICAL)
            assert caught.value.rank == 3

    with open_world(kind, 5, nodes=(0, 0, 1, 1, 2)) as world:
        world.run(begin)
        world.run(act)


SITES = [0, 0, 0, 1, 1, 2]
"""The racks of six nodes; racks 0 and 1 are in one house, 2 in another."""


def rate(a: int, b: int) -> float:
    """Bytes per second between two nodes: within a rack, within a house, between houses."""
    if SITES[a] == SITES[b]:
        return 1e9
    return 1e8 if 2 not in (SITES[a], SITES[b]) else 2e6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [(0, 1, 2, 3, 4, 5), (0, 0, 1, 3, 4, 4, 5), (5, 0, 3, 0, 5, 1)])
def test_every_operation_over_nested_levels(kind: str, nodes: tuple[int, ...]) -> None:
    """node < rack < house, found from what was measured."""
    size = len(nodes)
    with open_world(kind, size, nodes=nodes, rates=rate, segment_bytes=4096) as world:
        for count in (0, 1, 3001):
            world.run(lambda ctx, count=count: check_all(ctx, count, count + 1))

        def without_a_word(ctx: DistributedContext) -> int:
            def num_hierarchical() -> int:
                algorithms = ctx.stats()["operations"]["all_reduce"]["algorithms"]
                return int(algorithms.get(HIERARCHICAL, 0))

            before = num_hierarchical()
            array = np.full(1 << 18, ctx.rank + 1.0, np.float32)
            assert (ctx.all_reduce(array) == size * (size + 1) / 2).all()
            chosen = num_hierarchical() - before
            coded = ctx.all_reduce(np.full(256, 127.0, np.float32), codec="int8")
            assert (coded == 127 * size).all()
            return chosen

        assert world.run(without_a_word) == [1] * size
