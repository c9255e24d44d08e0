"""Whole progress loops of rank 0, whose peers are played by the test: frames on real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan, Step
from potluck._core.engine import call as engine_call
from potluck._core.engine.arrays.layout import Buffers, Layout
from potluck._core.engine.loop import mailbox
from potluck._core.engine.loop.native import NativeLoop, is_available
from potluck._core.engine.loop.progress import ProgressLoop
from potluck._core.engine.loop.running import CompiledPlan, as_bytes
from potluck._core.engine.work import Work, deadline_after
from potluck._core.metrics import LinkMeter
from potluck._core.transport.link import Link
from potluck._core.types import Group, Member, ReduceOp
from potluck._core.wire import frames
from potluck._core.wire.dtypes import code_of
from potluck._core.wire.frames import FRAME_BYTES, Frame, Kind
from potluck.errors import LinkError
from support.links import Blocking, tls_ends

EPOCH = 1
SEGMENT = 64 << 10
PATIENCE_S = 60.0
needs_native = pytest.mark.skipif(not is_available(), reason="no native loop")


class Peer:
    """The other end of one link: says and hears frames."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.link = link
        self._blocking = Blocking(link, PATIENCE_S)

    def say(self, kind: Kind, payload: bytes = b"", **fields: int) -> None:
        frame = Frame(kind, EPOCH, length=len(payload), source=self.rank)._replace(**fields)
        self._blocking.send_all(frames.encode(frame) + payload)

    def hear(self, kind: Kind, *, after: Kind | None = None) -> tuple[Frame, bytes]:
        """The next frame, which must be of this kind; but on a busy machine any call may stall, and
        one of the kind ``after`` may come before."""
        frame, payload = self._next()
        while kind is not frame.kind and (
            (frame.kind is Kind.HANG_QUERY and not frame.segment) or frame.kind is after
        ):
            frame, payload = self._next()
        assert frame.kind is kind, f"{frame} came instead of {kind.name}"
        assert (frame.epoch, frame.source) == (EPOCH, 0)
        return frame, payload

    def _next(self) -> tuple[Frame, bytes]:
        frame = frames.decode(self._blocking.receive(FRAME_BYTES))
        return frame, self._blocking.receive(frame.length)

    def hears_end(self) -> bool:
        with pytest.raises(LinkError, match="closed"):
            self._blocking.receive(1)
        return True


class _Peers:
    """A Connector whose peers are the test."""

    def __init__(self, is_native: bool, num_peers: int) -> None:
        self._is_native = is_native
        self._num_peers = num_peers
        self.by_rank: dict[int, Peer] = {}

    def start(self, deliver: Callable[[int, Link], None], fail: Any) -> None:
        for rank in range(1, self._num_peers + 1):
            mine, theirs = tls_ends(*socket.socketpair(), native=(self._is_native, False))
            self.by_rank[rank] = Peer(rank, theirs)
            deliver(rank, mine)

    def request(self, rank: int) -> None:
        raise AssertionError(f"rank {rank} has a link")

    def close(self, error: BaseException) -> None:
        pass  # the loop has ended: what it said last is still to be heard


class Call:
    """One collective of rank 0."""

    def __init__(
        self,
        rank0: LoopOfRank0,
        steps: tuple[tuple[Action, int], ...],
        data: bytes,
        sequence: int,
        timeout_s: float,
    ) -> None:
        plan = Plan(
            Operation.ALL_REDUCE,
            Algorithm.RING,
            len(rank0.members),
            0,
            1,
            tuple(Step(action, rank, 0) for action, rank in steps),
        )
        self.data = np.frombuffer(bytearray(data), np.uint8)
        self.work = Work("all_reduce")
        self._timeout_s = timeout_s
        self._sequence = sequence
        self._ranks = rank0.members
        self._plan = plan
        self._call = engine_call.Call(
            plan.operation, plan.algorithm, "uint8", self.data.shape, ReduceOp.SUM, 0, SEGMENT
        )
        self.fingerprint = self._call.fingerprint

    def begin(self, loop: Any) -> None:
        layout = Layout()
        layout.places[0] = layout.scratch(self.data.size)
        compiled = CompiledPlan(
            self._plan, self._call, layout, channel=0, peers=self._ranks, dtype=self.data.dtype
        )
        buffers = Buffers(None, None, self.data)
        deadline = deadline_after(self._timeout_s)
        loop.start(compiled, buffers, self.work, self._sequence, deadline)


class LoopOfRank0:
    """Rank 0's loop, ``ranks[r]`` at the other end of its link to rank r."""

    def __init__(self, engine: str, num_peers: int, max_early_bytes: int) -> None:
        is_native = engine == "native"
        self._connector = _Peers(is_native, num_peers)
        members = tuple(Member(worker=str(rank)) for rank in range(num_peers + 1))
        self.loop: Any = (NativeLoop if is_native else ProgressLoop)(
            Group(epoch=EPOCH, rank=0, members=members),
            self._connector,
            segment_bytes=SEGMENT,
            max_early_bytes=max_early_bytes,
            on_operation=lambda *_: None,
            meter=lambda name: LinkMeter(),
        )
        self.ranks = self._connector.by_rank
        self.members = tuple(range(num_peers + 1))

    def send(self, to: int, data: bytes, tag: int = 0) -> Work:
        work = Work(f"send({len(data)} bytes)")
        array = np.frombuffer(bytearray(data), np.uint8)
        code = code_of(array.dtype)
        self.loop.send(
            mailbox.sending(to, 0, tag, code, 0, array, work, deadline_after(PATIENCE_S))
        )
        return work

    def receive(self, source: int, nbytes: int, tag: int = 0) -> tuple[Work, np.ndarray]:
        array = np.zeros(nbytes, np.uint8)
        work = Work(f"recv({nbytes} bytes)")
        data = as_bytes(array)
        code, deadline = code_of(array.dtype), deadline_after(PATIENCE_S)
        self.loop.receive(
            mailbox.Receiving(source, 0, self.members, tag, code, array, data, work, deadline)
        )
        return work, array

    def plan(
        self, *steps: tuple[Action, int], data: bytes, sequence: int = 0, timeout_s: float = 60.0
    ) -> Call:
        """A collective whose ``steps`` are all on one chunk, ``data``; not begun."""
        return Call(self, steps, data, sequence, timeout_s)

    def call(self, *steps: tuple[Action, int], **described: Any) -> Call:
        """The same, begun."""
        return self.start(self.plan(*steps, **described))

    def start(self, call: Call) -> Call:
        call.begin(self.loop)
        return call

    def end(self) -> None:
        for peer in self.ranks.values():
            peer.link.close()
        self.loop.close()


@pytest.fixture(params=["python", pytest.param("native", marks=needs_native)])
def loop_of(request: pytest.FixtureRequest) -> Iterator[Callable[..., LoopOfRank0]]:
    """Makes rank 0's loop with some peers; ended after the test."""
    made: list[LoopOfRank0] = []

    def make(num_peers: int = 1, max_early_bytes: int = 1 << 30) -> LoopOfRank0:
        made.append(LoopOfRank0(request.param, num_peers, max_early_bytes))
        return made[-1]

    yield make
    for each in made:
        each.end()
