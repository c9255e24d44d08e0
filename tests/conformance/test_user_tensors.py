"""Operations change nothing of users' tensors but their values, on every kind of link."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from potluck._core.context import DistributedContext
from potluck.torch.process_group.group import PotluckProcessGroup
from support.process_groups import process_group
from support.worlds import WORLD_KINDS, World, open_world

WORLDS = [(kind, 2) for kind in WORLD_KINDS] + [("inproc", 1), ("native", 1)]
MOVED_ONLY = (torch.float8_e4m3fn,)
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64),
    *MOVED_ONLY,
)
Group = PotluckProcessGroup
Make = Callable[[int], Tensor]
Operation = Callable[[Any, Make, bool], Any]
"""Of a group or context, a maker of tensors, and whether the caller waits at once: the work to wait
for, None if there is none.
"""


@dataclasses.dataclass(frozen=True)
class Traits:
    """All of a tensor but its values."""

    memory: int
    nbytes: int
    can_be_resized: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    requires_grad: bool
    is_leaf: bool
    version: int

    @staticmethod
    def of(tensor: Tensor) -> Traits:
        storage = tensor.untyped_storage()
        return Traits(
            *(storage.data_ptr(), storage.nbytes(), storage.resizable()),
            *(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())),
            *(tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.is_leaf),
            tensor._version,
        )


def contiguous(dtype: torch.dtype) -> Make:
    return lambda count: torch.ones(count).to(dtype)


def every_second(dtype: torch.dtype) -> Make:
    return lambda count: torch.ones(2 * count).to(dtype)[::2]


def parameter(dtype: torch.dtype) -> Make:
    can_be = dtype.is_floating_point or dtype.is_complex
    return lambda count: torch.ones(count).to(dtype).requires_grad_(can_be)


def conjugated(dtype: torch.dtype) -> Make:
    return lambda count: torch.ones(count).to(dtype).conj()


LAYOUTS = (contiguous, every_second, parameter, conjugated)


def told(options: Any, wait: bool, **fields: Any) -> Any:
    """torch's options; ``asyncOp`` False promises that the caller waits for the work at once."""
    options.asyncOp = not wait
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def all_reduce(group: Group, make: Make, wait: bool) -> Any:
    mine = make(4)
    return group.allreduce([mine], told(c10d.AllreduceOptions(), wait))


def all_reduce_coalesced(group: Group, make: Make, wait: bool) -> Any:
    return group.allreduce_coalesced([make(4), make(2)])


def all_reduce_mean(group: Group, make: Make, wait: bool) -> Any:
    mine = make(4)
    op = dist.ReduceOp.MAX if mine.dtype is torch.bool else dist.ReduceOp.AVG
    return group.allreduce([mine], told(c10d.AllreduceOptions(), wait, reduceOp=op))


def reduce(group: Group, make: Make, wait: bool) -> Any:
    mine = make(4)
    return group.reduce([mine], told(c10d.ReduceOptions(), wait, rootRank=0))


def reduce_scatter(group: Group, make: Make, wait: bool) -> Any:
    output, parts = make(2), [make(2) for _ in range(group.size())]
    options = told(c10d.ReduceScatterOptions(), wait)
    return group.reduce_scatter([output], [parts], options)


def reduce_scatter_single(group: Group, make: Make, wait: bool) -> Any:
    output, source = make(2), make(2 * group.size())
    options = told(c10d.ReduceScatterOptions(), wait)
    return group.reduce_scatter_single(output, source, options)


def sparse_all_reduce(group: Group, make: Make, wait: bool) -> Any:
    values = make(2).detach().resolve_conj()
    if values.dtype in (torch.bool, torch.float16, torch.bfloat16):
        return None
    mine = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (4,), check_invariants=True)
    version = mine._version
    group.allreduce([mine]).wait()
    assert mine._version == version
    return None


def broadcast(group: Group, make: Make, wait: bool) -> Any:
    mine = make(4)
    return group.broadcast([mine], told(c10d.BroadcastOptions(), wait, rootRank=0))


def all_gather(group: Group, make: Make, wait: bool) -> Any:
    mine, outputs = make(2), [make(2) for _ in range(group.size())]
    options = told(c10d.AllgatherOptions(), wait)
    return group.allgather([outputs], [mine], options)


def all_gather_single(group: Group, make: Make, wait: bool) -> Any:
    mine, output = make(2), make(2 * group.size())
    options = told(c10d.AllgatherOptions(), wait)
    return group.all_gather_single(output, mine, options)


