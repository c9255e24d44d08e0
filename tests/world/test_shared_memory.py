"""The fast path through shared memory: which arrays it takes, and that the results are the same."""

from __future__ import annotations

import functools
import gc
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._core import native
from potluck._core.collectives.plan import Operation
from potluck._core.context import DistributedContext
from potluck._core.engine.shm.group import GroupMemory
from potluck.errors import Desync, GroupError, OperationTimeout
from potluck.testing.world import WorldError
from support.worlds import World, open_world

pytestmark = pytest.mark.skipif(not native.available, reason="shared memory needs the native core")

WORLD_SIZE = 3

TORCH_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world("shm", WORLD_SIZE) as world:
        world.run(lambda ctx: ctx.barrier())
        yield world


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with open_world("shm", 2) as world:
        world.run(lambda ctx: ctx.barrier())
        yield world


def fast(ctx: DistributedContext, array: Any, *, is_flat: bool = False) -> bool:
    assert ctx.communicator.fast_path is not None
    return ctx.communicator.fast_path(Operation.ALL_REDUCE, array, array, "sum", 0, 10.0, is_flat)


def test_a_root_or_a_time_that_is_no_number_is_told_in_the_users_words(pair: World) -> None:
    def act(ctx: Any) -> None:
        array = np.ones(3)
        mistakes: list[tuple[Callable[[], Any], str]] = [
            (lambda: ctx.reduce(array, "sum"), "root is a rank, an integer from 0 to 1, not 'sum'"),
            (
                lambda: ctx.gather(array, [array]),
                "root is a rank, an integer from 0 to 1, not [arr",
            ),
            (lambda: ctx.broadcast(array, 1.0), "root is a rank, an integer from 0 to 1, not 1.0"),
            (lambda: ctx.all_reduce(array, timeout="3"), "timeout is a number of seconds, not '3'"),
        ]
        for mistake, words in mistakes:
            with pytest.raises(TypeError, match=re.escape(words)):
                mistake()

    pair.run(act)


def test_average_on_the_slow_path_meets_mean_on_the_fast_path(pair: World) -> None:
    def act(ctx: DistributedContext) -> list[float]:
        array = np.array([1.0 + 2 * ctx.rank])
        return [float(ctx.all_reduce(array.copy(), word)[0]) for word in words[ctx.rank]]

    words = (("average", "mean", "avg"), ("mean", "avg", "avg"))
    assert pair.run(act) == [[2.0] * 3] * 2


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_are_reduced_where_they_are(world: World, dtype: torch.dtype) -> None:
    def act(ctx: DistributedContext) -> None:
        for shape in [(), (0,), (1,), (3, 5), (2, 0, 4), (40_001,)]:
            tensor = torch.full(shape, ctx.rank + 1).to(dtype)
            assert fast(ctx, tensor)
            assert (tensor.double() == 6).all()

    world.run(act)


def test_parameters_and_results_of_autograd_are_taken(world: World) -> None:
    def act(ctx: DistributedContext) -> None:
        parameter = torch.nn.Parameter(torch.ones(4, 3))
        assert fast(ctx, parameter)
        assert (parameter == 3).all()
        assert parameter.requires_grad
        result = parameter * 2
        assert fast(ctx, result)
        assert (result == 18).all()

    world.run(act)


def _negated() -> torch.Tensor:
    """Its memory holds 1, and it reads as -1."""
    view = torch.ones(1, dtype=torch.complex64).mul(1j).conj().imag
    assert view.is_neg()
    assert view.is_contiguous()
    return view


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, 4).t(),
        lambda: torch.ones(8)[::2],
        lambda: torch.ones(1).expand(4),
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.ones(4, device="meta"),
        lambda: torch._efficientzerotensor(4),
        lambda: torch.ones(4).to(torch.float8_e5m2),
        lambda: torch.nn.UninitializedParameter(),
        _negated,
        lambda: np.ones((4, 4), np.float32).T,
        lambda: np.ones(4, ">f4"),
        lambda: np.ma.ones(4),
        lambda: np.frombuffer(b"\0" * 8, np.float32),
        lambda: np.array(["a"]),
        lambda: [1.0, 2.0],
        lambda: None,
    ],
)
def test_what_is_not_plain_memory_is_left_as_it_is(world: World, make: Callable[[], Any]) -> None:
    world.run(lambda ctx: _check_refused(ctx, make()))


def _check_refused(ctx: DistributedContext, array: Any) -> None:
    assert not fast(ctx, array)


