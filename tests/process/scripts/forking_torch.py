"""The same for torch: two ranks of a process group, whose children and DataLoader workers fork.

forking_torch.py SCENARIO,... FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import forking
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from potluck.errors import ForkedProcess, GroupError

NUM_SAMPLES = 24


def exact() -> None:
    """Sums are right in every element, on the default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, world + 1))
    for size in (1, 1000, forking.LARGE):
        mine = torch.full((size,), rank + 1.0)
        dist.all_reduce(mine)
        assert (mine == total).all(), (size, mine)
    mine = torch.full((5000,), rank + 1.0)
    work = dist.all_reduce(mine, async_op=True)
    assert work is not None
    work.wait()
    assert (mine == total).all()
    objects: list[int | None] = [None] * world
    dist.all_gather_object(objects, rank)
    assert objects == list(range(world))


class Samples(Dataset[torch.Tensor]):
    """Samples 0 to 23; ``calls()`` is called for each."""

    def __init__(self, calls: Callable[[], object] | None = None) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.calls is not None:
            self.calls()
        return torch.tensor([float(index)])


def add_thousand() -> None:
    dist.all_reduce(torch.full((4,), 1000.0))


def group() -> None:
    """A child calls the group and its store, and leaves them, in every way."""
    part = dist.new_group([0, 1])
    exact()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        mine = torch.zeros(3)
        pending = dist.irecv(mine, 1)
        future = pending.get_future() if pending is not None else None

        def tries() -> None:
            one = torch.ones(4)
            for call in (
                lambda: dist.all_reduce(one),
                lambda: dist.all_reduce(torch.ones(forking.LARGE), async_op=True),
                lambda: dist.all_reduce(one, group=part),
                lambda: dist.broadcast(one, 0),
                lambda: dist.all_gather_object([None, None], 1),
                dist.barrier,
                lambda: dist.group.WORLD.monitored_barrier(),
                lambda: dist.send(one, 1),
                lambda: dist.recv(one, 1),
                lambda: dist.new_group([0, 1], use_local_synchronization=True),
                pending.wait,
                future.wait,
            ):
                forking.refused(call)

        def leaves() -> None:
            dist.destroy_process_group(part)
            dist.destroy_process_group()

        for work in (tries, leaves, lambda: None):
            forking.in_child(work)
            forking.in_child(work, is_clean=True)
        forking.note("done")
        dist.barrier()
        pending.wait()
        assert (mine == 7).all()
    else:
        forking.await_note("done")
        dist.barrier()
        dist.send(torch.full((3,), 7.0), 0)
    store.set(f"key-{dist.get_rank()}", "value")
    assert store.get(f"key-{1 - dist.get_rank()}") == b"value"
    exact()


def loader() -> None:
    """Workers that only load, and workers that call a collective."""
    loads = DataLoader(Samples(), batch_size=4, num_workers=4, persistent_workers=True)
    calls = DataLoader(Samples(add_thousand), batch_size=4, num_workers=4)
    expected = float(sum(range(NUM_SAMPLES)))
    for _ in range(2):
        exact()
        total = torch.zeros(1)
        for batch in loads:
            total += batch.sum()
            exact()  # amid loading
        assert total == expected
        try:
            list(calls)
        except ForkedProcess as error:
            assert f"belongs to process {os.getpid()}," in str(error), error
            assert 'multiprocessing_context="spawn"' in str(error), error
        else:
            raise AssertionError("a worker's collective was not refused")
        exact()


def spawned_loader() -> None:
    """A worker by spawn: a process of its own, which imports torch."""
    if dist.get_rank() == 0:
        loads = DataLoader(Samples(), 4, num_workers=1, multiprocessing_context="spawn")
        assert sum(float(batch.sum()) for batch in loads) == float(sum(range(NUM_SAMPLES)))
    exact()


def outlived() -> None:
    """Rank 0 is killed while its DataLoader's workers live on. Rank 1 hears of it at once."""
    exact()
    loads = DataLoader(Samples(), batch_size=4, num_workers=2, persistent_workers=True)
    assert len(list(loads)) == NUM_SAMPLES // 4
    if dist.get_rank() == 0:
        pid = forking.start_child(lambda: forking.await_note("over"))
        dist.barrier()
        assert pid
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    began = time.monotonic()
    try:
        exact()
    except GroupError as error:
        assert error.rank == 0, error
    else:
        raise AssertionError("a sum with a dead rank")
    finally:
        forking.note("over")
    assert time.monotonic() - began < 10


SCENARIOS = {each.__name__: each for each in (group, loader, spawned_loader, outlived)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    method = os.environ.get("FORKING_INIT", "env://")
    dist.init_process_group("potluck", init_method=method, timeout=timedelta(seconds=30))
    for scenario in sys.argv[1].split(","):
        SCENARIOS[scenario]()
    if sys.argv[1] != "outlived":
        dist.destroy_process_group()