def gather(group: Group, make: Make, wait: bool) -> Any:
    mine, outputs = make(2), [make(2) for _ in range(group.size())]
    given = [outputs] if group.rank() == 0 else []
    return group.gather(given, [mine], told(c10d.GatherOptions(), wait))


def scatter(group: Group, make: Make, wait: bool) -> Any:
    output, parts = make(2), [make(2) for _ in range(group.size())]
    given = [parts] if group.rank() == 0 else []
    return group.scatter([output], given, told(c10d.ScatterOptions(), wait))


def all_to_all(group: Group, make: Make, wait: bool) -> Any:
    outputs, inputs = ([make(2) for _ in range(group.size())] for _ in range(2))
    return group.alltoall(outputs, inputs)


def all_to_all_single(group: Group, make: Make, wait: bool) -> Any:
    output, source = (make(2 * group.size()) for _ in range(2))
    return group.all_to_all_single(output, source, [], [])


def messages(group: Group, make: Make, wait: bool) -> Any:
    sent, received = make(4), make(4)
    peer = (group.rank() + 1) % group.size()
    group._start_coalescing(torch.device("cpu"))
    group.send([sent], peer)
    group.recv([received], peer)
    return group._end_coalescing(torch.device("cpu"))


def message_from_any_rank(group: Group, make: Make, wait: bool) -> Any:
    sent, received = make(4), make(4)
    if group.size() == 1:
        return None
    posted = group.send([sent], 1 - group.rank(), 5)
    group.recv_anysource([received], 5).wait()
    return posted


def in_a_part(group: Group, make: Make, wait: bool) -> Any:
    part = group.split_group(list(range(group.size())))
    assert part is not None
    return all_reduce(part, make, wait)


COMBINING = (
    *(all_reduce, all_reduce_coalesced, all_reduce_mean, reduce, reduce_scatter),
    *(reduce_scatter_single, sparse_all_reduce, in_a_part),
)
MOVING = (
    *(broadcast, all_gather, all_gather_single, gather, scatter, all_to_all, all_to_all_single),
    *(messages, message_from_any_rank),
)


def check(operation: Operation, on: Any, make: Make, wait: bool) -> None:
    """Run ``operation``, and see that the tensors made for it are what they were."""
    made: list[tuple[Tensor, Traits]] = []

    def remembered(count: int) -> Tensor:
        tensor = make(count)
        made.append((tensor, Traits.of(tensor)))
        return tensor

    work = operation(on, remembered, wait)
    if work is not None:
        work.wait()
    assert made
    for tensor, before in made:
        assert Traits.of(tensor) == before, (operation, make, wait)
        if tensor.is_leaf and not tensor.requires_grad:
            tensor.resize_(3 * before.nbytes)  # what it is all about


@pytest.fixture(params=WORLDS, ids=lambda each: f"{each[0]}-{each[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    kind, size = request.param
    with open_world(kind, size) as opened:
        yield opened


def test_a_process_group_changes_nothing_but_values(world: World) -> None:
    def body(ctx: DistributedContext) -> None:
        with process_group(ctx) as group:
            for dtype, layout, wait in itertools.product(DTYPES, LAYOUTS, (True, False)):
                for operation in MOVING if dtype in MOVED_ONLY else (*COMBINING, *MOVING):
                    check(operation, group, layout(dtype), wait)

    world.run(body)


def of_context(call: Callable[..., Any]) -> Operation:
    def operation(ctx: DistributedContext, make: Make, wait: bool) -> Any:
        work = call(ctx, make(2 * ctx.world_size).view(ctx.world_size, 2), async_op=not wait)
        return None if wait else work

    return operation


OF_A_CONTEXT = [
    of_context(call)
    for call in (
        *(DistributedContext.all_reduce, DistributedContext.broadcast, DistributedContext.reduce),
        *(DistributedContext.all_gather, DistributedContext.gather),
        *(DistributedContext.reduce_scatter, DistributedContext.all_to_all),
    )
]


def test_a_context_changes_nothing_but_values(world: World) -> None:
    def body(ctx: DistributedContext) -> None:
        dtypes = [dtype for dtype in DTYPES if dtype not in MOVED_ONLY]
        for dtype, layout, wait in itertools.product(dtypes, LAYOUTS, (True, False)):
            for operation in OF_A_CONTEXT:
                check(operation, ctx, layout(dtype), wait)

    world.run(body)
