"""Programs of many operations: random schedules, ranks far ahead, several user threads."""

from __future__ import annotations

import random
import threading
from datetime import timedelta

import numpy as np
import pytest

from potluck._core.backends.inprocess import MOST_NATIVE
from potluck._core.context import DistributedContext
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.loop.native import NativeLoop, is_available
from potluck._core.engine.loop.progress import ProgressLoop
from potluck.errors import OperationTimeout
from potluck.testing.world import run_world
from support.worlds import WORLD_KINDS, open_world

ALGORITHMS = ("ring", "tree", "direct", "centralized", None)


@pytest.mark.parametrize("kind", WORLD_KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_give_what_they_should(kind: str, size: int, seed: int) -> None:
    """All ranks run one random program, each with its own pauses, waits and order of waiting."""
    with open_world(kind, size, segment_bytes=4096, max_early_bytes=16_384) as world:
        world.run(lambda ctx: _run_program(ctx, seed, 120))


def _run_program(ctx: DistributedContext, seed: int, length: int) -> None:
    size, rank = ctx.world_size, ctx.rank
    program = random.Random(seed)  # equal on all ranks
    own = random.Random(seed * 1000 + rank)
    everyone = list(range(size))
    subsets = [everyone, everyone[::-1], everyone[:2], everyone[1:]]
    groups = [(ranks, ctx.new_group(ranks)) for ranks in subsets]
    waiting: list[tuple[int, str, object, np.ndarray, object]] = []
    for number in range(length):
        ranks, group = program.choice(groups)
        kind = program.choice(["all_reduce", "all_gather", "broadcast", "reduce", "message"])
        count = program.choice([0, 1, 5, 511, 3000, 20_000])
        algorithm = program.choice(
            (*ALGORITHMS, "doubling") if kind == "all_reduce" else ALGORITHMS
        )
        root = program.randrange(len(ranks))
        target = program.randrange(len(ranks))
        if group is None:
            continue
        mine = np.full(count, float(number + rank))
        me = group.rank
        if kind == "all_reduce":
            work = group.all_reduce(mine, algorithm=algorithm, async_op=True)
            wanted = float(sum(number + other for other in ranks))
            waiting.append((number, kind, work, mine, wanted))
        elif kind == "all_gather":
            work = group.all_gather(mine, async_op=True)
            column = np.array([number + other for other in ranks], dtype=float)
            waiting.append((number, kind, work, mine, column[:, None]))
        elif kind == "broadcast":
            work = group.broadcast(mine, root, async_op=True)
            waiting.append((number, kind, work, mine, float(number + ranks[root])))
        elif kind == "reduce":
            work = group.reduce(mine, root, "max", algorithm=algorithm_of(algorithm), async_op=True)
            best = max(ranks) if me == root else rank
            waiting.append((number, kind, work, mine, float(number + best)))
        elif root != target:
            if me == root:
                work = group.send(mine, target, tag=number, async_op=True)
                waiting.append((number, kind, work, mine, float(number + rank)))
            elif me == target:
                source = program_source(own, root)
                work = group.recv(mine, source, tag=number, async_op=True)
                waiting.append((number, kind, work, mine, float(number + ranks[root])))
        if own.random() < 0.3:
            own.shuffle(waiting)
            # Only what was posted on all ranks by now can be waited for: nothing else is.
            while waiting and own.random() < 0.7 and waiting[-1][1] != "message":
                _check(waiting.pop())
    for entry in waiting:
        _check(entry)


def algorithm_of(name: str | None) -> str | None:
    """The algorithms that a reduce has."""
    return None if name == "ring" else name


def program_source(own: random.Random, root: int) -> int:
    return own.choice([-1, root])


def _check(entry: tuple[int, str, object, np.ndarray, object]) -> None:
    number, kind, work, _, wanted = entry
    result = work.wait(30)  # type: ignore[attr-defined]
    assert (result == wanted).all(), (number, kind)


@pytest.mark.parametrize("kind", ["tls", "tls+shm"])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "doubling"])
def test_a_rank_far_behind_holds_the_others_back_and_then_all_completes(
    kind: str, algorithm: str
) -> None:
    """Rank 0 has posted 60 operations before rank 1 makes its first, blocking one at a time."""
    bound, num, count = 64 * 1024, 60, 8000
    ahead = threading.Event()

    def act(ctx: DistributedContext) -> int:
        ctx.barrier()
        arrays = [np.full(count, float(ctx.rank + number)) for number in range(num)]
        if ctx.rank == 0:
            works = [ctx.all_reduce(each, algorithm=algorithm, async_op=True) for each in arrays]
            ahead.set()
            for work in works:
                work.wait()
            most = 0
        else:
            assert ahead.wait(20)
            loop = ctx.communicator._resources.loop
            most = 0
            for each in arrays:
                ctx.all_reduce(each, algorithm=algorithm)
                most = max(most, loop._connections.flow(0).held_bytes)
        for number, each in enumerate(arrays):
            assert (each == 2 * number + 1).all()
        return most

    with open_world(kind, 2, segment_bytes=8 * 1024, max_early_bytes=bound, timeout_s=20) as world:
        _, most = world.run(act)
    assert most <= bound