def test_views_that_negate_or_conjugate_are_reduced_as_they_read(world: World) -> None:
    for result in world.run(lambda ctx: float(ctx.all_reduce(_negated()))):
        assert result == -WORLD_SIZE
    lazy = world.run(lambda ctx: ctx.all_reduce(torch.tensor([1 + 2j]).conj()).tolist())
    assert lazy == [[3 - 6j]] * WORLD_SIZE


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_collective_takes_the_fast_path(world: World, kind: str) -> None:
    def make(values: Any) -> Any:
        array = np.array(values, dtype=np.float32)
        return torch.from_numpy(array) if kind == "torch" else array

    def act(ctx: DistributedContext) -> dict[str, Any]:
        rank, root = ctx.rank, 1
        before = posted(ctx)
        results = {
            "all_reduce": ctx.all_reduce(make([rank, 1])),
            "reduce_scatter": ctx.reduce_scatter(make([[rank, 0], [rank, 1], [rank, 2]]), "max"),
            "all_gather": ctx.all_gather(make([rank])),
            "broadcast": ctx.broadcast(make([rank]), root),
            "reduce": ctx.reduce(make([rank]), root, "mean"),
            "gather": ctx.gather(make([rank]), root),
            "all_to_all": ctx.all_to_all(make([[10 * rank + to] for to in range(WORLD_SIZE)])),
            "scatter": ctx.scatter(
                make([0]), make([[5], [6], [7]]) if rank == root else None, root
            ),
        }
        ctx.barrier()
        assert posted(ctx) == before
        return {
            name: None if each is None else np.asarray(each).tolist()
            for name, each in results.items()
        }

    for rank, results in enumerate(world.run(act)):
        is_root = rank == 1
        assert results == {
            "all_reduce": [3, 3],
            "reduce_scatter": [2, rank],
            "all_gather": [[0], [1], [2]],
            "broadcast": [1],
            "reduce": [1 if is_root else rank],
            "gather": [[0], [1], [2]] if is_root else None,
            "all_to_all": [[rank], [10 + rank], [20 + rank]],
            "scatter": [5 + rank],
        }


def posted(ctx: DistributedContext) -> int:
    """How many calls through shared memory took the slow path."""
    count: int = ctx.communicator._resources.shm._ids
    return count


def test_fast_and_slow_paths_meet_in_one_call(world: World) -> None:
    """One rank's array is not contiguous: it takes the slow path, the others do not notice."""

    def act(ctx: DistributedContext) -> None:
        tensor = torch.ones(4, 6)
        array = tensor.t().contiguous().t() if ctx.rank == 0 else tensor
        assert (ctx.rank > 0 and fast(ctx, array)) == (ctx.rank > 0)
        if ctx.rank == 0:
            ctx.all_reduce(array)
        assert (array == 3).all()

    world.run(act)


def test_flat_calls_agree_whatever_the_shape(world: World) -> None:
    def act(ctx: DistributedContext) -> None:
        tensor = torch.ones([(12,), (3, 4), (2, 6)][ctx.rank])
        assert fast(ctx, tensor, is_flat=True)
        assert (tensor == 3).all()

    world.run(act)


def test_parts_may_lie_in_the_whole(world: World, pair: World) -> None:
    """As sharding has it: what a rank gives or gets is a view of all ranks' tensor."""

    def act(ctx: DistributedContext) -> None:
        fast_path = ctx.communicator.fast_path
        world_size = ctx.world_size
        whole = torch.zeros(world_size * 50_000)
        mine = whole.view(world_size, -1)[ctx.rank]
        mine.fill_(ctx.rank)
        assert fast_path(Operation.ALL_GATHER, mine, whole, None, 0, 10.0, True)
        assert (whole.view(world_size, -1) == torch.arange(float(world_size))[:, None]).all()
        assert fast_path(Operation.REDUCE_SCATTER, whole, mine, "sum", 0, 10.0, True)
        assert (mine == world_size * ctx.rank).all()

    world.run(act)
    pair.run(act)


