"""The cost model against measurement: is the algorithm that it chooses the fastest one?

    python benchmarks/cost_model.py                  # native loop; needs Linux, root and iproute2
    python benchmarks/cost_model.py --engine python  # the Python loop
    python benchmarks/cost_model.py --quick          # few cells and rounds: does it work at all?
    python benchmarks/cost_model.py --worlds 2       # only two hosts: each has a core here
    python benchmarks/cost_model.py --fit            # also calibrate: constants that fit best
    python benchmarks/cost_model.py --json FILE      # keep what was measured
    python benchmarks/cost_model.py --read FILE      # measure nothing: judge and fit a kept file

A cell is an operation, a number of hosts with one worker each, a size and a rate. All algorithms
of a cell run in one group, in rounds that alternate; a figure is the median over the rounds of the
seconds of the slowest rank. The fit is a coordinate descent on the five constants of
``collectives/links.py``; it minimizes the mean of |log(model / measured)| over all cells and
algorithms. Run it on a quiet machine. The hosts (network namespaces) share its cores, and the model
gives each its own: with more hosts than cores the cells measure the work of all hosts together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import potluck
from potluck.bench.machine import heading, machine
from potluck.bench.sizes import show
from potluck.collectives import doubling
from potluck.collectives.choose import choose, estimate
from potluck.collectives.links import DEFAULT_LINKS, LinkModel, Wire
from potluck.collectives.plan import Algorithm, Operation
from potluck.collectives.registry import algorithms_for, build_plan
from potluck.types import ReduceOp
from support import hosts

OPERATIONS = tuple(operation for operation in Operation if operation is not Operation.BARRIER)
ROOTED = (Operation.BROADCAST, Operation.REDUCE, Operation.SCATTER, Operation.GATHER)
WORLDS = (2, 4, 8)
RATES = ("1gbit", "10gbit")
SIZES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20)
ROUNDS = 5
LONGEST_S = 0.1
"""A round of one algorithm takes about this long, or one call."""
NEAR = 1.1
"""A choice is good if it takes at most so much longer than the fastest."""
WANTED = 0.95
"""Of all cells."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured: ``seconds`` by algorithm."""

    operation: Operation
    world_size: int
    nbytes: int
    rate: str
    seconds: dict[Algorithm, float]

    def links(self, model: LinkModel) -> LinkModel:
        """The model of this cell's network: its wire may be slower than the engine."""
        wire_s = 8 / (float(self.rate.removesuffix("gbit")) * 1e9)
        beta = max(model.remote.beta_s_per_byte, wire_s)
        return replace(model, remote=Wire(model.remote.alpha_s, beta))

    def predicted(self, algorithm: Algorithm, model: LinkModel) -> float:
        plan = build_plan(self.operation, algorithm, self.world_size, 0)
        return estimate(plan, self.nbytes, self.links(model))

    def chosen(self, model: LinkModel) -> Algorithm:
        links = self.links(model)
        chosen = choose(self.operation, self.nbytes, self.world_size, ReduceOp.SUM, links=links)
        return measured_as(self.operation, self.world_size)[chosen]

    def loss(self, model: LinkModel) -> float:
        """The chosen algorithm's time over that of the fastest."""
        return self.seconds[self.chosen(model)] / min(self.seconds.values())


