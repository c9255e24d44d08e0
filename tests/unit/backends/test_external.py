"""Communicators on other libraries: order, deadlines and ends, with a library made of an event; and
tensors of a device, with Gloo in the place of NCCL."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from potluck._core.backends.base import NUM_ASIDE_TAGS, StaticBackend
from potluck._core.backends.external import ExternalCommunicator
from potluck._core.backends.library import Collective, Library, Waiter
from potluck._core.collectives.plan import Operation
from potluck._core.context import DistributedContext
from potluck._core.types import Group, Member, ReduceOp
from potluck.errors import (
    GroupClosed,
    GroupError,
    OperationTimeout,
    PeerLost,
    PotluckError,
    RemoteError,
)
from potluck.testing.world import run_all


class Gate:
    """A library of one rank whose calls wait until the gate opens."""

    name = "gate"
    rank = 0
    world_size = 2
    device: str | None = None
    tag_limit = 99 + NUM_ASIDE_TAGS

    def __init__(self) -> None:
        self.open = threading.Event()
        self.calls: list[str] = []
        self.error: BaseException | None = None
        self.told: list[PotluckError] = []
        self.closed: list[bool] = []
        self.is_closed = threading.Event()

    def pass_through(self, name: str) -> None:
        self.calls.append(name)
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error

    def can_reduce(self, op: ReduceOp, dtype: Any) -> bool:
        return True

    @property
    def collectives(self) -> dict[Operation, Collective]:
        return {
            Operation.ALL_REDUCE: lambda call, _: self.pass_through(
                f"all_reduce {call.result[0]:g}"
            ),
            Operation.BROADCAST: lambda call, _: self.pass_through("broadcast"),
            Operation.BARRIER: lambda call, _: self.pass_through("barrier"),
        }

    def settle(self) -> None:
        return None

    def check_message(self, peer: int, tag: int) -> None:
        return None

    def send(self, array: Any, peer: int, tag: int) -> Waiter:
        self.calls.append(f"send {tag}")

        def wait(deadline: float) -> int:
            self.pass_through(f"sent {tag}")
            return peer

        return wait

    recv = send

    def split(self, ranks: tuple[int, ...], number: int, deadline: float) -> Library | None:
        part = Gate()
        part.open.set()
        part.closed, part.is_closed = self.closed, self.is_closed
        part.world_size = len(ranks)
        return part  # type: ignore[return-value]

    def listen(self, on_error: Callable[[PotluckError], None]) -> None:
        self.on_error = on_error

    def tell(self, error: PotluckError) -> None:
        self.told.append(error)

    def close(self, is_orderly: bool) -> None:
        self.closed.append(is_orderly)
        self.is_closed.set()


class GateBackend(StaticBackend[Any]):
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def form(
        self, after_epoch: int, cause: GroupError | None, timeout_s: float
    ) -> ExternalCommunicator:
        group = Group(1, 0, (Member("0"), Member("1")))
        library: Any = self.gate
        return ExternalCommunicator.open(group, library, timeout_s=timeout_s)

    def close(self) -> None:
        return None


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def ctx(gate: Gate) -> Any:
    with DistributedContext(GateBackend(gate), timeout_s=10) as context:
        yield context
        gate.open.set()


def test_collectives_run_one_after_the_other_in_the_order_of_the_calls(
    gate: Gate, ctx: DistributedContext
) -> None:
    works = [ctx.all_reduce(np.full(2, float(n)), async_op=True) for n in range(5)]
    assert not any(work.done() for work in works)
    gate.open.set()
    assert works[4].wait()[0] == 4
    assert gate.calls == [f"all_reduce {n}" for n in range(5)]
    assert ctx.stats()["operations"]


def test_messages_do_not_wait_for_each_other(gate: Gate, ctx: DistributedContext) -> None:
    ctx.send(np.ones(1), 1, tag=3, async_op=True)
    ctx.recv(np.ones(1), 1, tag=2, async_op=True)
    gate.open.set()
    ctx.send(np.ones(1), 1, tag=1)
    assert gate.calls.index("send 3") < gate.calls.index("send 2") < gate.calls.index("send 1")
    with pytest.raises(ValueError, match="tags of gate end at 99"):
        ctx.send(np.ones(1), 1, tag=100)


def test_an_operation_behind_a_long_one_ends_at_its_own_deadline(
    gate: Gate, ctx: DistributedContext
) -> None:
    long = ctx.all_reduce(np.ones(2), timeout=60, async_op=True)
    started = time.monotonic()
    with pytest.raises(OperationTimeout, match=r"broadcast\(float64, shape \(3,\)\) has not"):
        ctx.broadcast(np.ones(3), timeout=0.1)
    assert time.monotonic() - started < 30, "half of what the first may take"
    with pytest.raises(OperationTimeout):  # the group is over, for all
        long.wait()
    with pytest.raises(OperationTimeout):
        ctx.barrier()


def test_waiting_a_little_does_not_end_the_group(gate: Gate, ctx: DistributedContext) -> None:
    work = ctx.all_reduce(np.ones(2), async_op=True)
    with pytest.raises(OperationTimeout, match=r"has not ended after 0\.05 s"):
        work.wait(0.05)
    gate.open.set()
    assert work.wait() is not None


def test_the_librarys_error_names_the_call_and_ends_everything(
    gate: Gate, ctx: DistributedContext
) -> None:
    cause = RuntimeError("Connection closed by peer")
    gate.error = PeerLost("gate says: closed", rank=1, certain=True)
    gate.error.__cause__ = cause
    first = ctx.all_reduce(np.ones(2), async_op=True)
    second = ctx.recv(np.ones(1), 1, async_op=True)
    gate.open.set()
    for work in (first, second):
        with pytest.raises(PeerLost) as caught:
            work.wait()
        assert caught.value.rank == 1
        assert caught.value.epoch == 1
        assert caught.value.certain
        assert caught.value.__cause__ is cause
        assert "in epoch 1: gate says: closed" in str(caught.value)
    with pytest.raises(PeerLost):
        ctx.barrier()


def test_word_from_another_rank_ends_a_blocked_call(gate: Gate, ctx: DistributedContext) -> None:
    work = ctx.all_reduce(np.ones(2), async_op=True)
    gate.on_error(RemoteError("rank 1 failed: a bad batch", rank=1))
    with pytest.raises(RemoteError, match="a bad batch"):
        work.wait()


def test_an_abort_is_told_and_raised_here_too(gate: Gate, ctx: DistributedContext) -> None:
    work = ctx.all_reduce(np.ones(2), async_op=True)
    ctx.abort(ValueError("mine"))
    assert "ValueError: mine" in str(gate.told[0])
    with pytest.raises(RemoteError, match="ValueError: mine"):
        work.wait()


def test_closing_ends_what_is_blocked(gate: Gate) -> None:
    context = DistributedContext(GateBackend(gate), timeout_s=60)
    work = context.all_reduce(np.ones(2), async_op=True)
    started = time.monotonic()
    context.close()
    assert time.monotonic() - started < 30, "half of what the call may take"
    with pytest.raises(GroupClosed):
        work.wait()
    assert gate.closed == [False]
    gate.open.set()


def test_a_sub_group_is_given_back_with_its_last_reference(
    gate: Gate, ctx: DistributedContext
) -> None:
    group = ctx.new_group([1, 0])
    assert group is not None
    group.all_reduce(np.ones(1))
    assert gate.closed == []
    del group
    gc.collect()
    assert gate.is_closed.wait(20)  # the thread that ran its call may have had the last one
    assert gate.closed == [True]


def test_a_sub_group_that_is_closed_ends_its_calls_and_the_context_goes_on(
    gate: Gate, ctx: DistributedContext
) -> None:
    group = ctx.new_group([1, 0])
    assert group is not None
    part: Any = group.communicator
    part._library.open.clear()
    work = group.all_reduce(np.ones(1), async_op=True)
    group.close()
    group.close()
    with pytest.raises(GroupClosed, match="sub-group was closed here"):
        group.barrier()
    assert gate.closed == []
    part._library.open.set()
    work.wait()
    assert gate.is_closed.wait(20)
    assert gate.closed == [True]
    gate.open.set()
    ctx.barrier()


def test_a_word_that_is_no_algorithm_is_refused(ctx: DistributedContext) -> None:
    with pytest.raises(ValueError, match="quick"):
        ctx.barrier(algorithm="quick")


# -- tensors on a device: what NCCL's class does, with Gloo underneath, on a device named cpu


def nccl_on_gloo(rank: int, world_size: int, store: Any) -> Library:
    torch = pytest.importorskip("torch")
    from potluck._core.backends.torchdist.nccl import Nccl
    from potluck._core.backends.torchdist.store import ErrorChannel

    class OnGloo(Nccl):
        def _connect(self, store: Any) -> Any:
            gloo = torch._C._distributed_c10d.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=20)
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            return gloo(store, self.rank, self.world_size, options)

        def settle(self) -> None:
            return None

        def _run(self, start: Callable[[], Any], deadline: float) -> None:
            self._translate(lambda: start().wait())

    class Mute(ErrorChannel):
        def __init__(self) -> None:
            self.rank = rank

        def listen(self, on_error: Callable[[PotluckError], None]) -> None:
            return None

        def close(self) -> None:
            return None

    return OnGloo(store, "test", rank, world_size, Mute(), 20.0, "cpu")


class TensorBackend(StaticBackend[Any]):
    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self.seat = rank, world_size, store

    def form(
        self, after_epoch: int, cause: GroupError | None, timeout_s: float
    ) -> ExternalCommunicator:
        rank, world_size, _ = self.seat
        group = Group(1, rank, tuple(Member(str(each)) for each in range(world_size)))
        library = nccl_on_gloo(*self.seat)
        return ExternalCommunicator.open(group, library, timeout_s=timeout_s)

    def close(self) -> None:
        return None


def test_tensors_stay_on_their_device_and_arrays_go_there_and_back() -> None:
    torch = pytest.importorskip("torch")
    store = torch.distributed.HashStore()

    def rank(number: int) -> None:
        with DistributedContext(TensorBackend(number, 2, store), timeout_s=20) as ctx:
            tensor = torch.full((3, 2), float(number))
            assert ctx.all_reduce(tensor, "mean") is tensor
            assert (tensor == 0.5).all()
            array = np.full((2, 2), float(number))[:, ::-1]
            assert ctx.all_reduce(array) is array
            assert (array == 1).all()
            half = ctx.all_reduce(torch.ones(4, dtype=torch.bfloat16))
            assert half.dtype is torch.bfloat16
            assert (half == 2).all()
            strided = torch.zeros(4, 2)
            ctx.broadcast(strided[:, 1].add_(number + 1), 1)
            assert strided.tolist() == [[0, 2]] * 4
            frozen = np.arange(3.0) + number
            frozen.flags.writeable = False
            rows = ctx.all_gather(frozen)
            assert isinstance(rows, np.ndarray)
            assert rows.tolist() == [[0, 1, 2], [1, 2, 3]]
            part = ctx.reduce_scatter(torch.arange(4.0).reshape(2, 2))
            assert part.tolist() == [4 * number, 4 * number + 2]
            everyone = ctx.gather(torch.tensor([number]), root=1)
            assert everyone is None if number == 0 else everyone.tolist() == [[0], [1]]
            uneven = ctx.gather_uneven(torch.full((number + 1,), 5.0), root=1)
            assert uneven is None if number == 0 else [len(part) for part in uneven] == [1, 2]
            mine = ctx.scatter_uneven([np.ones(2), np.ones(3)] if number == 0 else None)
            assert mine.tolist() == [1.0] * (number + 2)
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                top = torch.finfo(dtype).max
                tensor = torch.full((4,), top, dtype=dtype)
                tensor[2:] = torch.tensor([torch.inf, torch.nan], dtype=dtype)
                mean = ctx.all_reduce(tensor, "mean")
                assert mean is tensor
                assert (mean[:2] >= 0.99 * top).all()
                assert mean[:2].isfinite().all()
                assert mean[2] == torch.inf
                assert mean[3].isnan()
                parts = torch.full((2, 3), -top, dtype=dtype)
                part = ctx.reduce_scatter(parts, "mean")
                assert part.isfinite().all()
                assert (part <= -0.99 * top).all()
                assert (parts == -top).all()
                kept = torch.full((3,), top, dtype=dtype)
                reduced = ctx.reduce(kept, 1, "mean")
                assert (reduced >= 0.99 * top).all()
                assert reduced.isfinite().all()
            with pytest.raises(TypeError, match="NCCL can't combine bool"):
                ctx.all_reduce(torch.ones(2, dtype=torch.bool), "max")
            with pytest.raises(ValueError, match="name the sender"):
                ctx.recv(torch.ones(1))
            with pytest.raises(ValueError, match="leave the tag at 0"):
                ctx.send(torch.ones(1), 1 - number, tag=1)
            ctx.barrier()

    run_all([lambda: rank(0), lambda: rank(1)], 60.0)