def test_messages_pile_up_to_the_bound_and_no_further() -> None:
    """Small messages that nobody receives yet wait with their sender once the bound is reached."""
    bound, num = 64 * 1024, 200

    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            works = [
                ctx.send(np.full(4000, float(number)), 1, tag=number, async_op=True)
                for number in range(num)
            ]
            for work in works:
                work.wait()
        else:
            for number in reversed(range(num)) if ctx.rank == 2 else range(num):
                assert (ctx.recv(np.zeros(4000), 0, tag=number) == number).all()

    with open_world("tls", 2, max_early_bytes=bound, timeout_s=20) as world:
        world.run(act)


def test_messages_that_fill_the_share_do_not_stop_a_call_the_receiver_has_begun() -> None:
    """The receiver begins first, with an empty share; then messages for later take all of it."""
    begun, filled = threading.Event(), threading.Event()

    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        array = np.full(10_000, float(ctx.rank))
        if ctx.rank == 1:
            work = ctx.broadcast(array, 0, async_op=True)
            begun.set()
            assert filled.wait(20)
            work.wait()
            assert not array.any()
            for number in range(40):
                assert (ctx.recv(np.ones(100), 0, tag=number) == 0).all()
        else:
            assert begun.wait(20)
            sends = [ctx.send(np.zeros(100), 1, tag=tag, async_op=True) for tag in range(40)]
            filled.set()
            ctx.broadcast(array, 0)
            for send in sends:
                send.wait()

    with open_world("tls", 2, segment_bytes=4096, max_early_bytes=16_384, timeout_s=20) as world:
        world.run(act)


def test_the_timeout_of_a_context_and_that_of_a_sub_group_can_be_set() -> None:
    def act(ctx: DistributedContext) -> None:
        before, bad = ctx.new_group([0, 1]), (0, -1, float("nan"), "soon", None)
        assert before is not None
        for each in bad:
            with pytest.raises((TypeError, ValueError)):
                ctx.set_timeout(each)  # type: ignore[arg-type]
        ctx.set_timeout(timedelta(seconds=20))
        after = ctx.new_group([0, 1])
        assert after is not None
        assert (ctx.timeout_s, before.timeout_s, after.timeout_s) == (20.0, 30.0, 20.0)
        before.set_timeout(0.2)
        if ctx.rank == 0:
            with pytest.raises(OperationTimeout):
                before.recv(np.zeros(3), 1)
        else:
            with pytest.raises(OperationTimeout):
                ctx.barrier()

    with open_world("inproc", 2) as world:
        world.run(act)


def test_threads_of_one_rank_may_each_use_their_own_group() -> None:
    """Calls on one group must come in one order; groups are how threads stay apart."""

    def act(ctx: DistributedContext) -> None:
        groups = [ctx.new_group(range(ctx.world_size)) for _ in range(4)]
        failures: list[BaseException] = []

        def work(index: int) -> None:
            group = groups[index]
            assert group is not None
            try:
                for number in range(50):
                    array = np.full(300, float(number))
                    assert (group.all_reduce(array) == number * ctx.world_size).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    with open_world("inproc", 3) as world:
        world.run(act)


def test_a_callback_may_begin_the_next_operation() -> None:
    def act(ctx: DistributedContext) -> None:
        done = threading.Event()
        arrays = [np.ones(1000) for _ in range(10)]
        works = []

        def begin(index: int) -> None:
            work = ctx.all_reduce(arrays[index], async_op=True)
            works.append(work)
            if index + 1 < len(arrays):
                work.add_done_callback(lambda _: begin(index + 1))
            else:
                work.add_done_callback(lambda _: done.set())

        begin(0)
        assert done.wait(20)
        assert all((array == ctx.world_size).all() for array in arrays)
        ctx.barrier()

    with open_world("inproc", 3) as world:
        world.run(act)


def test_what_ranks_may_not_compute_for_themselves_is_refused_before_anything_is_sent() -> None:
    def act(ctx: DistributedContext) -> np.ndarray:
        for op in ("min", "max", "product"):
            with pytest.raises(ValueError, match="is for op='sum' and op='mean'"):
                ctx.all_reduce(np.ones(3), op, algorithm="doubling")
        return ctx.all_reduce(np.array([1.0, ctx.rank]), "mean", algorithm="doubling")

    with open_world("tls", 3) as world:
        for result in world.run(act):
            assert result.tolist() == [1, 1]


def test_in_process_worlds_run_on_the_native_loop_as_far_as_descriptors_suffice() -> None:
    def act(ctx: DistributedContext) -> type:
        ctx.barrier()
        assert isinstance(ctx.communicator, Communicator)
        return type(ctx.communicator._resources.loop)

    usual = NativeLoop if is_available() else ProgressLoop
    assert set(run_world(2, act)) == set(run_world(MOST_NATIVE, act)) == {usual}
    assert set(run_world(MOST_NATIVE + 1, act)) == {ProgressLoop}