def call(ctx: Any, operation: Operation, nbytes: int, algorithm: Algorithm) -> Any:
    """A function that makes the call once. ``nbytes`` is the whole data, as in ``choose``."""
    world = ctx.world_size
    whole = np.zeros(max(world, nbytes // 4 // world * world), np.float32)
    part = whole[: whole.size // world].copy()
    rows = whole.reshape(world, -1)
    calls = {
        Operation.ALL_REDUCE: lambda: ctx.all_reduce(whole, algorithm=algorithm),
        Operation.REDUCE_SCATTER: lambda: ctx.reduce_scatter(rows, out=part, algorithm=algorithm),
        Operation.ALL_GATHER: lambda: ctx.all_gather(part, out=whole, algorithm=algorithm),
        Operation.BROADCAST: lambda: ctx.broadcast(whole, 0, algorithm=algorithm),
        Operation.REDUCE: lambda: ctx.reduce(whole, 0, algorithm=algorithm),
        Operation.SCATTER: lambda: ctx.scatter(
            part, rows if ctx.rank == 0 else None, algorithm=algorithm
        ),
        Operation.GATHER: lambda: ctx.gather(part, 0, algorithm=algorithm),
        Operation.ALL_TO_ALL: lambda: ctx.all_to_all(rows, algorithm=algorithm),
    }
    return calls[operation]


@cache
def measured_as(operation: Operation, world_size: int) -> dict[Algorithm, Algorithm]:
    """Of algorithms whose plans are the same only the first is measured: what stands for each.

    Small worlds have many. With one worker per host, hierarchical is another by a second name.
    """
    first: dict[Any, Algorithm] = {}
    found: dict[Algorithm, Algorithm] = {}
    for algorithm in algorithms_for(operation):
        if algorithm is not Algorithm.HIERARCHICAL:
            plans = [build_plan(operation, algorithm, world_size, r) for r in range(world_size)]
            key = tuple((plan.num_chunks, plan.steps) for plan in plans)
            found[algorithm] = first.setdefault(key, algorithm)
    return found


def candidates(operation: Operation, world_size: int, nbytes: int) -> list[Algorithm]:
    """What is measured, and may be chosen."""
    return [
        algorithm
        for algorithm in dict.fromkeys(measured_as(operation, world_size).values())
        if algorithm is not Algorithm.DOUBLING or nbytes <= doubling.MAX_BYTES
    ]


def work(cases: list[list[Any]], rounds: int) -> None:
    """A worker: the slowest rank's seconds of every case, as lines on rank 0's stdout."""
    ctx = potluck.init("env", timeout_s=120)
    for name, nbytes in cases:
        operation = Operation(name)
        calls = {
            algorithm: call(ctx, operation, nbytes, algorithm)
            for algorithm in candidates(operation, ctx.world_size, nbytes)
        }
        samples: dict[str, list[float]] = {algorithm: [] for algorithm in calls}
        counts = dict.fromkeys(calls, 1)
        for number in range(rounds + 1):
            order = list(calls) if number % 2 else list(calls)[::-1]
            for algorithm in order:
                seconds = timed(ctx, calls[algorithm], counts[algorithm], operation in ROOTED)
                if number:
                    samples[algorithm].append(seconds)
                else:  # the first one makes links, and says how many calls fill a round
                    counts[algorithm] = max(1, min(50, int(LONGEST_S / seconds)))
        if ctx.rank == 0:
            medians = {name: statistics.median(each) for name, each in samples.items()}
            print(json.dumps([name, nbytes, medians]), flush=True)
    ctx.close()


def timed(ctx: Any, once: Callable[[], Any], count: int, is_rooted: bool) -> float:
    """Seconds of one of ``count`` calls, on the slowest rank.

    The root of a broadcast may begin the next one before the last rank has ended this one. So a
    rooted call is followed by a barrier, whose own time is measured next to it and taken off.
    """

    def loop(*steps: Callable[[], Any]) -> float:
        ctx.barrier()
        began = time.perf_counter()
        for _ in range(count):
            for step in steps:
                step()
        took = np.array([time.perf_counter() - began])
        return float(ctx.all_reduce(took, "max")[0]) / count

    if not is_rooted:
        return loop(once)
    return max(loop(once, ctx.barrier) - loop(ctx.barrier), 1e-6)


def measure(
    engine: str, worlds: tuple[int, ...], cases: list[tuple[Operation, int]], rounds: int
) -> list[Cell]:
    """Every cell, by running this script as the workers."""
    found = []
    for world, rate in itertools.product(worlds, RATES):
        with (
            hosts.Network(world, rate=rate) as network,
            tempfile.TemporaryDirectory(prefix="potluck-cost-model-") as folder,
        ):
            environment = os.environ | {
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": network[0].address,
                "MASTER_PORT": "29400",
                "POTLUCK_PSK": "ab" * 32,
                "POTLUCK_NATIVE": "1" if engine == "native" else "0",
                "POTLUCK_USE_SHARED_MEMORY": "no",
                "OMP_NUM_THREADS": "1",
            }
            program = [sys.executable, __file__, "--worker", json.dumps(cases), str(rounds)]
            workers = [
                host.start(
                    program,
                    env=environment | {"RANK": str(rank), "POTLUCK_HOME": f"{folder}/{rank}"},
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
                for rank, host in enumerate(network)
            ]
            assert workers[0].stdout is not None
            for line in workers[0].stdout:
                name, nbytes, medians = json.loads(line)
                seconds = {Algorithm(each): value for each, value in medians.items()}
                cell = Cell(Operation(name), world, nbytes, rate, seconds)
                found.append(cell)
                print(show_cell(cell, DEFAULT_LINKS), flush=True)
            if any(worker.wait() for worker in workers):
                raise SystemExit(f"a worker of {world} hosts at {rate} failed")
    return found


def show_cell(cell: Cell, model: LinkModel) -> str:
    chosen, best = cell.chosen(model), min(cell.seconds, key=cell.seconds.__getitem__)
    predicted = cell.predicted(chosen, model)
    mark = "" if cell.loss(model) <= NEAR else "  <-- not chosen well"
    return (
        f"{cell.operation:<15}{cell.world_size:>2} hosts {cell.rate:>7}{show(cell.nbytes):>9}"
        f"  {chosen:<12}{cell.seconds[chosen] * 1e3:>9.3f} ms, predicted {predicted * 1e3:>9.3f};"
        f" fastest {best:<12}{cell.seconds[best] * 1e3:>9.3f}{mark}"
    )


def verdict(cells: list[Cell], model: LinkModel) -> tuple[float, float]:
    """The part of the cells that are chosen well; the mean of |log(model / measured)|."""
    good = sum(cell.loss(model) <= NEAR for cell in cells) / len(cells)
    return good, error(cells, model)


def error(cells: list[Cell], model: LinkModel) -> float:
    return statistics.mean(
        abs(math.log(cell.predicted(algorithm, model) / seconds))
        for cell in cells
        for algorithm, seconds in cell.seconds.items()
    )


def model_of(values: list[float], model: LinkModel) -> LinkModel:
    alpha, beta, frame, gamma = values
    return replace(model, remote=Wire(alpha, beta), frame_s=frame, gamma_s_per_byte=gamma)


def fit(cells: list[Cell], model: LinkModel) -> LinkModel:
    """Coordinate descent, in steps of factors that shrink from 2 to 1.05."""
    values = [*model.remote, model.frame_s, model.gamma_s_per_byte]
    least = error(cells, model)
    factor = 2.0
    while factor > 1.05:
        moved = False
        for index, scale in itertools.product(range(len(values)), (factor, 1 / factor)):
            tried = [*values[:index], values[index] * scale, *values[index + 1 :]]
            if (found := error(cells, model_of(tried, model))) < least:
                values, least, moved = tried, found, True
        if not moved:
            factor = math.sqrt(factor)
    return model_of(values, model)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("native", "python"), default="native")
    parser.add_argument("--quick", action="store_true", help="few cells and rounds")
    parser.add_argument("--fit", action="store_true", help="calibrate the constants")
    parser.add_argument("--worlds", nargs="+", type=int, metavar="N", help="numbers of hosts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was measured")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing; read this")
    parser.add_argument("--worker", nargs=2, metavar=("CASES", "ROUNDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker[0]), int(arguments.worker[1]))
        return 0
    if arguments.read:
        rows = json.loads(arguments.read.read_text())
        cells = [
            Cell(Operation(name), world, nbytes, rate, {Algorithm(a): s for a, s in each.items()})
            for name, world, nbytes, rate, each in rows
        ]
    else:
        if reason := hosts.missing():
            print(f"skipped: {reason}")
            return 0
        print(heading(machine()))
        operations = OPERATIONS[:4] if arguments.quick else OPERATIONS
        sizes = SIZES[1:4] if arguments.quick else SIZES
        worlds, rounds = ((2, 4), 3) if arguments.quick else (WORLDS, ROUNDS)
        worlds = tuple(arguments.worlds or worlds)
        cells = measure(arguments.engine, worlds, [*itertools.product(operations, sizes)], rounds)
    if arguments.json:
        rows = [[c.operation, c.world_size, c.nbytes, c.rate, c.seconds] for c in cells]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    for world in sorted({cell.world_size for cell in cells}):
        some = [cell for cell in cells if cell.world_size == world]
        print(f"{world} hosts: {verdict(some, DEFAULT_LINKS)[0]:.1%} of {len(some)} cells")
    good, wrong = verdict(cells, DEFAULT_LINKS)
    print(f"{good:.1%} of {len(cells)} cells within {NEAR}x of the fastest (wanted: {WANTED:.0%})")
    print(f"model / measured: off by a factor of {math.exp(wrong):.2f} on average")
    if arguments.fit:
        found = fit(cells, DEFAULT_LINKS)
        fitted, off = verdict(cells, found)
        print(f"fitted: {fitted:.1%} of the cells, off by a factor of {math.exp(off):.2f}: {found}")
    return 0 if good >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
