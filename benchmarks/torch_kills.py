"""A rank is killed (SIGKILL) while torch's DDP or FSDP2 trains over the potluck process group.

    python benchmarks/torch_kills.py --tries 50

Each try starts 3 ranks, lets them train, kills one at a random moment, and notes when each
survivor raised, and what. A try counts when every survivor raised PeerLost naming the killed rank
within the limit, and left in order. Exits with 1 if any did not. The seed is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: before the forks, not in each
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import potluck.torch.process_group.creation  # noqa: F401  (before the forks, not in each)
from potluck._core.system import need_posix

WORLD_SIZE = 3
HANG_S = 30.0


@dataclass(frozen=True, slots=True)
class Report:
    """What one survivor saw: ``raised`` is on the machine's monotonic clock."""

    raised: float
    error: str
    lost: int
    text: str


def train(kind: str, rank: int, store: str, pipe: Connection) -> None:
    """One rank: train until something raises, and report what did."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("potluck", init_method=store, rank=rank, world_size=WORLD_SIZE)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    try:
        while True:
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            step += 1
            if step == 3:
                pipe.send("training")
    except Exception as error:
        raised = time.monotonic()
        lost = getattr(error, "rank", -1)
        pipe.send(Report(raised, type(error).__name__, lost, str(error)))
    dist.destroy_process_group()


def attempt(kind: str, victim: int, delay_s: float, limit_s: float) -> tuple[float, list[str]]:
    """One try: the slowest survivor's seconds from the kill to the error, and what was wrong."""
    need_posix("forking the ranks")
    fork = multiprocessing.get_context("fork")
    faults: list[str] = []
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        pipes, ranks = [], []
        for rank in range(WORLD_SIZE):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=train, args=(kind, rank, store, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(HANG_S) or pipe.recv() != "training":
                    return 0.0, [f"rank {rank} did not train"]
            time.sleep(delay_s)  # the fault's moment, anywhere in a step
            killed = time.monotonic()
            ranks[victim].kill()
            for rank, pipe in enumerate(pipes):
                if rank == victim:
                    continue
                if not pipe.poll(HANG_S):
                    faults.append(f"rank {rank} hung")
                    continue
                report: Report = pipe.recv()
                seconds = report.raised - killed
                slowest = max(slowest, seconds)
                if report.error != "PeerLost" or report.lost != victim or seconds > limit_s:
                    faults.append(
                        f"rank {rank} raised {report.error} (rank {report.lost}) after "
                        f"{seconds:.2f} s: {report.text}"
                    )
            for rank, process in enumerate(ranks):
                process.join(HANG_S)
                if rank != victim and process.exitcode != 0:
                    faults.append(f"rank {rank} ended with {process.exitcode}")
        finally:
            for process, pipe in zip(ranks, pipes, strict=True):
                process.kill()
                process.join()
                pipe.close()
    return slowest, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tries", type=int, default=50, help="kills for each kind of training")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds from kill to error")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}, {WORLD_SIZE} ranks, torch {torch.__version__}")
    chance = random.Random(options.seed)
    torch.set_num_threads(1)
    failed = 0
    for kind in ("ddp", "fsdp2"):
        times = []
        for number in range(options.tries):
            victim, delay_s = chance.randrange(WORLD_SIZE), chance.uniform(0, 0.05)
            slowest, faults = attempt(kind, victim, delay_s, options.limit)
            times.append(slowest)
            for fault in faults:
                print(f"{kind} try {number}, rank {victim} killed: {fault}")
            failed += bool(faults)
        print(
            f"{kind:5}: {options.tries} kills; the slowest survivor raised after "
            f"{statistics.median(times) * 1e3:.0f} ms (median), {max(times) * 1e3:.0f} ms (worst)"
        )
    print("all survivors named the lost rank" if not failed else f"{failed} tries failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
