"""One of potluck's own threads breaks on one rank: all ranks are told that, not that it closed. And
one that a busy machine holds up."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from potluck._core.collectives.plan import Operation
from potluck._core.engine.loop.native import NativeLoop
from potluck._core.engine.loop.progress import ProgressLoop
from potluck._core.engine.request import Request
from potluck._core.types import ReduceOp
from potluck.errors import GroupError, PeerLost
from support.worlds import NATIVE_KINDS, open_world

WAIT_S = 30.0


def summing(array: np.ndarray, timeout_s: float, algorithm: str | None = None) -> Request:
    """An all_reduce of ``array``, in place."""
    return Request(
        Operation.ALL_REDUCE, array, array, ReduceOp.SUM, algorithm=algorithm, timeout_s=timeout_s
    )


def broken(*_: object) -> None:
    raise MemoryError("no room")


def assert_told(error: GroupError, what: str, rank: int) -> None:
    assert type(error) is GroupError
    assert error.rank == rank
    assert f"{what} on rank {rank} (worker {rank} at 127.0.0.1:" in str(error)
    assert "broke: MemoryError: no room. The script is not to blame: start it again" in str(error)


@pytest.mark.skipif(not NATIVE_KINDS, reason="needs the native loop")
def test_an_event_thread_that_breaks_ends_the_group_on_all_ranks_with_what_broke() -> None:
    with open_world("native", 2) as world:
        world.run(lambda ctx: ctx.barrier())
        first, second = (ctx.communicator for ctx in world.contexts)
        loop = second._resources.loop
        assert isinstance(loop, NativeLoop)
        waiting = first.run(summing(np.ones(4), 600))
        loop._hear = broken  # type: ignore[method-assign]
        failing = second.recv(np.ones(4), 0, 7, timeout_s=0.01)  # its end is an event
        for work in (failing, waiting):
            with pytest.raises(GroupError) as caught:
                work.wait(WAIT_S)
            assert_told(caught.value, "the event thread", 1)


def test_a_progress_loop_that_breaks_ends_the_group_on_all_ranks_with_what_broke() -> None:
    with open_world("tls", 2) as world:
        world.run(lambda ctx: ctx.barrier())
        first, second = (ctx.communicator for ctx in world.contexts)
        loop = second._resources.loop
        assert isinstance(loop, ProgressLoop)
        waiting = first.run(summing(np.ones(4), 600))
        loop._plans.begin = broken  # type: ignore[method-assign]
        failing = second.run(summing(np.ones(4), 600))
        for work in (failing, waiting):
            with pytest.raises(GroupError) as caught:
                work.wait(WAIT_S)
            assert_told(caught.value, "the progress loop", 1)


@pytest.mark.skipif(not NATIVE_KINDS, reason="needs the native loop")
def test_a_call_that_ends_before_the_event_thread_knows_why_says_why() -> None:
    """On a busy machine. GroupClosed would end an elastic script, which goes on after a loss."""
    may_hear = threading.Event()
    with open_world("native", 2) as world:
        world.run(lambda ctx: ctx.barrier())
        first, second = (ctx.communicator for ctx in world.contexts)
        loop = first._resources.loop
        assert isinstance(loop, NativeLoop)
        hear = loop._hear

        def hear_late(kind: str, subject: int) -> None:
            assert kind != "group failed" or may_hear.wait(WAIT_S)
            hear(kind, subject)

        loop._hear = hear_late  # type: ignore[method-assign]
        second.close()
        lost = first.send(np.ones(4), 1, 7, timeout_s=WAIT_S)
        refused = first.recv(np.ones(4), -1, 7, timeout_s=WAIT_S)
        try:
            for work in (refused, lost):
                with pytest.raises(PeerLost, match="it left the group"):
                    work.wait(WAIT_S)
        finally:
            may_hear.set()
