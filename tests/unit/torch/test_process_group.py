"""Every operation of the process group, on threads: results, dtypes, and what it refuses."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from potluck._core.collectives.plan import Operation
from potluck._core.context import DistributedContext
from potluck._core.engine.request import Request
from potluck.errors import Desync, OperationTimeout, PeerLost, RemoteError
from potluck.testing.world import WorldError, run_world
from potluck.torch.process_group.creation import replace_set_timeout
from potluck.torch.process_group.group import PotluckProcessGroup
from support.process_groups import process_group

T = TypeVar("T")
WORLD = 3
MINUTE = datetime.timedelta(minutes=1)
REDUCIBLE = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128),
]


def on_groups(function: Callable[[PotluckProcessGroup], T], world_size: int = WORLD) -> list[T]:
    """``[function(group) for each rank]``, at the same time."""

    def rank(ctx: DistributedContext) -> T:
        with process_group(ctx) as group:
            return function(group)

    return run_world(world_size, rank)


def reducing(op: Any, root: int = 0) -> Any:
    options = dist.ReduceOptions()
    options.reduceOp, options.rootRank = op, root
    return options


def values(rank: int, dtype: torch.dtype, count: int = 5) -> Tensor:
    return (torch.arange(count) % 3 + rank + 1).to(dtype)


@pytest.mark.parametrize("dtype", REDUCIBLE, ids=str)
def test_all_reduce_sums_in_every_dtype(dtype: torch.dtype) -> None:
    def body(group: PotluckProcessGroup) -> Tensor:
        mine = values(group.rank(), dtype)
        group.allreduce([mine]).wait()
        return mine

    expected = sum((values(rank, dtype) for rank in range(1, WORLD)), values(0, dtype))
    for result in on_groups(body):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, lambda x: x.sum(0)),
        (dist.ReduceOp.AVG, lambda x: x.mean(0)),
        (dist.ReduceOp.MIN, lambda x: x.amin(0)),
        (dist.ReduceOp.MAX, lambda x: x.amax(0)),
        (dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
        (dist._make_nccl_premul_sum(0.5), lambda x: x.sum(0) * 0.5),
    ],
    ids=["sum", "avg", "min", "max", "product", "premul_sum"],
)
def test_each_reduction_of_floats_everywhere_it_is_offered(
    op: Any, expected: Callable[[Tensor], Tensor]
) -> None:
    def body(group: PotluckProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rank = group.rank()
        everywhere, rooted = values(rank, torch.float64), values(rank, torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce([everywhere], options).wait()
        group.reduce([rooted], reducing(op, root=1)).wait()
        source = torch.cat([values(rank, torch.float64)] * WORLD)
        before = source.clone()
        single = torch.empty(5, dtype=torch.float64)
        scattering = dist.ReduceScatterOptions()
        scattering.reduceOp = op
        group.reduce_scatter_single(single, source, scattering).wait()
        listed = torch.empty(5, dtype=torch.float64)
        group.reduce_scatter([listed], [list(source.chunk(WORLD))], scattering).wait()
        assert torch.equal(source, before)
        return everywhere, rooted, single, listed

    want = expected(torch.stack([values(rank, torch.float64) for rank in range(WORLD)]))
    for rank, (everywhere, rooted, single, listed) in enumerate(on_groups(body)):
        torch.testing.assert_close(everywhere, want)
        torch.testing.assert_close(single, want)
        torch.testing.assert_close(listed, want)
        torch.testing.assert_close(rooted, want if rank == 1 else values(rank, torch.float64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_averages_of_integers_drop_the_fraction_as_nccl_does(dtype: torch.dtype) -> None:
    def body(group: PotluckProcessGroup) -> list[list[int]]:
        sign = -1 if dtype.is_signed else 1
        mine = torch.tensor([sign * (7 + group.rank()), 4], dtype=dtype)  # sums 24, 12
        strided = torch.tensor([[5 + group.rank(), 0]] * 2, dtype=dtype)[:, 0]  # sums 18
        rooted, part = mine[:1] + sign, torch.empty(1, dtype=dtype)  # sums 27
        options, scattering = dist.AllreduceOptions(), dist.ReduceScatterOptions()
        options.reduceOp = scattering.reduceOp = dist.ReduceOp.AVG
        source = torch.tensor([1 + group.rank()] * WORLD, dtype=dtype) + sign  # sums 6 + 3 sign
        group.allreduce([mine], options).wait()
        group.allreduce([strided], options).wait()
        group.reduce([rooted], reducing(dist.ReduceOp.AVG, root=1)).wait()
        group.reduce_scatter_single(part, source, scattering).wait()
        return [mine.tolist(), strided.tolist(), rooted.tolist(), part.tolist()]

    sign = -1 if dtype.is_signed else 1
    for rank, (mine, strided, rooted, part) in enumerate(on_groups(body)):
        assert mine == [sign * 8, 4]
        assert strided == [6, 6]
        assert rooted == ([sign * 9] if rank == 1 else [sign * (8 + rank)])
        assert part == [2 + sign]


def test_an_average_that_is_no_integer_is_cut_towards_zero() -> None:
    def body(group: PotluckProcessGroup) -> list[int]:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        small = torch.tensor([1, -1]) * (group.rank() == 0)  # sums 1 and -1
        group.allreduce([small], options).wait()
        return small.tolist()

    assert on_groups(body) == [[0, 0]] * WORLD


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.BAND, lambda a, b, c: a & b & c),
        (dist.ReduceOp.BOR, lambda a, b, c: a | b | c),
        (dist.ReduceOp.BXOR, lambda a, b, c: a ^ b ^ c),
    ],
    ids=["band", "bor", "bxor"],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
def test_bitwise_reductions(op: Any, expected: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def body(group: PotluckProcessGroup) -> Tensor:
        mine = values(group.rank(), dtype)
        group.allreduce([mine], op).wait()
        return mine

    want = expected(*(values(rank, dtype) for rank in range(WORLD)))
    assert all(torch.equal(result, want) for result in on_groups(body))


def test_moving_operations_bring_everything_where_it_belongs() -> None:
    def body(group: PotluckProcessGroup) -> None:
        rank = group.rank()
        mine = torch.full((2, 2), float(rank))
        options = dist.BroadcastOptions()
        options.rootRank = 2
        shared = mine.clone()
        group.broadcast([shared], options).wait()
        assert shared.eq(2).all()
        outputs = [torch.empty(2, 2) for _ in range(WORLD)]
        group.allgather([outputs], [mine]).wait()
        assert [out[0, 0].item() for out in outputs] == [0, 1, 2]
        whole = torch.empty(2 * WORLD, 2)
        group.all_gather_single(whole, mine).wait()
        assert whole[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        gathering = dist.GatherOptions()
        gathering.rootRank = 1
        got = [torch.empty(2, 2) for _ in range(WORLD)] if rank == 1 else []
        group.gather([got] if got else [], [mine], gathering).wait()
        assert [out[0, 0].item() for out in got] == ([0, 1, 2] if rank == 1 else [])
        scattering = dist.ScatterOptions()
        scattering.rootRank = 0
        part = torch.empty(2)
        parts = [[torch.full((2,), float(other)) for other in range(WORLD)]] if rank == 0 else []
        group.scatter([part], parts, scattering).wait()
        assert part.tolist() == [rank, rank]

    on_groups(body)


def test_old_and_new_names_are_the_same_operations() -> None:
    pairs = {
        "_allgather_base": "all_gather_single",
        "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
        "_reduce_scatter_base": "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
        "alltoall_base": "all_to_all_single",
    }
    for old, new in pairs.items():
        assert vars(PotluckProcessGroup)[old] is vars(PotluckProcessGroup)[new]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_can_not_be_combined_can_be_moved(dtype: torch.dtype) -> None:
    def body(group: PotluckProcessGroup) -> Tensor:
        whole = torch.empty(2 * WORLD, dtype=dtype)
        group.all_gather_single(whole, torch.full((2,), group.rank() + 1.0).to(dtype)).wait()
        group.broadcast([whole]).wait()
        return whole.float()

    assert all(each.tolist() == [1, 1, 2, 2, 3, 3] for each in on_groups(body))


def test_coalesced_operations() -> None:
    def body(group: PotluckProcessGroup) -> None:
        rank = group.rank()
        tensors = [torch.full((n,), float(rank)) for n in (1, 4)]
        group.allreduce_coalesced(tensors).wait()
        assert [t.unique().tolist() for t in tensors] == [[3.0], [3.0]]
        outs = [torch.empty(WORLD), torch.empty(2 * WORLD)]
        ins = [torch.full((1,), float(rank)), torch.full((2,), float(rank))]
        group.all_gather_single_coalesced(outs, ins).wait()
        assert outs[1].tolist() == [0, 0, 1, 1, 2, 2]
        backs = [torch.empty(1), torch.empty(2)]
        group.reduce_scatter_single_coalesced(backs, outs).wait()
        assert backs[0].tolist() == [WORLD * rank]

    on_groups(body)


def test_uneven_exchanges_with_and_without_sizes() -> None:
    def body(group: PotluckProcessGroup) -> None:
        rank = group.rank()
        sizes_in = [other + rank for other in range(WORLD)]
        sizes_out = [rank + other for other in range(WORLD)]
        source = torch.full((sum(sizes_in), 2), float(rank))
        output = torch.empty(sum(sizes_out), 2)
        group.all_to_all_single(output, source, sizes_out, sizes_in).wait()
        want = [float(other) for other in range(WORLD) for _ in range(sizes_out[other])]
        assert output[:, 0].tolist() == want
        even = torch.empty(WORLD)
        group.all_to_all_single(even, torch.arange(3.0) + 10 * rank, [], []).wait()
        assert even.tolist() == [rank, 10 + rank, 20 + rank]
        outs = [torch.empty(rank + 1) for _ in range(WORLD)]
        ins = [torch.full((other + 1,), float(rank)) for other in range(WORLD)]
        group.alltoall(outs, ins).wait()
        assert [out[0].item() for out in outs] == [0, 1, 2]

    on_groups(body)


def test_empty_and_non_contiguous_tensors() -> None:
    def body(group: PotluckProcessGroup) -> None:
        group.allreduce([torch.empty(0, 3)]).wait()
        columns = torch.zeros(4, 6)
        columns[:, 1::2] = group.rank() + 1.0
        group.allreduce([columns[:, 1::2]]).wait()
        assert columns[:, 1::2].eq(6).all()
        assert columns[:, ::2].eq(0).all()
        transposed = torch.arange(6.0).view(2, 3).t() * (group.rank() == 0)
        group.broadcast([transposed]).wait()
        assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t())
        conjugated = torch.tensor([1 + 2j]).conj()
        group.allreduce([conjugated]).wait()
        assert conjugated.resolve_conj().tolist() == [WORLD * (1 - 2j)]

    on_groups(body)


def test_messages_with_tags_and_from_any_rank() -> None:
    def body(group: PotluckProcessGroup) -> None:
        rank = group.rank()
        if rank:
            group.send([torch.tensor([float(rank), 7.0])], 0, tag=rank).wait()
            group.send([torch.tensor([float(rank)])], 0, tag=9).wait()
            return
        late, soon = torch.empty(2), torch.empty(2)
        second = group.recv([late], 2, tag=2)
        first = group.recv([soon], 1, tag=1)
        first.wait()
        second.wait()
        assert (soon[0].item(), late[0].item()) == (1, 2)
        sources = set()
        for _ in range(2):
            got = torch.empty(1)
            work = group.recv_anysource([got], 9)
            work.wait()
            assert work.source_rank() == got.item()
            sources.add(work.source_rank())
        assert sources == {1, 2}

    on_groups(body)


def test_a_rank_may_send_itself_messages_before_or_after_it_asks_for_them() -> None:
    def body(group: PotluckProcessGroup) -> list[Tensor]:
        rank = group.rank()
        early, late, other = torch.zeros(2), torch.zeros(2), torch.zeros(3)
        receive = group.recv([early], rank, 1)
        assert not receive.is_completed()
        for number in (1.0, 2.0):
            message = torch.full((2,), number)
            group.send([message], rank, 1).wait()
            message.zero_()  # its memory is the sender's again
        assert receive.wait()
        assert receive.source_rank() == rank
        group.recv([late], rank, 1).wait()
        group.send([torch.ones(2)], rank).wait()
        unlike = group.recv([other], rank)
        with pytest.raises(Desync, match="met a message of float32, shape"):
            unlike.wait()
        return [early, late]

    for early, late in on_groups(body):
        assert early.tolist() == [1.0, 1.0]
        assert late.tolist() == [2.0, 2.0]


def test_nothing_from_oneself_is_a_time_out() -> None:
    def body(group: PotluckProcessGroup) -> str:
        group.set_timeout(datetime.timedelta(seconds=0.1))
        with pytest.raises(OperationTimeout) as caught:
            group.recv([torch.zeros(2)], 0).wait()
        return str(caught.value)

    assert "from rank 0 itself" in on_groups(body, 1)[0]


def test_torchs_function_sets_the_timeout_of_one_group_and_warns_of_none() -> None:
    replace_set_timeout()

    def body(group: PotluckProcessGroup) -> None:
        other = group.split_group([0, 1], group_name="other")
        assert other is not None
        if group.rank() == 0:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.2), other)
            group.recv([torch.zeros(2)], 1).wait()  # has a minute
            with pytest.raises(OperationTimeout):
                other.recv([torch.zeros(2)], 1).wait()
        else:
            group.send([torch.ones(2)], 0).wait()
            with pytest.raises(OperationTimeout):
                group.barrier().wait()

    on_groups(body, 2)


def test_a_future_becomes_the_list_of_tensors_and_its_callbacks_may_communicate() -> None:
    def body(group: PotluckProcessGroup) -> None:
        first, second = torch.ones(3), torch.ones(2)
        future = group.allreduce([first]).get_future()

        def then(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            assert done.value()[0].tolist() == [3, 3, 3]
            group.allreduce([second]).get_future().wait()
            return second

        assert future.then(then).wait().tolist() == [3, 3]
        assert future.wait()[0] is first

    on_groups(body)


def test_once_a_work_was_waited_for_its_future_is_complete() -> None:
    """Whether it was asked for before or after: callbacks chained onto it run at once (torchft)."""

    def body(group: PotluckProcessGroup) -> None:
        before = group.allreduce([torch.ones(3)])
        future = before.get_future()
        assert before.wait()
        assert future.done()
        after = group.allreduce([torch.ones(3)])
        assert after.wait()
        assert after.get_future().done()
        ran: list[bool] = []
        after.get_future().then(lambda _: ran.append(True))
        assert ran == [True]

    on_groups(body)


def test_sparse_tensors_are_summed_entry_by_entry() -> None:
    def body(group: PotluckProcessGroup) -> Tensor:
        rank = group.rank()
        index = torch.tensor([[0, rank + 1]])
        values = torch.tensor([1.0, float(rank)])
        mine = torch.sparse_coo_tensor(index, values, (5,), check_invariants=True)
        group.allreduce([mine]).wait()
        return mine.to_dense()

    assert all(result.tolist() == [3, 0, 1, 2, 0] for result in on_groups(body))


@pytest.mark.parametrize("announced", [-1, 6, 1 << 40])
def test_a_rank_can_not_announce_more_entries_than_a_sparse_tensor_has_indices(
    announced: int,
) -> None:
    def body(group: PotluckProcessGroup) -> str:
        if group.rank() == 1:
            count, counts = np.array([announced]), np.zeros(WORLD, np.int64)
            request = Request(Operation.ALL_GATHER, count, counts, timeout_s=60)
            group.communicator.run(request).wait()
            return ""
        mine = torch.sparse_coo_tensor(
            torch.tensor([[0]]), torch.ones(1), (5,), check_invariants=True
        )
        with pytest.raises(RuntimeError, match="rank 1 announces") as caught:
            group.allreduce([mine]).wait()
        return str(caught.value)

    assert f"{announced} entries of a sparse tensor that has 5 indices" in on_groups(body)[0]


def test_parts_of_a_group_share_its_links_and_come_about_without_a_message() -> None:
    def body(group: PotluckProcessGroup) -> tuple[str, int, list[float]] | None:
        if group.rank() == 1:
            assert group.split_group([0, 2]) is None
            return None
        part = group.split_group([0, 2], group_name="ends")
        assert part is not None
        mine = torch.tensor([float(part.rank() + 1)])
        part.allreduce([mine]).wait()
        return part.group_name, part.size(), mine.tolist()

    assert on_groups(body) == [("ends", 2, [3.0]), None, ("ends", 2, [3.0])]


def test_a_monitored_barrier_names_who_did_not_come_and_leaves_the_group_alive() -> None:
    def body(group: PotluckProcessGroup) -> str:
        said = ""
        group.barrier().wait()
        if group.rank() != 2:
            # Long enough for rank 1 to come on a busy machine: if late, it is named, and rightly.
            with pytest.raises(OperationTimeout) as caught:
                group.monitored_barrier(datetime.timedelta(seconds=2))
            said = str(caught.value)
        mine = torch.ones(1)
        group.allreduce([mine]).wait()
        assert mine.item() == WORLD
        return said

    first, second, third = on_groups(body)
    assert "Rank 2 failed to pass monitoredBarrier" in first
    assert "rank 0" in second
    assert third == ""


def test_an_abort_ends_blocked_calls_on_every_rank_naming_who_aborted() -> None:
    def body(group: PotluckProcessGroup) -> BaseException | None:
        if group.rank() == 1:
            group.barrier().wait()
            group.abort()
            return None

        def blocked() -> None:
            for work in [group.barrier(), group.allreduce([torch.ones(4)])]:
                work.wait()

        # Rank 1 may have left the barrier, and aborted, while others are still in it.
        with pytest.raises((RemoteError, PeerLost)) as caught:
            blocked()
        return caught.value

    errors = [error for error in on_groups(body) if error is not None]
    assert [error.rank for error in errors] == [1, 1]  # type: ignore[attr-defined]
    assert all("aborted its process group" in str(error) for error in errors)


BAD_CALLS: list[tuple[str, type[Exception], str, Callable[[PotluckProcessGroup], Any]]] = [
    (
        "meta",
        ValueError,
        "meta device and has no data",
        lambda g: g.allreduce([torch.empty(2, device="meta")]),
    ),
    ("bits of floats", TypeError, "non-integral dtype", lambda g: g.allreduce(
        [torch.ones(2)], dist.ReduceOp.BAND)),
    ("mean of bools", TypeError, "convert it to a float", lambda g: g.allreduce(
        [torch.ones(2, dtype=torch.bool)], dist.ReduceOp.AVG)),
    ("float8", TypeError, "moved but not combined by SUM", lambda g: g.allreduce(
        [torch.ones(2).to(torch.float8_e4m3fn)])),
    ("scattered float8", TypeError, "moved but not combined", lambda g: g.reduce_scatter_single(
        torch.ones(1).to(torch.float8_e5m2), torch.ones(3).to(torch.float8_e5m2))),
    ("order of complex", TypeError, "no order", lambda g: g.reduce(
        [torch.ones(2, dtype=torch.complex64)], reducing(dist.ReduceOp.MAX))),
    ("factor of integers", TypeError, "cut its factor", lambda g: g.allreduce(
        [torch.ones(2, dtype=torch.int64)], dist._make_nccl_premul_sum(0.5))),
    ("two tensors", ValueError, "one tensor per rank", lambda g: g.allreduce(
        [torch.ones(1), torch.ones(1)])),
    ("short output", ValueError, "times the input's", lambda g: g.all_gather_single(
        torch.empty(2), torch.ones(2))),
    ("short list", ValueError, "one for each of the 3 ranks", lambda g: g.allgather(
        [[torch.empty(1)]], [torch.ones(1)])),
    ("other dtype", TypeError, "one dtype", lambda g: g.all_gather_single(
        torch.empty(6, dtype=torch.int32), torch.ones(2))),
    ("other dtype in a list", TypeError, "must have the same dtype", lambda g: g.allgather(
        [[torch.empty(2), torch.empty(2), torch.empty(2, dtype=torch.int32)]], [torch.ones(2)])),
    ("split sizes", ValueError, "add up to 4", lambda g: g.all_to_all_single(
        torch.empty(3), torch.ones(3), [1, 1, 1], [2, 1, 1])),
    ("too few sizes", ValueError, "give one each", lambda g: g.all_to_all_single(
        torch.empty(3), torch.ones(3), [1, 2], [1, 1, 1])),
    ("no equal parts", ValueError, "pass input_split_sizes", lambda g: g.all_to_all_single(
        torch.empty(3), torch.ones(4), [1, 1, 1], [])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "words", "call"), [case[1:] for case in BAD_CALLS], ids=[c[0] for c in BAD_CALLS]
)
def test_a_call_that_can_not_be_is_refused_before_anything_is_sent(
    kind: type[Exception], words: str, call: Callable[[PotluckProcessGroup], Any]
) -> None:
    def body(group: PotluckProcessGroup) -> None:
        with pytest.raises(kind, match=words):
            call(group)
        mine = torch.ones(1)
        group.allreduce([mine]).wait()
        assert mine.item() == WORLD

    on_groups(body)


def test_split_sizes_that_disagree_between_ranks_end_the_group_everywhere() -> None:
    def body(group: PotluckProcessGroup) -> None:
        sizes = [1, 1] if group.rank() == 0 else [2, 1]
        rows = sum(sizes)
        group.all_to_all_single(torch.empty(rows), torch.ones(rows), sizes, sizes[::-1]).wait()

    with pytest.raises(WorldError) as caught:
        on_groups(body, world_size=2)
    assert {type(error).__name__ for error in caught.value.errors.values()} <= {
        "Desync",
        "ValueError",
        "PeerLost",
    }


def test_what_torch_asks_of_a_group() -> None:
    def body(group: PotluckProcessGroup) -> None:
        assert (group.size(), group.name(), group.group_name) == (WORLD, "potluck", "0")
        assert torch.device("cpu") in group._device_types
        assert group._get_backend(torch.device("cpu")).supports_splitting
        group._start_coalescing(torch.device("cpu"))
        tensors = [torch.ones(1), torch.ones(2)]
        for tensor in tensors:
            group.allreduce([tensor])
        group._end_coalescing(torch.device("cpu")).wait()
        assert list(itertools.chain.from_iterable(t.tolist() for t in tensors)) == [3, 3, 3]

    on_groups(body)
