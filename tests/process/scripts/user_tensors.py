"""One rank: calls what torch.distributed offers, and fails if a tensor is not what it was.

What the group's own methods do is tested in tests/conformance; this is about torch's code on top.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Collective = Callable[..., Any]


def traits(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (
        *(storage.data_ptr(), storage.nbytes(), storage.resizable(), tensor.shape),
        *(tensor.stride(), tensor.requires_grad, tensor._version),
    )


def unchanged(*tensors: Tensor) -> Callable[[str], None]:
    before = [traits(tensor) for tensor in tensors]

    def check(what: str) -> None:
        assert [traits(tensor) for tensor in tensors] == before, what

    return check


def collectives(group: Any, dtype: torch.dtype, is_async: bool) -> None:
    size, root = dist.get_world_size(group), dist.get_global_rank(group, 0)
    mine, whole, parts = room(size, dtype)
    outputs = parts if dist.get_rank(group) == 0 else None
    calls: list[tuple[Collective, tuple[Any, ...]]] = [
        (dist.all_reduce, (mine,)),
        (dist.all_gather, (parts, mine)),
        (dist.all_gather_into_tensor, (whole, mine)),
        (dist.reduce_scatter, (mine, parts)),
        (dist.reduce_scatter_tensor, (mine, whole)),
        (dist.all_to_all, (list(whole.chunk(size)), parts)),
        (dist.all_to_all_single, (whole, whole.clone())),
        (dist.broadcast, (mine, root)),
        (dist.reduce, (mine, root)),
        (dist.gather, (mine, outputs, root)),
        (dist.scatter, (mine, outputs, root)),
    ]
    check = unchanged(mine, whole, *parts)
    for call, arguments in calls:
        work = call(*arguments, group=group, async_op=is_async)
        if work is not None:
            work.wait()
        check(f"{call.__name__}, {dtype}, async_op={is_async}")
    grow(mine, whole, *parts)


def coalesced(group: Any, dtype: torch.dtype) -> None:
    size = dist.get_world_size(group)
    mine, whole, parts = room(size, dtype)
    check = unchanged(mine, whole, *parts)
    for is_async in (False, True):
        with dist._coalescing_manager(group, torch.device("cpu"), async_ops=is_async) as manager:
            dist.all_reduce(mine, group=group)
            dist.all_reduce(parts[0], group=group)
        if is_async:
            manager.wait()
        check(f"coalesced, {dtype}, async_ops={is_async}")
    grow(mine, whole, *parts)


def messages(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, whole, _ = room(size, dtype)
    check = unchanged(mine, whole)
    target, source = (rank + 1) % size, (rank - 1) % size
    sent = dist.P2POp(dist.isend, mine, target)
    received = dist.P2POp(dist.irecv, whole[: len(mine)], source)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    if size > 1:
        if rank == 0:
            dist.send(mine, target)
            dist.recv(mine, source)
        else:
            dist.recv(mine)  # from any rank
            dist.send(mine, target)
    check(f"messages, {dtype}")
    grow(mine, whole)


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "tensor": torch.ones(3)})
    dist.broadcast_object_list(found, 0)
    grow(*(each["tensor"] for each in found))


def functions(dtype: torch.dtype) -> None:
    group = dist.group.WORLD
    mine, whole, _ = room(dist.get_world_size(), dtype)
    check = unchanged(mine, whole)
    results = [
        functional.all_reduce(mine, "sum", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.reduce_scatter_tensor(whole, "sum", 0, group),
        functional.broadcast(mine, 0, group),
        functional.all_to_all_single(whole, None, None, group),
        *functional.all_reduce_coalesced([mine, whole], "sum", group),
    ]
    check(f"functional, {dtype}")
    grow(*(functional.wait_tensor(result) for result in results), mine, whole)


def ddp(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(dtype)
    wrapped = DistributedDataParallel(model)
    for _ in range(3):
        wrapped(torch.ones(2, 4, dtype=dtype)).sum().backward()
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.untyped_storage().resizable()
        assert tensor.grad is None or tensor.grad.untyped_storage().resizable()
    model[0].weight.untyped_storage().resize_(0)


def room(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One rank's part, all ranks' in one tensor, and as a list."""
    mine = torch.ones(6).to(dtype)
    return mine, mine.repeat(size), [mine.clone() for _ in range(size)]


def grow(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.resize_(1000)
        tensor.untyped_storage().resize_(0)


def main() -> None:
    dist.init_process_group("potluck", init_method=sys.argv[1])
    size = dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    alone = [dist.new_group([rank]) for rank in range(size)]
    groups.append(alone[dist.get_rank()])
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    for group, dtype in itertools.product(groups, dtypes):
        collectives(group, dtype, is_async=False)
        collectives(group, dtype, is_async=True)
        coalesced(group, dtype)
    for dtype in dtypes:
        messages(dtype)
        functions(dtype)
    objects()
    ddp(torch.float32)
    ddp(torch.bfloat16)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
