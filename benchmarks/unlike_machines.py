"""Unlike machines: equal shares against shares by speed against the ideal split, in turns.

    python benchmarks/unlike_machines.py                       # one of two workers 3x slower
    python benchmarks/unlike_machines.py --slowdown 2 --save   # 2x slower, and keep the result

Two worker processes train one network with the elastic loop. Both are held to a part of a core (a
control group's CPU quota; without root, SIGSTOP and SIGCONT), so that what else the machine does
matters less; the second one's part is three times smaller. Three ways take turns:

- ``equal``: every worker gets half of the batch, as plain data parallelism does;
- ``by speed``: ``Policy(shares=ProportionalShares())``, which knows nothing and measures as it goes
  (its first steps, until shares have settled, are not in the medians; they are shown apart);
- ``ideal``: the best fixed split, found before by trying them all in steps of 1/32 of the batch
  (``--grains``).

The ratio is that of the medians of one round, and of these the median over rounds: what disturbs
the machine for seconds then hits both. The ``bound`` is the batch over the sum of the speeds that
the workers reach alone, without communication.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import results, throttle

from potluck.cli.bench.machine import heading, machine
from potluck.cli.bench.placement import reserved_ports

REACH = 1.15
WAYS = ("equal", "by speed", "ideal")
SETTLING = 10
"""Steps at the beginning of a round that are not timed: shares are being found."""


def main() -> int:
    parser = argparse.ArgumentParser(description="equal shares, shares by speed, the ideal split")
    parser.add_argument("--slowdown", type=float, default=3.0, help="of the second worker")
    parser.add_argument("--core", type=float, default=0.6, help="the first worker's part of one")
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1024], help="per step")
    parser.add_argument("--width", type=int, default=1024, help="of the network's hidden layers")
    parser.add_argument("--steps", type=int, default=40, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per way")
    parser.add_argument("--grains", type=int, default=32, help="of a batch, in fixed splits")
    parser.add_argument("--limit", choices=["auto", "cgroup", "signals"], default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/")
    arguments = parser.parse_args()
    facts = machine()
    text = [heading(facts)]
    print(text[0], flush=True)
    rows = []
    for batch in arguments.batch:
        with reserved_ports(1) as [port]:
            row = measure(arguments, batch, port)
        if row is None:
            print("a worker failed", file=sys.stderr)
            return 1
        rows.append(row)
        lines = table(row)
        text += lines
        print("\n".join(lines), flush=True)
    result = {"benchmark": "unlike_machines", "reach": REACH, "machine": facts, "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.save:
        print(f"saved: {results.save(result, text)}")
    return 0 if all(row["ratio"] <= REACH and row["same_parameters"] for row in rows) else 1


def measure(arguments: argparse.Namespace, batch: int, port: int) -> dict[str, Any] | None:
    """One table's figures, from two workers that meet at ``port``; None if one fails."""
    numbers = (batch, arguments.steps, arguments.rounds, arguments.width, arguments.grains)
    options = [str(number) for number in numbers]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *options],
            env=os.environ
            | {"BENCH_ROLE": "worker", "WORLD_SIZE": "2", "RANK": str(rank)}
            | {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert workers[0].stdout is not None
        workers[0].stdout.readline()  # both have started, which a limit would only draw out
        shares = [arguments.core, arguments.core / arguments.slowdown]
        with contextlib.ExitStack() as limits:
            for process, share in zip(workers, shares, strict=True):
                how = limits.enter_context(throttle.throttled(process.pid, share, arguments.limit))
            output, _ = workers[0].communicate()
            workers[1].wait()
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        return None
    limits_used = {"batch": batch, "parts_of_a_core": shares, "limited_by": how}
    row: dict[str, Any] = json.loads(output) | limits_used
    return row


def table(row: dict[str, Any]) -> list[str]:
    batch, speeds, parts = row["batch"], row["speeds"], row["parts_of_a_core"]
    lines = [
        "",
        f"batches of {batch}; workers are held to {parts[0]:.2f} and {parts[1]:.2f} of a core by",
        f"{row['limited_by']}; alone they reach {speeds[0]:.0f} and {speeds[1]:.0f} samples/s",
        "",
        f"{'way':>10}{'split':>12}{'ms per step':>14}{'samples/s':>12}{'/ ideal':>10}",
    ]
    ideal = row["ideal"]["median_s"]
    bound = row["bound_s"]
    for way in WAYS:
        cell = row[way]
        split = ":".join(map(str, cell["split"]))
        lines.append(
            f"{way:>10}{split:>12}{cell['median_s'] * 1e3:>14.1f}{batch / cell['median_s']:>12.0f}"
            f"{cell['median_s'] / ideal:>10.2f}"
        )
    lines.append(
        f"{'bound':>10}{'':>12}{bound * 1e3:>14.1f}{batch / bound:>12.0f}{bound / ideal:>10.2f}"
    )
    rounds = f"rounds from {min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
    lines += [
        "",
        f"by speed / ideal: {row['ratio']:.2f} (reach {REACH}; {rounds})",
        f"with the first {SETTLING} steps, while shares are found: {row['ratio_with_start']:.2f}",
        f"parameters of both workers: {'equal bit by bit' if row['same_parameters'] else 'DIFFER'}",
    ]
    return lines


# ---------------------------------------------------------------- one worker


def worker(batch: int, steps: int, rounds: int, width: int, grains: int) -> int:
    answers = os.fdopen(os.dup(1), "w")  # nothing that a library prints can get in between
    os.dup2(2, 1)
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F

    import potluck
    from potluck.torch import DistributedDataParallel, ElasticLoop, Policy, ProportionalShares
    from potluck.training.shares import Cost, Costs

    torch.set_num_threads(1)
    ctx = potluck.init("env")
    if ctx.is_master:
        print("ready", file=answers, flush=True)
    num_samples = batch * steps
    x = torch.randn(num_samples, 512, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 10, (num_samples,), generator=torch.Generator().manual_seed(1))

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 10),
        )

    def alone(seconds: float) -> float:
        """Samples per second of this worker when it waits for nobody."""
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        size = batch // 2
        count, began = -2, 0.0
        while count < 1 or time.perf_counter() - began < seconds:
            if count == 0:
                began = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x[:size]), y[:size]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            count += 1
        return count * size / (time.perf_counter() - began)

    class Clock:
        """Times steps, and holds to a fixed split if there is one."""

        def __init__(self, costs: Costs | None) -> None:
            self.costs = costs
            self.seconds: list[float] = []
            self.split: tuple[int, ...] = ()

        def on_train_begin(self, job: ElasticLoop) -> None:
            self.job = job
            if self.costs is not None:
                job._training.pace.costs = self.costs
            self.last = time.perf_counter()

        def on_step_end(self, step: int, loss: float) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self.last)
            self.last = now
            self.split = self.job.shares

    def train(way: str, split: tuple[int, ...] = (), num_steps: int = steps) -> tuple[Clock, str]:
        model = DistributedDataParallel(network(), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        clock = Clock(tuple(Cost(0.0, 1 / part) for part in split) or None)
        job = ElasticLoop(
            model,
            optimizer,
            (x, y),
            batch_size=batch,
            policy=Policy(
                hash_every=10_000, shares=ProportionalShares() if way == "by speed" else None
            ),
            callbacks=[clock],
        )
        for images, labels in job:
            with job.step():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                job.log(loss=loss)
                optimizer.step()
            if job.step_number == num_steps:
                break
        return clock, job.parameter_hash()

    def settled(clock: Clock) -> float:
        return statistics.median(clock.seconds[SETTLING:])

    def best_split() -> tuple[int, int]:
        """Of the fixed ones, tried in turns; both workers take rank 0's choice."""
        grain = batch // grains
        tried: dict[tuple[int, int], list[float]] = {}
        for slow in [*range(grain, batch // 2 + 1, grain)] * min(rounds, 2):
            split = (batch - slow, slow)
            tried.setdefault(split, []).extend(train("fixed", split, 6)[0].seconds[1:])
        best = min(tried, key=lambda split: statistics.median(tried[split]))
        slow = int(ctx.broadcast(np.array([best[1]]))[0])
        return batch - slow, slow

    ctx.barrier()
    speeds = tuple(ctx.all_gather(np.array([alone(float(rounds))])).reshape(-1).tolist())
    row: dict[str, Any] = {"speeds": speeds, "bound_s": batch / sum(speeds)}
    clocks: dict[str, list[Clock]] = {way: [] for way in WAYS}
    split = best_split()
    hashes = []
    for number in range(rounds):
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            ctx.barrier()
            clock, digest = train(way, split if way == "ideal" else ())
            clocks[way].append(clock)
            hashes.append(digest)
    mine = np.frombuffer("".join(hashes).encode(), np.uint8)
    rows = ctx.all_gather(mine.copy())
    row["same_parameters"] = bool((rows == rows[0]).all())
    for way, found in clocks.items():
        row[way] = {
            "split": found[-1].split,
            "rounds_s": [clock.seconds for clock in found],
            "median_s": statistics.median(s for clock in found for s in clock.seconds[SETTLING:]),
        }
    pairs = list(zip(clocks["by speed"], clocks["ideal"], strict=True))
    row["ratios"] = [settled(mine) / settled(best) for mine, best in pairs]
    row["ratio"] = statistics.median(row["ratios"])
    row["ratio_with_start"] = statistics.median(
        sum(mine.seconds) / sum(best.seconds) for mine, best in pairs
    )
    if ctx.is_master:
        print(json.dumps(row), file=answers, flush=True)
    ctx.close()
    return 0


if __name__ == "__main__":
    if os.environ.get("BENCH_ROLE"):
        sys.exit(worker(*map(int, sys.argv[1:])))
    sys.exit(main())
