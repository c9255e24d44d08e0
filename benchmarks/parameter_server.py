"""Four workers of which one is four times slower, by each way of training together.

    python benchmarks/parameter_server.py --seconds 10
    python benchmarks/parameter_server.py --save     # keep the result in benchmarks/results/

Every worker trains the same network on its quarter of scikit-learn's digits, by batches of 32. A
batch takes 40 ms on three workers and 160 ms on the last: the gradient is computed, and the rest is
waited, so that four workers need no four cores. What is left is what the way of training costs. For
each way: gradients that count per second as a part of the sum of the workers' speeds, and the test
accuracy after the same seconds. The order of the ways changes from round to round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import results
from common.script import Page

from potluck.cli.bench.machine import heading, machine

FAST_S, SLOW_S = 0.040, 0.160
WORKERS = 4
WAYS = ("all-reduce", "synchronous", "one backup worker", "asynchronous", "elastic averaging")


def train(way: str, rate: float, seconds: float) -> dict[str, float] | None:
    """One worker's training; the figures on rank 0."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.functional import cross_entropy

    import potluck
    from potluck.parameter_server import SGD, Asynchronous, ElasticAveraging, Synchronous
    from potluck.torch import DDP, ServerOptimizer

    torch.set_num_threads(1)
    modes: dict[str, Any] = {
        "synchronous": Synchronous(),
        "one backup worker": Synchronous(backup_workers=1),
        "asynchronous": Asynchronous(),
        "elastic averaging": ElasticAveraging(alpha=0.9 / WORKERS, of="parameters"),
    }
    with potluck.init() as ctx:
        X, y = load_digits(return_X_y=True)
        X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
        parts = potluck.DataPartitioner(1400, WORKERS, "stratified", labels=y[:1400])
        mine = torch.from_numpy(parts.get_indices(ctx.rank))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        takes = SLOW_S if ctx.rank == WORKERS - 1 else FAST_S
        ps = None
        forward: nn.Module = model
        optimizer: Any = torch.optim.SGD(model.parameters(), rate)
        if way == "all-reduce":
            forward = DDP(model, ctx)
        else:
            ps = potluck.ParameterServer(ctx, modes[way], optimizer=SGD(rate))
            own = optimizer if way == "elastic averaging" else None
            optimizer = ServerOptimizer(model, ps, optimizer=own, every=5)
        torch.manual_seed(1 + ctx.rank)
        counted = 0
        ctx.barrier()
        began = time.perf_counter()
        while True:
            step_began = time.perf_counter()
            batch = mine[torch.randint(len(mine), (32,))]
            optimizer.zero_grad()
            loss = cross_entropy(forward(X[batch]), y[batch])
            if way != "all-reduce":
                loss.backward()  # type: ignore[no-untyped-call]
                time.sleep(max(0.0, takes - (time.perf_counter() - step_began)))
            else:  # the wait comes before the transfer, as computing would
                time.sleep(max(0.0, takes - (time.perf_counter() - step_began)))
                loss.backward()  # type: ignore[no-untyped-call]
            counted += optimizer.step() is not False
            if way == "all-reduce":
                over = torch.tensor([float(time.perf_counter() - began > seconds)])
                if ctx.all_reduce(over, "max")[0]:
                    break
            elif time.perf_counter() - began > seconds:
                break
        took = time.perf_counter() - began
        found = None
        if ps is not None:
            ps.close()
        counts = ctx.all_gather(torch.tensor([counted / took]))
        with torch.no_grad():
            right = (model(X[1400:]).argmax(1) == y[1400:]).float().mean().item()
        if ctx.rank == 0:
            full = (WORKERS - 1) / FAST_S + 1 / SLOW_S
            found = {"speed": float(counts.sum()) / full, "accuracy": right}
        return found


def measure(way: str, rate: float, seconds: float) -> dict[str, float]:
    """One training in worker processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        run = [str(Path(sys.executable).with_name("potluck")), "run", "--workers", str(WORKERS)]
        script = [__file__, "--train", way, str(rate), str(seconds), str(path)]
        done = subprocess.run(run + script, capture_output=True, text=True, timeout=300)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        figures: dict[str, float] = json.loads(path.read_text())
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each training")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate of all")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    results.add_option(parser)
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        way, rate, seconds, path = arguments.train
        found = train(way, float(rate), float(seconds))
        if found is not None:
            Path(path).write_text(json.dumps(found))
        return
    page, facts = Page(), machine("scikit-learn")
    page.say(heading(facts))
    ways = list(arguments.ways)
    figures: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            figures[way].append(measure(way, arguments.rate, arguments.seconds))
    page.say(f"{arguments.rounds} rounds of {arguments.seconds:g} s")
    page.say("way                  part of the sum of speeds   test accuracy")
    for way, rows in figures.items():
        speed = statistics.median(row["speed"] for row in rows)
        accuracy = statistics.median(row["accuracy"] for row in rows)
        page.say(f"{way:20} {speed:12.2f} {accuracy:27.3f}")
    result = {
        "benchmark": "parameter_server",
        "machine": facts,
        "batch_s": {"fast": FAST_S, "slow": SLOW_S},
        "seconds": arguments.seconds,
        "rate": arguments.rate,
        "ways": figures,
    }
    results.keep(arguments.save, result, page.lines)


if __name__ == "__main__":
    main()
