"""What every rank of a group hears when one of them does something else, nothing, or goes away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from potluck._core.backends.inprocess import InProcessBackend
from potluck._core.context import DistributedContext
from potluck.errors import (
    Desync,
    Evicted,
    GroupClosed,
    GroupError,
    OperationTimeout,
    PeerLost,
    RemoteError,
)
from potluck.testing.world import WorldError, run_world
from support.worlds import WORLD_KINDS, open_world, run_all

Act = Callable[[DistributedContext], object]
RING = "ring"


def x(count: int = 1000, dtype: str = "float64") -> np.ndarray:
    return np.ones(count, dtype=dtype)


def in_another_order(ctx: DistributedContext) -> None:
    ctx.all_gather(x())
    ctx.all_reduce(x())


DISAGREEMENTS: dict[str, tuple[Act, Act]] = {
    "shape": (lambda ctx: ctx.all_reduce(x(1000)), lambda ctx: ctx.all_reduce(x(1001))),
    "equal-bytes": (
        lambda ctx: ctx.all_reduce(x(1000).reshape(10, 100)),
        lambda ctx: ctx.all_reduce(x(1000).reshape(100, 10)),
    ),
    "dtype": (
        lambda ctx: ctx.all_reduce(x(8, "int64")),
        lambda ctx: ctx.all_reduce(x(8, "float64")),
    ),
    "op": (lambda ctx: ctx.all_reduce(x(), "sum"), lambda ctx: ctx.all_reduce(x(), "max")),
    "operation": (lambda ctx: ctx.all_reduce(x()), lambda ctx: ctx.broadcast(x())),
    "empty": (lambda ctx: ctx.all_reduce(x(0)), lambda ctx: ctx.barrier()),
    "algorithm": (
        lambda ctx: ctx.all_reduce(x(), algorithm="ring"),
        lambda ctx: ctx.all_reduce(x(), algorithm="direct"),
    ),
    "root": (lambda ctx: ctx.broadcast(x(), 0), lambda ctx: ctx.broadcast(x(), 1)),
    "root-of-reduce": (lambda ctx: ctx.reduce(x(), 2), lambda ctx: ctx.reduce(x(), 1)),
    "order": (
        lambda ctx: (ctx.all_reduce(x()), ctx.all_gather(x())),
        lambda ctx: (ctx.all_gather(x()), ctx.all_reduce(x())),
    ),
    "one-call-more": (
        lambda ctx: ctx.all_reduce(x()),
        lambda ctx: (ctx.all_reduce(x()), ctx.all_reduce(x())),
    ),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_all_hear_of_it_at_once(what: str, odd: int) -> None:
    usual, other = DISAGREEMENTS[what]
    linked = threading.Barrier(3)

    def act(ctx: DistributedContext) -> float:
        ctx.barrier()
        linked.wait(20)
        started = time.monotonic()
        with pytest.raises(Desync, match="ranks disagree in epoch 1") as caught:
            (other if ctx.rank == odd else usual)(ctx)
            ctx.barrier()  # what only sends may have ended before the others' frames came
        assert 0 <= caught.value.rank < 3
        with pytest.raises(Desync):
            ctx.barrier()
        return time.monotonic() - started

    assert max(run_world(3, act)) < 15.0, "half of the deadline of the calls"


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_a_disagreement_over_every_kind_of_link(kind: str) -> None:
    def act(ctx: DistributedContext) -> None:
        with pytest.raises(Desync):
            ctx.all_reduce(np.ones(300_000 + ctx.rank), algorithm=RING)

    with open_world(kind, 4) as world:
        world.run(act)


def test_a_message_of_another_size_or_dtype_than_the_receivers_array() -> None:
    for sent, array in ((x(10), x(11)), (x(20_000), x(19_999)), (x(4, "float32"), x(2))):

        def act(ctx: DistributedContext, sent=sent, array=array) -> None:
            with pytest.raises(Desync, match=r"sent \d+ bytes of float\d\d"):
                if ctx.rank == 0:
                    ctx.send(sent, 1)
                    ctx.barrier()
                else:
                    ctx.recv(array, 0)

        run_world(2, act)


def test_sub_groups_with_the_same_members_in_another_order_are_a_disagreement() -> None:
    def act(ctx: DistributedContext) -> None:
        group = ctx.new_group([0, 1] if ctx.rank == 0 else [1, 0])
        assert group is not None
        with pytest.raises(Desync):
            group.all_gather(x())
            group.barrier()

    run_world(2, act)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "direct", "centralized", "doubling"])
@pytest.mark.parametrize("silent", [0, 2, 4])
def test_a_rank_that_does_not_call_is_named_on_all(algorithm: str, silent: int) -> None:
    called, over = threading.Barrier(4), threading.Barrier(5)

    def act(ctx: DistributedContext) -> None:
        ctx.barrier(algorithm=RING)
        if ctx.rank == silent:
            over.wait(20)
            with pytest.raises(OperationTimeout) as caught:
                ctx.barrier()
        else:
            # Long enough for all callers to get so far: a rank that is only late would be named,
            # and rightly.
            called.wait(20)
            timeout = 1.5 + 0.05 * ctx.rank
            work = ctx.all_reduce(x(), algorithm=algorithm, timeout=timeout, async_op=True)
            called.wait(20)
            with pytest.raises(OperationTimeout, match="exceeded its timeout on") as caught:
                work.wait()
            over.wait(20)
        assert caught.value.rank == silent

    run_world(5, act)


def test_a_rank_that_never_came_is_named() -> None:
    """It has no links at all: its process may still be importing."""
    backends = InProcessBackend.world(3)
    called = threading.Barrier(2)

    def act(ctx: DistributedContext) -> None:
        called.wait(20)
        work = ctx.all_reduce(x(), timeout=1.5, algorithm=RING, async_op=True)
        called.wait(20)
        with pytest.raises(OperationTimeout) as caught:
            work.wait()
        assert caught.value.rank == 2

    run_all([lambda backend=backend: _with_context(backend, act) for backend in backends[:2]])


def _with_context(backend: InProcessBackend, act: Act) -> object:
    with DistributedContext(backend, timeout_s=30) as ctx:
        return act(ctx)


def test_receives_pass_their_deadline_too() -> None:
    linked = threading.Barrier(3)

    def act(ctx: DistributedContext) -> None:
        ctx.barrier(algorithm="direct")
        linked.wait(20)
        with pytest.raises(OperationTimeout, match="any rank") as caught:
            if ctx.rank == 0:
                ctx.recv(x(), -1, timeout=0.1)
            else:
                ctx.send(x(100_000), 3 - ctx.rank)
        assert caught.value.rank == -1

    run_world(3, act)


def test_waiting_with_a_timeout_does_not_end_the_operation() -> None:
    late = threading.Event()

    def act(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            work = ctx.all_reduce(x(), async_op=True)
            with pytest.raises(OperationTimeout, match="has not ended after"):
                work.wait(0.01)
            late.set()
            assert (work.wait() == 2).all()
        else:
            assert late.wait(20)
            ctx.all_reduce(x())

    run_world(2, act)


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_an_abort_reaches_everyone_with_rank_and_reason(kind: str) -> None:
    linked = threading.Barrier(5)

    def act(ctx: DistributedContext) -> None:
        ctx.barrier(algorithm=RING)
        linked.wait(20)
        if ctx.rank == 3:
            ctx.abort(ZeroDivisionError("of the loss"))
        with pytest.raises(
            RemoteError, match=r"rank 3 .* failed: ZeroDivisionError: of the loss"
        ) as e:
            ctx.all_reduce(x(300_000), algorithm=RING)
        assert (e.value.rank, e.value.epoch) == (3, 1)
        with pytest.raises(RemoteError):
            ctx.send(x(), (ctx.rank + 1) % 5)
        with pytest.raises(RemoteError):
            ctx.recv(x())

    with open_world(kind, 5) as world:
        world.run(act)


def test_an_exception_that_leaves_the_context_block_is_told_to_all() -> None:
    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            raise KeyError("lost my way")
        ctx.all_reduce(x())

    with pytest.raises(WorldError) as caught:
        run_world(3, act)
    assert isinstance(caught.value.errors[1], KeyError)
    for rank in (0, 2):
        assert isinstance(caught.value.errors[rank], RemoteError)
        assert "lost my way" in str(caught.value.errors[rank])


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_who_closes_early_is_lost_only_to_those_who_need_it(kind: str) -> None:
    left, summed = threading.Event(), threading.Barrier(2)

    def act(ctx: DistributedContext) -> None:
        ctx.barrier(algorithm="direct")
        pair = ctx.new_group([0, 1])
        three = ctx.new_group([0, 1, 2])
        if ctx.rank == 2:
            ctx.close()
            with pytest.raises(GroupClosed):
                ctx.barrier()
            left.set()
            return
        assert left.wait(20)
        assert pair is not None
        assert three is not None
        assert (pair.all_reduce(x()) == 2).all()
        summed.wait(20)  # a rank that finds the loss ends the group, and the other's sum with it
        with pytest.raises(PeerLost, match="left the group") as caught:
            three.all_reduce(x())
        assert caught.value.rank == 2

    with open_world(kind, 3) as world:
        world.run(act)


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_what_a_rank_sent_before_it_left_counts(kind: str) -> None:
    """Rank 2 is done with its part and leaves before rank 1 has even called."""
    left = threading.Event()

    def act(ctx: DistributedContext) -> None:
        ctx.barrier(algorithm="direct")
        mine = np.full(100_000, 1.0 + ctx.rank)
        if ctx.rank == 1:
            assert left.wait(20)
        ctx.reduce(mine, root=0, algorithm="centralized")
        if ctx.rank == 2:
            ctx.send(np.full(100, 7.0), 0, tag=3)
            ctx.close()
            left.set()
        if ctx.rank == 0:
            assert (mine == 6).all()
            assert (ctx.recv(np.zeros(100), 2, tag=3) == 7).all()

    with open_world(kind, 3) as world:
        world.run(act)


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_a_rank_that_left_before_anyone_was_linked_to_it_is_lost_at_once(kind: str) -> None:
    left = threading.Event()

    def act(ctx: DistributedContext) -> None:
        if ctx.rank == 1:
            ctx.communicator.close()
            left.set()
        else:
            assert left.wait(20)
            with pytest.raises(PeerLost, match="left the group") as caught:
                ctx.barrier()
            assert caught.value.rank == 1

    with open_world(kind, 2) as world:
        world.run(act)


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_who_leaves_over_a_receive_that_nobody_answered_is_lost_only_to_those_who_need_it(
    kind: str,
) -> None:
    left, summed = threading.Event(), threading.Barrier(2)

    def act(ctx: DistributedContext) -> None:
        ctx.barrier(algorithm="direct")
        pair = ctx.new_group([0, 1])
        if ctx.rank == 2:
            unanswered = ctx.recv(x(), 0, tag=5, async_op=True)
            ctx.close()
            with pytest.raises(GroupClosed):
                unanswered.wait()
            left.set()
            return
        assert left.wait(20)
        assert pair is not None
        assert (pair.all_reduce(x()) == 2).all()
        summed.wait(20)
        with pytest.raises(PeerLost, match="left the group") as caught:
            ctx.send(x(), 2, tag=5)
        assert caught.value.rank == 2

    with open_world(kind, 3) as world:
        world.run(act)


@pytest.mark.usefixtures("python_loop")  # it reaches into that
def test_who_leaves_has_lost_nobody_and_aborts_nobodys_group() -> None:
    """Rank 2 gives up its receive from rank 3, which leaves while rank 0 has not answered yet."""
    linked, begun, departed = threading.Barrier(4), threading.Event(), threading.Event()

    def act(ctx: DistributedContext) -> None:
        for source, target in ((0, 1), (0, 2), (2, 3)):  # all the links there are
            if ctx.rank == source:
                ctx.send(x(), target)
            elif ctx.rank == target:
                ctx.recv(x(), source)
        pair = ctx.new_group([0, 1])
        loop = ctx.communicator._resources.loop
        linked.wait(20)
        if ctx.rank == 0:
            loop._post(lambda: departed.wait(0.9))
        elif ctx.rank == 2:
            drop = loop._connections.drop

            def dropped(connection: Any) -> None:
                drop(connection)
                if connection.rank == 3:
                    departed.set()

            loop._connections.drop = dropped
            given_up = ctx.recv(x(), 3, tag=9, async_op=True)
            loop._post(loop._begin_close)
            loop._post(begun.set)
            ctx.close()
            with pytest.raises(GroupClosed):
                given_up.wait()
        elif ctx.rank == 3:
            assert begun.wait(20)
            ctx.close()
        if pair is not None:
            assert begun.wait(20)
            for _ in range(20):
                assert (pair.all_reduce(x()) == 2).all()

    run_world(4, act)


def test_closing_over_an_operation_under_way_ends_it_here_and_there() -> None:
    begun = threading.Event()

    def act(ctx: DistributedContext) -> None:
        if ctx.rank == 0:
            work = ctx.all_reduce(x(), async_op=True)
            ctx.close()
            with pytest.raises(GroupClosed):
                work.wait()
            begun.set()
        else:
            assert begun.wait(20)
            with pytest.raises(PeerLost) as caught:
                ctx.all_reduce(x())
            assert caught.value.rank == 0

    run_world(2, act)


def test_everyone_may_close_at_once_or_one_after_the_other() -> None:
    for _ in range(20):
        run_world(4, lambda ctx: ctx.all_reduce(x()))


def test_the_first_error_stays_and_a_fresh_one_is_raised_each_time() -> None:
    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        work = ctx.recv(x(), 1 - ctx.rank, async_op=True)
        if ctx.rank == 0:
            ctx.abort(ValueError("mine"))
        errors = []
        for _ in range(3):
            with pytest.raises(RemoteError, match="mine") as caught:
                work.wait()
            errors.append(caught.value)
        assert len({id(error) for error in errors}) == 3
        ctx.abort(ValueError("another"))
        with pytest.raises(RemoteError, match="mine"):
            ctx.barrier()
        assert work.done()
        assert isinstance(work.exception(), RemoteError)

    run_world(2, act)


def test_callbacks_run_once_whatever_they_raise(caplog: pytest.LogCaptureFixture) -> None:
    def too_late(work: object) -> None:
        raise RuntimeError("when all was over")

    def act(ctx: DistributedContext) -> None:
        called = []

        def callback(work: object) -> None:
            called.append(work)
            raise RuntimeError("in a callback")

        work = ctx.all_reduce(x(), async_op=True)
        work.add_done_callback(callback)
        assert (work.wait() == 2).all()
        assert (ctx.all_reduce(x()) == 2).all()
        late: list[object] = []
        work.add_done_callback(late.append)
        assert late == [work]
        work.add_done_callback(too_late)
        ctx.barrier()
        assert called == [work]

    run_world(2, act)
    assert "in a callback" in caplog.text
    assert "when all was over" in caplog.text


# ---------------------------------------------------------------- killed members


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree", "doubling"])
def test_a_killed_member_is_lost_on_every_survivor_and_the_next_group_works(
    algorithm: str, victim: int, seed: int
) -> None:
    """At any point of an all-reduce: the kill comes after a random number of its segments."""
    choose = np.random.default_rng(seed)
    for _ in range(6):
        backends = InProcessBackend.world(4, segment_bytes=1000)
        hub = backends[0].hub
        after = int(choose.integers(0, 60))
        meet = threading.Barrier(4)

        def act(ctx: DistributedContext, hub=hub, after=after, meet=meet) -> tuple[str, ...]:
            ctx.barrier(algorithm=RING)
            meet.wait(20)
            if ctx.rank == victim:
                _count_segments(ctx, after, lambda: hub.kill(str(victim)))
            mine = np.full(8000, ctx.rank + 1.0)
            try:
                while True:
                    ctx.all_reduce(mine.copy(), algorithm=algorithm)
            except PeerLost as error:
                if ctx.rank == victim:
                    assert "was killed" in str(error) or "cut" in str(error) or error.rank >= 0
                    with pytest.raises(Evicted):
                        ctx.reform(error)
                    return ()
                assert error.rank == victim, str(error)
                assert f"rank {victim} (worker {victim})" in str(error)
                ctx.reform(error)
            assert ctx.world_size == 3
            total = ctx.all_reduce(np.array([float(ctx.group.me.worker)]))
            assert total[0] == 6 - victim
            return tuple(member.worker for member in ctx.members)

        results = run_world(4, act, backends=backends)
        survivors = tuple(str(rank) for rank in range(4) if rank != victim)
        assert [each for each in results if each] == [survivors] * 3


def _count_segments(ctx: DistributedContext, after: int, act: Callable[[], None]) -> None:
    """Call ``act`` in another thread once this rank has received ``after`` frames more."""
    meter = ctx.communicator.metrics

    def received() -> int:
        return sum(link["messages_received"] for link in meter.snapshot().links.values())

    start = received()

    def watch() -> None:
        deadline = time.monotonic() + 20
        while received() - start < after and time.monotonic() < deadline:
            time.sleep(0)
        act()

    threading.Thread(target=watch, name="killer", daemon=True).start()


def test_a_blocked_call_of_the_killed_member_ends_too() -> None:
    backends = InProcessBackend.world(2)

    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            work = ctx.recv(x(), 0, async_op=True)
            backends[0].hub.kill("1")
            with pytest.raises(PeerLost):
                work.wait()
        else:
            with pytest.raises(PeerLost) as caught:
                ctx.recv(x(), 1)
            assert caught.value.rank == 1

    run_world(2, act, backends=backends)


def test_two_members_killed_at_once() -> None:
    backends = InProcessBackend.world(5)
    hub = backends[0].hub
    meet, killed = threading.Barrier(5), threading.Event()

    def act(ctx: DistributedContext) -> int:
        ctx.barrier()
        meet.wait(20)
        if ctx.rank == 0:
            hub.kill("2")
            hub.kill("4")
            killed.set()
        try:
            ctx.all_reduce(x(100_000))
            ctx.barrier()
        except PeerLost as error:
            if ctx.rank in (2, 4):
                assert killed.wait(20)  # rank 4 may hear of rank 2 first, and must not leave then
                return 0
            assert error.rank in (2, 4)
            while True:
                try:
                    ctx.reform(error)
                    return int(ctx.all_reduce(np.ones(1))[0])
                except GroupError as again:
                    error = again
        return -1

    assert run_world(5, act, backends=backends) == [3, 3, 0, 3, 0]


def test_survivors_that_time_out_meet_again_in_one_new_group() -> None:
    """Nobody died: all re-form at once, and there must be one next group, not two."""
    backends = InProcessBackend.world(4)
    meet = threading.Barrier(4)

    def act(ctx: DistributedContext) -> int:
        for _ in range(5):
            ctx.barrier(algorithm="direct")
            meet.wait(20)  # all are linked: a rank that comes too late is told so by its peers
            if ctx.rank:
                with pytest.raises(OperationTimeout):
                    ctx.all_reduce(x(), timeout=0.05)
            meet.wait(20)
            ctx.reform(OperationTimeout("all the same"))
            assert (ctx.all_reduce(x(), timeout=20) == 4).all()
            meet.wait(20)
        return ctx.epoch

    assert run_world(4, act, backends=backends) == [6] * 4


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_a_lost_peer_is_told_in_the_words_that_programs_search_for(kind: str) -> None:
    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            ctx.close()
            return
        with pytest.raises(PeerLost, match=r"lost rank 1 .*: Connection closed by peer: "):
            while True:
                ctx.all_reduce(np.ones(10))

    with open_world(kind, 2) as world:
        world.run(act)
