"""The progress loops, with peers that take what comes as the test wants it."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan, Step
from potluck._core.engine.arrays.layout import lay_out
from potluck._core.engine.call import Call
from potluck._core.engine.loop.native import NativeLoop, is_available
from potluck._core.engine.loop.progress import ProgressLoop
from potluck._core.engine.loop.running import CompiledPlan
from potluck._core.engine.work import Work, deadline_after
from potluck._core.metrics import LinkMeter
from potluck._core.transport.inproc import inproc_pair
from potluck._core.transport.link import Link
from potluck._core.types import Group, Member
from potluck._core.wire import frames
from potluck._core.wire.frames import FRAME_BYTES, Abort, Frame, Kind
from potluck.errors import LinkError, PeerLost, Refused
from support.links import tls_ends

SEGMENT, NUM_SEGMENTS = 64 << 10, 24
TLS_RECORD, TLS_OVERHEAD = 16 << 10, 22
FRAME = FRAME_BYTES + SEGMENT + TLS_OVERHEAD * (1 + SEGMENT // TLS_RECORD)
"""A frame with a segment on the wire: its header is a record of its own."""
KERNEL_BYTES = 8 << 10
PATIENCE_S = 20.0
needs_native = pytest.mark.skipif(not is_available(), reason="no native loop")


class TwoPeers:
    """A Connector whose peers are the test."""

    def __init__(self, is_native: bool) -> None:
        self.ends: dict[int, socket.socket] = {}
        self._is_native = is_native

    def start(self, deliver: Callable[[int, Link], None], fail: Any) -> None:
        for rank in (1, 2):
            mine, theirs = socket.socketpair()
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
            # The test takes records as they come, and looks into none.
            self.ends[rank] = theirs.dup()
            link, other = tls_ends(mine, theirs, native=(self._is_native, False))
            other.close()
            self.ends[rank].settimeout(PATIENCE_S)
            deliver(rank, link)

    def request(self, rank: int) -> None:
        raise AssertionError(f"rank {rank} has a link")

    def close(self, error: BaseException) -> None:
        for end in self.ends.values():
            end.close()


@contextlib.contextmanager
def sending_to_two(engine: str, nbytes: int) -> Iterator[tuple[Work, dict[int, socket.socket]]]:
    """Rank 0 of three sends one chunk of ``nbytes`` to both others."""
    connector = TwoPeers(engine == "native")
    made = NativeLoop if engine == "native" else ProgressLoop
    with sending(made, connector, (1, 2), nbytes) as work:
        yield work, connector.ends


@contextlib.contextmanager
def sending(made: Any, connector: Any, to: Sequence[int], nbytes: int) -> Iterator[Work]:
    members = tuple(Member(worker=str(rank)) for rank in range(3))
    group = Group(epoch=1, rank=0, members=members)
    loop = made(
        group,
        connector,
        segment_bytes=SEGMENT,
        max_early_bytes=1 << 30,
        on_operation=lambda *_: None,
        meter=lambda name: LinkMeter(),
    )
    work = Work("broadcast")
    steps = tuple(Step(Action.SEND, rank, 0) for rank in to)
    plan = Plan(Operation.BROADCAST, Algorithm.CENTRALIZED, 3, 0, 1, steps)
    chunk = np.ones(nbytes, np.uint8)
    compiled = CompiledPlan(
        plan,
        Call(plan.operation, plan.algorithm, "uint8", (), None, 0, SEGMENT),
        lay_out(plan, nbytes, nbytes),
        channel=0,
        peers=(0, 1, 2),
        dtype=chunk.dtype,
    )
    buffers = compiled.layout.buffers(chunk, chunk)
    loop.start(compiled, buffers, work, 0, deadline_after(PATIENCE_S))
    yield work
    connector.close(RuntimeError("done"))
    loop.close()


@pytest.mark.parametrize("engine", ["python", pytest.param("native", marks=needs_native)])
def test_a_link_that_is_ahead_waits_for_one_that_is_full(engine: str) -> None:
    """Rank 1 takes all that comes, rank 2 a little now and then: both are told at its pace."""
    with sending_to_two(engine, NUM_SEGMENTS * SEGMENT) as (work, ends):
        willing, slow = ends[1], ends[2]
        came = {willing: 0, slow: 0}
        # Rank 2 is told a segment when rank 1 has it: from then on its link is full.
        for end, nbytes in ((willing, FRAME), (slow, KERNEL_BYTES // 2)):
            while came[end] < nbytes:
                came[end] += len(end.recv(nbytes - came[end]))
        total = NUM_SEGMENTS * FRAME
        while min(came.values()) < total:
            turn = willing if select.select([willing], [], [], 0.01)[0] else slow
            if came[turn] == total:
                turn = slow if turn is willing else willing
            came[turn] += len(turn.recv(SEGMENT))
            # A segment ahead, one under way, one counted when it began, and what the kernel holds.
            assert came[willing] <= came[slow] + 3 * FRAME + 16 * KERNEL_BYTES
        work.wait(PATIENCE_S)


class Unreachable:
    """A Connector that can make no link, and then learns that the peer has given this rank up."""

    def start(self, deliver: Any, fail: Callable[[int, Exception], None]) -> None:
        self.fail = fail

    def request(self, rank: int) -> None:
        self.fail(rank, LinkError("the cable is cut"))
        self.fail(rank, Refused("rank 0 was lost", code="over:PeerLost:0:1"))

    def close(self, error: BaseException) -> None:
        pass


@pytest.mark.parametrize("engine", ["python", pytest.param("native", marks=needs_native)])
def test_the_first_reason_why_there_is_no_link_counts(engine: str) -> None:
    made = NativeLoop if engine == "native" else ProgressLoop
    with sending(made, Unreachable(), (1,), SEGMENT) as work:
        with pytest.raises(PeerLost, match="the cable is cut") as caught:
            work.wait(PATIENCE_S)
        assert caught.value.rank == 1


class Parting:
    """A Connector whose peer, rank 1, says that rank 2 is lost and closes while written to."""

    def start(self, deliver: Callable[[int, Link], None], fail: Any) -> None:
        mine, theirs = inproc_pair("rank 1", "rank 0")
        send = mine.send

        def send_too_late(data: memoryview) -> int:
            mine.send = send
            body = frames.encode_abort(Abort("PeerLost", "lost rank 2", 2, certain=True))
            words = Frame(Kind.ABORT, 1, length=len(body), source=1)
            assert theirs.send(memoryview(frames.encode(words) + body)) == FRAME_BYTES + len(body)
            theirs.close()
            return send(data)

        mine.send = send_too_late
        deliver(1, mine)

    def request(self, rank: int) -> None:
        raise AssertionError(f"rank {rank} has a link")

    def close(self, error: BaseException) -> None:
        pass


def test_the_last_words_of_a_peer_that_can_not_be_written_to_are_heard() -> None:
    """It has told who is really lost; that its link is gone comes of that."""
    with sending(ProgressLoop, Parting(), (1,), 1000) as work, pytest.raises(PeerLost) as caught:
        work.wait(PATIENCE_S)
    assert caught.value.rank == 2


@needs_native
def test_a_work_is_done_as_soon_as_its_bytes_are_while_this_thread_keeps_the_lock() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # nobody may ask for the lock back
    try:
        with sending_to_two("native", KERNEL_BYTES // 8) as (work, _):
            deadline = time.monotonic() + PATIENCE_S
            while not work.done() and time.monotonic() < deadline:
                pass
            assert work.done()
    finally:
        sys.setswitchinterval(interval)
