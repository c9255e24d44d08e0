"""The process group through torch's own functions, as users call them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import check

from potluck.errors import OperationTimeout

MANY_DTYPES = (
    *(torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.complex64, torch.complex128),
)


@check(2, 4)
def messages_in_one_batch(run):
    right, left = (run.rank + 1) % run.world_size, (run.rank - 1) % run.world_size
    columns = torch.full((3, 4), float(run.rank)).t()  # not contiguous
    found, empty = torch.zeros(3, 4).t(), torch.zeros(0)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, columns, right, tag=1),
            dist.P2POp(dist.isend, torch.zeros(0), left, tag=2),
            dist.P2POp(dist.irecv, found, left, tag=1),
            dist.P2POp(dist.irecv, empty, right, tag=2),
        ]
    )
    for work in works:
        work.wait()
    assert found.eq(left).all()


@check(4)
def objects_are_moved(run):
    size, mine = run.world_size, {"rank": run.rank, "name": "x" * run.rank}
    everyone = [{"rank": rank, "name": "x" * rank} for rank in range(size)]
    gathered, on_root = [None] * size, [None] * size if run.rank == 1 else None
    dist.all_gather_object(gathered, mine)
    assert gathered == everyone
    dist.gather_object(mine, on_root, dst=1)
    assert on_root == (everyone if run.rank == 1 else None)
    several = everyone[:2] if run.rank == 0 else [None, None]
    dist.broadcast_object_list(several, src=0)
    assert several == everyone[:2]
    one = [None]
    dist.scatter_object_list(one, everyone if run.rank == 0 else None, src=0)
    assert one == [mine]
    other = 1 - run.rank
    if run.rank < 2:
        for step in (0, 1):
            if run.rank == step:
                dist.send_object_list([mine], dst=other)
            else:
                dist.recv_object_list(one, src=other)
        assert one == [everyone[other]]


@check(4)
def every_movement_of_empty_and_strided_tensors_in_many_dtypes(run):
    size, rank = run.world_size, run.rank

    def strided(value, rows, dtype):
        return torch.zeros(2, rows).to(dtype).t().fill_(value)

    for dtype in MANY_DTYPES:
        for rows in (0, 3):
            mine = strided(rank % 2, rows, dtype)
            each = [torch.full((rows, 2), other % 2).to(dtype) for other in range(size)]
            outputs = [strided(1, rows, dtype) for _ in range(size)]
            dist.all_gather(outputs, mine)
            assert all(map(torch.equal, outputs, each)), (dtype, outputs)
            outputs = [strided(1, rows, dtype) for _ in range(size)]
            dist.gather(mine, outputs if rank == 1 else None, dst=1)
            assert rank != 1 or all(map(torch.equal, outputs, each)), (dtype, outputs)
            part = strided(1, rows, dtype)
            dist.scatter(part, each if rank == 0 else None, src=0)
            assert torch.equal(part, each[rank]), (dtype, part)
            part = mine.clone()
            dist.broadcast(part, 1)
            assert torch.equal(part, each[1]), (dtype, part)
            outputs = [strided(1, rows, dtype) for _ in range(size)]
            dist.all_to_all(outputs, [mine] * size)
            assert all(map(torch.equal, outputs, each)), (dtype, outputs)
            total = torch.full((rows, 2), sum(other % 2 for other in range(size))).to(dtype)
            reduced = strided(rank % 2, rows, dtype)
            dist.all_reduce(reduced)
            assert torch.equal(reduced, total), (dtype, reduced)
            reduced = strided(1, rows, dtype)
            dist.reduce_scatter(reduced, [mine] * size)
            assert torch.equal(reduced, total), (dtype, reduced)


@check(2, 4)
def parts_of_the_world_talk_at_the_same_time(run):
    size, half = run.world_size, run.world_size // 2
    halves = [list(range(half)), list(range(half, size))]
    groups = [dist.new_group(ranks) for ranks in halves]
    group, ranks = groups[run.rank // half], halves[run.rank // half]
    mine = torch.tensor([float(run.rank)])
    dist.all_reduce(mine, group=group)
    assert mine.item() == sum(ranks)
    backwards = dist.new_group([size - 1, 0])  # torch sorts them unless told otherwise
    if run.rank in (0, size - 1):
        shared = torch.tensor([float(run.rank)])
        dist.broadcast(shared, src=size - 1, group=backwards)
        assert shared.item() == size - 1
        dist.destroy_process_group(backwards)
    dist.barrier()


@check(4)
def a_monitored_barrier_of_the_group_itself(run):
    group = dist.new_group(list(range(run.world_size)))
    group.monitored_barrier(timedelta(seconds=30))
    dist.barrier()
    if run.rank == 0:  # the others do not come
        with pytest.raises(OperationTimeout, match="failed to pass monitoredBarrier"):
            group.monitored_barrier(timedelta(seconds=0.1), wait_all_ranks=True)
    dist.barrier()
