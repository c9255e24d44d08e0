"""What torch's process group costs over potluck's engine, per 4 KiB all_reduce.

    python benchmarks/process_group_overhead.py

Times three ways to the same collective: the engine's own call, the process group's method, and
``torch.distributed.all_reduce``. In a world of one nothing waits for a peer, so the differences are
the Python layers' own time; in a world of two they are paired differences of alternating rounds,
with whatever else the machine does in them. Reach: the group's method costs at most 30 us more
than the engine's call, in a world of one. Exits with 1 if it does not.
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
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.types import ReduceOp

NUM_BYTES = 4096
ROUNDS = 15
REACH_US = 30.0
NAMES = ("engine", "process group", "torch.distributed")


def measure(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    """One rank: microseconds per call, for each round and each of the three ways."""
    torch.set_num_threads(1)
    dist.init_process_group("potluck", init_method=store, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert isinstance(group, PotluckProcessGroup)
    engine, tensor = group.communicator, torch.zeros(NUM_BYTES // 4)
    array = tensor.numpy()
    ways: tuple[Callable[[], object], ...] = (
        lambda: engine.all_reduce(array, ReduceOp.SUM, timeout_s=60).wait(),
        lambda: group.allreduce([tensor]).wait(),
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
    added = 0.0
    print(f"{NUM_BYTES} bytes, float32, sum; torch {torch.__version__}; median of {ROUNDS} rounds")
    for world_size in (1, 2):
        rounds = world(world_size)
        columns = list(zip(*rounds, strict=True))
        extra = [
            statistics.median(round_[way] - round_[0] for round_ in rounds) for way in range(3)
        ]
        added = added or extra[1]
        for way, name in enumerate(NAMES):
            print(
                f"world of {world_size}: {name:17} {statistics.median(columns[way]):8.1f} us "
                f"(+{extra[way]:.1f} us)"
            )
    print(f"the process group adds {added:.1f} us; reach: {REACH_US:.0f} us")
    return int(added > REACH_US)


if __name__ == "__main__":
    sys.exit(main())
