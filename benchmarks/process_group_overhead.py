"""What torch's process group costs over potluck's engine, per 4 KiB all_reduce.

    python benchmarks/process_group_overhead.py

Times two pairs of calls of the same collective. Begun and waited for later: the engine's own call
and the process group's method. Waited for at once, through shared memory: the engine's fast
path and ``torch.distributed.all_reduce``. In a world of one nothing waits for a peer (and there is
no fast path: its row is the engine's call again), so the differences are the Python layers' own
time; in a world of two they are paired differences of alternating rounds, with whatever else the
machine does in them. Reach: the layer costs at most 30 us in each pair, in a world of one and of
two. Exits with 1 if it does not.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import potluck.torch.process_group.creation  # noqa: F401  (before the forks)
from potluck._core.collectives.plan import Operation
from potluck._core.engine.request import Request
from potluck._core.system import need_posix
from potluck._core.types import ReduceOp
from potluck.torch.process_group.group import PotluckProcessGroup

NUM_BYTES = 4096
ROUNDS = 15
REACH_US = 30.0
NAMES = ("engine", "process group", "engine, at once", "torch.distributed")
AGAINST = (0, 0, 2, 2)
"""What each way is compared with."""


def measure(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    """One rank: microseconds per call, for each round and each of the ways."""
    torch.set_num_threads(1)
    dist.init_process_group("potluck", init_method=store, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert isinstance(group, PotluckProcessGroup)
    engine, tensor = group.communicator, torch.zeros(NUM_BYTES // 4)
    array = tensor.numpy()
    dist.all_reduce(tensor)  # the ranks set up their shared memory
    fast = engine.fast_path

    def posted() -> object:
        request = Request(Operation.ALL_REDUCE, array, array, ReduceOp.SUM, timeout_s=60)
        return engine.run(request).wait()

    ways: tuple[Callable[[], object], ...] = (
        posted,
        lambda: group.allreduce([tensor]).wait(),
        posted
        if fast is None
        else lambda: fast(Operation.ALL_REDUCE, tensor, tensor, "sum", 0, 60.0, True),
        lambda: dist.all_reduce(tensor),
    )
    calls = 2000 if world_size == 1 else 150
    rounds = [[_microseconds(way, calls) for way in ways] for _ in range(ROUNDS + 1)]
    pipe.send(rounds[1:])
    dist.destroy_process_group()


def _microseconds(way: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - started) / calls * 1e6


def world(world_size: int) -> list[list[float]]:
    """Rank 0's rounds."""
    need_posix("forking the ranks")
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        pipes = [fork.Pipe() for _ in range(world_size)]
        ranks = [
            fork.Process(target=measure, args=(rank, world_size, store, pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        rounds: list[list[float]] = pipes[0][0].recv()
        for process in ranks:
            process.join()
    return rounds


def main() -> int:
    torch.set_num_threads(1)
    added = []
    print(f"{NUM_BYTES} bytes, float32, sum; torch {torch.__version__}; median of {ROUNDS} rounds")
    for world_size in (1, 2):
        rounds = world(world_size)
        columns = list(zip(*rounds, strict=True))
        extra = [
            statistics.median(round_[way] - round_[AGAINST[way]] for round_ in rounds)
            for way in range(len(NAMES))
        ]
        added += extra
        for way, name in enumerate(NAMES):
            print(
                f"world of {world_size}: {name:17} {statistics.median(columns[way]):8.1f} us "
                f"(+{extra[way]:.1f} us)"
            )
    print(f"torch's layer adds {max(added):.1f} us at most; reach: {REACH_US:.0f} us")
    return int(max(added) > REACH_US)


if __name__ == "__main__":
    sys.exit(main())
