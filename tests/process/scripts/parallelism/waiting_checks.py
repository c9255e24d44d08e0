"""Blocking collectives of torch: the fast path through shared memory, and calls that it refuses."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from harness import check

from potluck._core import native


@contextlib.contextmanager
def fast_calls(expected: int):
    """So many of the calls inside take the fast path, where there is one."""
    communicator = dist.group.WORLD.communicator
    fast, outcomes = communicator.fast_path, []
    if fast is not None:
        communicator.fast_path = lambda *call: outcomes.append(fast(*call)) or outcomes[-1]
    yield
    communicator.fast_path = fast
    assert native.available == (fast is not None)
    assert fast is None or outcomes.count(True) == expected, outcomes


@check(2)
def waiting_calls_take_the_fast_path_and_give_the_same(run):
    size, rank = run.world_size, run.rank
    dist.all_reduce(torch.ones(1))  # the ranks set up their shared memory
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        # Shared memory does not combine complex numbers; torch makes them real for all_reduce.
        with fast_calls(4 if dtype.is_complex else 5):
            total = torch.full((2, 3), rank + 1).to(dtype)
            dist.all_reduce(total)
            assert torch.equal(total, torch.full((2, 3), 3).to(dtype)), total
            every = torch.zeros(size, 3, dtype=dtype)
            dist.all_gather_into_tensor(every, total[rank] * (rank + 1))
            assert torch.equal(every, total * torch.tensor([[1], [2]]).to(dtype)), every
            part = torch.zeros(3, dtype=dtype)
            dist.reduce_scatter_tensor(part, every)
            assert torch.equal(part, every[rank] * 2), part
            dist.broadcast(part, 1)
            assert torch.equal(part, every[1] * 2), part
            dist.barrier()


@check(2)
def a_rank_that_can_not_take_the_fast_path_meets_ranks_that_do(run):
    dist.all_reduce(torch.ones(1))
    # Not contiguous on one rank, contiguous on the other.
    shape = (3, 2) if run.rank else (2, 3)
    mine = torch.ones(shape).t() if run.rank else torch.ones(shape)
    assert mine.is_contiguous() == (run.rank == 0)
    with fast_calls(1 - run.rank):
        dist.all_reduce(mine)
    assert mine.tolist() == [[2.0] * 3] * 2
    # Waited for later on one rank, at once on the other.
    mine = torch.ones(2, 3)
    with fast_calls(run.rank):
        work = dist.all_reduce(mine, async_op=not run.rank)
        if work is not None:
            work.wait()
    assert mine.tolist() == [[2.0] * 3] * 2
    # A call that is under way goes first; the blocking call after it takes its turn.
    first, second = torch.ones(1 << 20), torch.ones(2)
    work = dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    work.wait()
    assert first.eq(2).all()
    assert second.tolist() == [2.0, 2.0]
    # A mean of integers, which torch truncates, is no operation of the engine.
    whole = torch.tensor([3, -4]) if run.rank else torch.tensor([2, -3])
    with fast_calls(0):
        dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [2, -3]
    # In a profile, too, it is an event that ends.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(second)
    assert "potluck:all_reduce" in {event.name for event in profile.events()}