@settings(max_examples=100)
@given(data=st.data())
def test_arrays_of_any_length_at_any_address(
    world: World, pair: World, data: st.DataObject
) -> None:
    """Also at addresses that are no multiple of their item's size; all ranks at different ones."""
    chosen = data.draw(st.sampled_from([world, pair]))  # two ranks write over each other's parts
    world_size = len(chosen.contexts)
    operation = data.draw(
        st.sampled_from(["all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast"])
    )
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "f8", "f2", "i1", "i8", "u2", "?"])))
    ops = ["max"] if dtype == "?" else ["sum", "max", "product"]
    op = data.draw(st.sampled_from([*ops, "mean"] if dtype in ("f4", "f8") else ops))
    count = data.draw(st.integers(0, 40) | st.integers(0, 150_000))
    root = data.draw(st.integers(0, world_size - 1))
    offsets = data.draw(st.lists(st.integers(0, 17), min_size=world_size, max_size=world_size))
    seed = data.draw(st.integers(0, 2**32 - 1))
    shape = (world_size, count) if operation == "reduce_scatter" else (count,)
    inputs = [
        np.random.default_rng([seed, rank]).integers(0, 4, shape).astype(dtype)
        for rank in range(world_size)
    ]
    combine = {"max": np.maximum, "product": np.multiply}.get(op, np.add)
    total = functools.reduce(combine, inputs)
    if op == "mean":
        total = total / dtype.type(world_size)

    def act(ctx: DistributedContext) -> None:
        mine = inputs[ctx.rank]
        memory = np.zeros(offsets[ctx.rank] + mine.nbytes + 1, np.uint8)
        begin = offsets[ctx.rank]
        array = memory[begin : begin + mine.nbytes].view(dtype).reshape(shape)
        array[...] = mine
        if operation == "all_reduce":
            assert np.array_equal(ctx.all_reduce(array, op), total)
        elif operation == "reduce":
            reduced = ctx.reduce(array, root, op)
            assert np.array_equal(reduced, total if ctx.rank == root else mine)
        elif operation == "broadcast":
            assert np.array_equal(ctx.broadcast(array, root), inputs[root])
        elif operation == "all_gather":
            assert np.array_equal(ctx.all_gather(array), np.stack(inputs))
        else:
            assert np.array_equal(ctx.reduce_scatter(array, op), total[ctx.rank])
        assert not memory[:begin].any()
        assert memory[-1] == 0

    chosen.run(act)


@pytest.mark.parametrize(
    ("number", "source", "result", "op", "root"),
    [
        (Operation.ALL_REDUCE, 4, None, "sum", 0),
        (Operation.ALL_REDUCE, 4, 5, "sum", 0),
        (Operation.ALL_REDUCE, 4, 4, "median", 0),
        (Operation.ALL_REDUCE, 4, 4, None, 0),
        (Operation.ALL_REDUCE, 4, 4, "band", 0),
        (Operation.ALL_REDUCE, 4, 4, "sum", 3),
        (Operation.BROADCAST, 4, 4, None, 0),
        (Operation.REDUCE_SCATTER, 4, 4, "sum", 0),
        (Operation.ALL_GATHER, 4, 8, None, 0),
        (Operation.ALL_TO_ALL, 4, 4, None, 0),
    ],
)
def test_calls_that_make_no_sense_are_left_to_the_slow_path(
    world: World, number: Operation, source: int, result: int | None, op: str | None, root: int
) -> None:
    def act(ctx: DistributedContext) -> bool:
        into = None if result is None else torch.zeros(result)
        assert ctx.communicator.fast_path is not None
        return ctx.communicator.fast_path(number, torch.zeros(source), into, op, root, 10.0, False)

    assert world.run(act) == [False] * WORLD_SIZE


def test_ranks_that_disagree_about_a_tensor_are_told_so() -> None:
    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        ctx.all_reduce(torch.zeros(8 + (ctx.rank == 1), dtype=torch.bfloat16))

    with open_world("shm", 2) as world, pytest.raises(WorldError) as caught:
        world.run(act)
    assert len(caught.value.errors) == 2
    assert all(isinstance(error, Desync) for error in caught.value.errors.values())
    assert re.search(r"all_reduce\(bfloat16, shape \([89],\)", str(caught.value))


def test_the_fast_path_raises_what_its_call_has_failed_with() -> None:
    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        fast(ctx, torch.zeros(8 + (ctx.rank == 1)))

    with open_world("shm", 2) as world, pytest.raises(WorldError) as caught:
        world.run(act)
    assert {type(error) for error in caught.value.errors.values()} == {Desync}
    assert re.search(r"all_reduce\(float32, shape \([89],\)", str(caught.value))


