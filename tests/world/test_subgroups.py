"""Sub-groups that are closed: what they held is released, and nothing else changes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from potluck._core import native
from potluck._core.collectives.plan import Operation
from potluck._core.context import DistributedContext
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.loop.progress import ProgressLoop
from potluck._core.engine.request import Request
from potluck._core.engine.shm.group import MAX_BYTES
from potluck.errors import Desync, GroupClosed, OperationTimeout, PeerLost
from support.worlds import WORLD_KINDS, open_world

kinds = pytest.mark.parametrize("kind", WORLD_KINDS)

SHARES_MEMORY = native.available
"""Whether calls in a world of the kind "shm" go through shared memory."""


def total(ctx: Any, value: float, size: int = 40) -> float:
    summed: float = ctx.all_reduce(np.full(size, value))[-1]
    return summed


def keyed(ctx: DistributedContext, key: str) -> Communicator:
    assert isinstance(ctx.communicator, Communicator)
    made = ctx.communicator.subgroup([1, 0], key=key)
    assert made is not None
    return made


def sum_on(communicator: Communicator, value: float) -> float:
    array = np.full(40, value)
    communicator.run(
        Request(Operation.ALL_REDUCE, array, array, op="sum", timeout_s=20)  # type: ignore[arg-type]
    ).wait()
    return float(array[-1])


def check_released(ctx: DistributedContext) -> None:
    """Nothing but the channel of the whole group is held. A collective call."""
    assert isinstance(ctx.communicator, Communicator)
    resources = ctx.communicator._shared
    resources.leave_dropped()
    ctx.barrier(algorithm="direct")  # the loop has taken what was posted before
    assert not resources.keyed
    assert not resources.dropped
    memory, loop = resources.shm, resources.loop
    if memory is not None:
        memory._drop_left()
        assert not memory._leaving
        assert len(memory._open) <= 1
        own = sum(opened.nbytes for opened in memory._open.values())
        assert memory.left_bytes == MAX_BYTES - own
        assert len(ctx.communicator.metrics._shared) == len(memory._open)
    if isinstance(loop, ProgressLoop):
        assert loop._plans._next_sequence.keys() == {0}
        assert loop._plans._ended.keys() == {0}
        assert all(flow._begun.keys() <= {0} for flow in loop._connections._flows.values())


@kinds
def test_groups_made_and_closed_leave_nothing_behind(kind: str) -> None:
    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        for number in range(60):
            group = ctx.new_group([1, 0])
            assert group is not None
            assert total(group, number + ctx.rank) == 2 * number + 1
            if ctx.rank == 0:
                group.send_message("done", 0)
            else:
                assert group.recv_message(1).payload == "done"
            if number % 2:
                group.close()
        del group  # the last reference is enough
        assert total(ctx, 1.0) == 2
        check_released(ctx)

    with open_world(kind, 2) as world:
        world.run(act)


@kinds
def test_a_group_of_the_same_key_goes_on_where_the_one_before_ended(kind: str) -> None:
    def act(ctx: DistributedContext) -> None:
        for number in range(30):
            first, second = keyed(ctx, "again"), keyed(ctx, "again")
            assert first is second
            assert sum_on(first, number + ctx.rank) == 2 * number + 1
            first.close()
            assert sum_on(second, 1.0) == 2  # another holder is left
            second.close()
            with pytest.raises(GroupClosed, match="closed here"):
                sum_on(second, 1.0)
        unused = keyed(ctx, "unused")
        unused.close()
        unused.close()
        check_released(ctx)
        assert isinstance(ctx.communicator, Communicator)
        assert len(ctx.communicator._shared.sequences) == 1, "a number for a key that was used"

    with open_world(kind, 2) as world:
        world.run(act)


@kinds
def test_ranks_may_close_a_group_and_make_it_again_at_different_moments(kind: str) -> None:
    has_closed = threading.Event()

    def act(ctx: DistributedContext) -> None:
        for number in range(10):
            group = keyed(ctx, "late")
            assert sum_on(group, float(ctx.rank)) == 1
            if ctx.rank == 1:
                assert has_closed.wait(20)  # rank 0 is in the next group by now
                has_closed.clear()
            group.close()
            again = keyed(ctx, "late")
            array = np.full(40, number + ctx.rank, np.float64)
            work = again.run(
                Request(Operation.ALL_REDUCE, array, array, op="sum", timeout_s=20)  # type: ignore[arg-type]
            )
            if ctx.rank == 0:
                has_closed.set()
            again.close()  # amid the call, and amid the setup of its memory
            work.wait()
            assert array[-1] == 2 * number + 1
        ctx.barrier()
        check_released(ctx)

    with open_world(kind, 2) as world:
        world.run(act)


@kinds
def test_a_call_under_way_ends_after_its_group_was_closed(kind: str) -> None:
    has_closed = threading.Event()

    def act(ctx: DistributedContext) -> None:
        group = ctx.new_group([0, 1])
        assert group is not None
        assert total(group, 1.0) == 2
        if ctx.rank == 0:
            works = [group.all_reduce(np.full(40, 3.0), async_op=True) for _ in range(3)]
            group.close()
            with pytest.raises(GroupClosed, match="sub-group was closed here"):
                group.all_reduce(np.ones(3))
            with pytest.raises(GroupClosed):
                group.barrier()
            with pytest.raises(GroupClosed):
                group.send(np.ones(3), 1)
            has_closed.set()
            assert [work.wait()[0] for work in works] == [7.0] * 3
        else:
            assert has_closed.wait(20)
            assert [total(group, 4.0) for _ in range(3)] == [7.0] * 3
            group.close()
        assert total(ctx, 1.0) == 2
        check_released(ctx)

    with open_world(kind, 2) as world:
        world.run(act)


@kinds
def test_a_call_on_a_group_that_the_other_rank_has_closed_fails_and_does_not_hang(
    kind: str,
) -> None:
    has_closed = threading.Event()

    def act(ctx: DistributedContext) -> None:
        group = ctx.new_group([0, 1])
        assert group is not None
        assert total(group, 1.0) == 2
        if ctx.rank == 1:
            group.close()
            has_closed.set()
            with pytest.raises((Desync, OperationTimeout)):
                ctx.barrier()
            return
        assert has_closed.wait(20)
        works = [group.all_reduce(np.ones(40), async_op=True, timeout=0.5) for _ in range(2)]
        group.close()
        for work in works:
            with pytest.raises((Desync, OperationTimeout)) as caught:
                work.wait()
            if kind == "shm" and SHARES_MEMORY:
                assert isinstance(caught.value, Desync)
                assert "closed the sub-group of this call" in str(caught.value)
            assert caught.value.rank == 1

    with open_world(kind, 2) as world:
        world.run(act)


@kinds
def test_a_rank_that_has_closed_a_group_is_not_blamed_for_its_earlier_calls(kind: str) -> None:
    """Rank 0 has done its part of a call, rank 2 has not; rank 1 waits for it."""
    done = threading.Event()

    def act(ctx: DistributedContext) -> None:
        ctx.barrier(algorithm="direct")
        group = ctx.new_group([0, 1, 2])
        assert group is not None
        options: dict[str, Any] = {"root": 1, "algorithm": "direct", "timeout": 1.0}
        if ctx.rank == 0:
            group.gather(np.ones(4), **options)
            group.close()
        elif ctx.rank == 1:
            with pytest.raises(OperationTimeout) as caught:
                group.gather(np.ones(4), **options)
            assert caught.value.rank == 2, caught.value
            done.set()
        assert done.wait(20)

    with open_world(kind, 3) as world:
        world.run(act)


@kinds
def test_groups_are_closed_after_a_rank_was_lost(kind: str) -> None:
    is_lost = threading.Event()

    def act(ctx: DistributedContext) -> None:
        groups = [ctx.new_group([0, 1]) for _ in range(3)]
        for group in groups:
            assert group is not None
            assert total(group, 1.0) == 2
        if ctx.rank == 1:
            ctx.close()
            is_lost.set()
            for group in groups:
                assert group is not None
                group.close()
            return
        assert is_lost.wait(20)
        first, second, third = groups
        assert first is not None
        assert second is not None
        assert third is not None
        first.close()
        with pytest.raises(PeerLost):
            second.all_reduce(np.ones(3))
        second.close()
        third.close()
        with pytest.raises(GroupClosed):
            third.all_reduce(np.ones(3))

    with open_world(kind, 2) as world:
        world.run(act)