def test_a_call_that_nobody_waits_for_wakes_the_thread_that_makes_it(pair: World) -> None:
    """Without its bell that thread would see each call at the end of its sleep, 50 ms after the
    call before. The quickest call is judged: on a busy machine the others may take long."""

    def act(ctx: DistributedContext) -> list[float]:
        took = []
        for _ in range(20):
            has_ended, began = threading.Event(), time.monotonic()
            work = ctx.all_reduce(np.ones(4), async_op=True)
            work.add_done_callback(lambda _, has_ended=has_ended: has_ended.set())
            assert has_ended.wait(20)
            took.append(time.monotonic() - began)
        return took[1:]  # before the first call the thread may have slept for a while

    for took in pair.run(act):
        assert min(took) < 0.01, took


@pytest.mark.parametrize("way", ["blocking", "awaited", "called back"])
def test_a_rank_that_does_not_call_is_named_when_the_time_is_over(way: str) -> None:
    """Whichever thread makes the call: its caller, one that waits for it, the progress thread."""
    is_over = threading.Event()

    def call(ctx: DistributedContext) -> None:
        assert ctx.communicator.fast_path is not None
        work = ctx.all_reduce(np.ones(4), timeout=0.05, async_op=way != "blocking")
        if way == "called back":
            has_ended = threading.Event()
            work.add_done_callback(lambda _: has_ended.set())
            assert has_ended.wait(10)
        work.wait()

    def act(ctx: DistributedContext) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            is_over.wait(10)
        with pytest.raises(OperationTimeout, match="has not made this call") as caught:
            call(ctx) if ctx.rank == 0 else ctx.barrier()
        is_over.set()
        assert caught.value.rank == 1

    with open_world("shm", 2) as world:
        world.run(act)


def test_a_channel_opened_while_its_rank_leaves_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its native part and its communicator name each other, which no garbage collector sees."""
    entered = [threading.Event(), threading.Event()]
    has_left = [threading.Event(), threading.Event()]
    opened: list[weakref.ref[Any]] = []
    open_channel, leave = GroupMemory.open, GroupMemory.leave

    def open_late(memory: Any, *args: Any, **options: Any) -> Any:
        entered[memory._group.rank].set()
        assert has_left[memory._group.rank].wait(30)
        return open_channel(memory, *args, **options)

    def leave_and_tell(memory: Any) -> None:
        leave(memory)
        has_left[memory._group.rank].set()

    monkeypatch.setattr(GroupMemory, "open", open_late)
    monkeypatch.setattr(GroupMemory, "leave", leave_and_tell)

    def act(ctx: DistributedContext) -> None:
        opened.append(weakref.ref(ctx.communicator))
        ctx.all_reduce(np.ones(4), timeout=30, async_op=True)
        assert entered[ctx.rank].wait(30)
        ctx.close()

    with open_world("shm", 2) as world:
        world.run(act)
        world.contexts.clear()
    del world
    gc.collect()
    assert [each() for each in opened] == [None, None]


def test_a_rank_that_cannot_open_the_memory_ends_the_call_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others may have opened it, and wait there."""
    open_channel = GroupMemory.open

    def open_or_not(memory: Any, *args: Any, **options: Any) -> Any:
        if memory._group.rank == 1:
            raise OSError("no memory is left")
        return open_channel(memory, *args, **options)

    monkeypatch.setattr(GroupMemory, "open", open_or_not)

    def act(ctx: DistributedContext) -> None:
        with pytest.raises(GroupError, match=r"the setup of shared memory on .*no memory is left"):
            ctx.all_reduce(np.ones(4), timeout=60)

    with open_world("shm", 2) as world:
        world.run(act)


class Interrupt(Exception):
    """What the handler of a signal raises."""


def test_a_call_that_fails_after_its_caller_was_interrupted_ends_the_group() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    def interrupt_its_call(ctx: DistributedContext, caller: int) -> None:
        while not ctx.communicator.ongoing():
            time.sleep(0)
        signal.pthread_kill(caller, signal.SIGUSR1)

    with open_world("shm", 2) as world:
        world.run(lambda ctx: ctx.barrier())
        first, second = world.contexts
        before = signal.signal(signal.SIGUSR1, interrupt)
        interrupting = threading.Thread(
            target=interrupt_its_call, args=(first, threading.get_ident())
        )
        try:
            with pytest.raises(Interrupt):
                interrupting.start()
                first.all_reduce(np.ones(4), timeout=5.0)
        finally:
            interrupting.join()
            signal.signal(signal.SIGUSR1, before)
        for ctx in (first, second):
            with pytest.raises(OperationTimeout, match="its caller was interrupted") as caught:
                ctx.barrier()
            assert caught.value.rank == 1
