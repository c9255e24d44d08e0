"""The cost model against measurement: is the algorithm that it chooses the fastest one?

    python benchmarks/cost_model.py                  # native loop; needs Linux, root and iproute2
    python benchmarks/cost_model.py --engine python  # the Python loop
    python benchmarks/cost_model.py --quick          # few cells and rounds: does it work at all?
    python benchmarks/cost_model.py --worlds 2       # only two hosts
    python benchmarks/cost_model.py --workers 2      # on each host
    python benchmarks/cost_model.py --rounds 15      # medians of more rounds: three times as long
    python benchmarks/cost_model.py --fit            # also calibrate: constants that fit best
    python benchmarks/cost_model.py --json FILE      # keep what was measured
    python benchmarks/cost_model.py --read FILE      # measure nothing: judge and fit a kept file

A cell is an operation, a number of hosts with as many workers each, a size and a rate. All
algorithms of a cell run in one group, in rounds that alternate; a figure is the median over the
rounds of the seconds of the slowest rank. The model is that of the engine, with the rate of the
cell and, since the hosts (network namespaces) share this machine, its number of cores. The fit is a
coordinate descent on four constants of ``collectives/links.py``: latency, work a byte, work a
frame, and work to combine a byte; see ``badness``. Run it on a quiet machine.
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
from common.placements import InHosts

import potluck
from potluck._core.collectives import doubling
from potluck._core.collectives.choose import choose, estimate
from potluck._core.collectives.links import LINKS, LinkModel
from potluck._core.collectives.plan import Algorithm, Operation
from potluck._core.collectives.registry import algorithms_for, build_plan
from potluck._core.types import Engine, ReduceOp
from potluck.cli.bench.machine import heading, machine
from potluck.cli.bench.table import show
from support import hosts

OPERATIONS = tuple(operation for operation in Operation if operation is not Operation.BARRIER)
ROOTED = (Operation.BROADCAST, Operation.REDUCE, Operation.SCATTER, Operation.GATHER)
WORLDS = (2, 4, 8)
RATES = {"1gbit": 20 << 10, "10gbit": 128 << 10}
"""Each with the bytes that may pass at once: with more, small messages would see no rate at all;
with less, the kernel's timers lose some of the rate."""
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
    hosts: int
    workers: int
    nbytes: int
    rate: str
    seconds: dict[Algorithm, float]

    @property
    def nodes(self) -> tuple[int, ...]:
        return nodes_of(self.hosts, self.workers)

    def links(self, model: LinkModel) -> LinkModel:
        """The model with the rate of this cell's network."""
        beta = 8 / (float(self.rate.removesuffix("gbit")) * 1e9)
        remote = model.remote._replace(beta_s_per_byte=beta)
        return replace(model, remote=remote, nodes=self.nodes)

    def predicted(self, algorithm: Algorithm, model: LinkModel) -> float:
        plan = build_plan(self.operation, algorithm, len(self.nodes), 0, nodes=self.nodes)
        return estimate(plan, self.nbytes, self.links(model))

    def chosen(self, model: LinkModel) -> Algorithm:
        nodes = self.nodes
        chosen = choose(
            self.operation,
            self.nbytes,
            len(nodes),
            ReduceOp.SUM,
            nodes=nodes,
            links=self.links(model),
        )
        return measured_as(self.operation, nodes)[chosen]

    def loss(self, model: LinkModel) -> float:
        """The chosen algorithm's time over that of the fastest."""
        return self.seconds[self.chosen(model)] / min(self.seconds.values())


def nodes_of(num_hosts: int, workers: int) -> tuple[int, ...]:
    """The host of each rank."""
    return tuple(rank // workers for rank in range(num_hosts * workers))


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
def measured_as(operation: Operation, nodes: tuple[int, ...]) -> dict[Algorithm, Algorithm]:
    """Of algorithms whose plans are the same only the first is measured: what stands for each.

    Small worlds have many. With one worker per host, hierarchical is another by a second name.
    """
    world = len(nodes)
    first: dict[Any, Algorithm] = {}
    found: dict[Algorithm, Algorithm] = {}
    for algorithm in algorithms_for(operation):
        if algorithm is not Algorithm.HIERARCHICAL or len(set(nodes)) < world:
            plans = [build_plan(operation, algorithm, world, r, nodes=nodes) for r in range(world)]
            key = tuple((plan.num_chunks, plan.steps) for plan in plans)
            found[algorithm] = first.setdefault(key, algorithm)
    return found


def candidates(operation: Operation, nodes: tuple[int, ...], nbytes: int) -> list[Algorithm]:
    """What is measured, and may be chosen."""
    return [
        algorithm
        for algorithm in dict.fromkeys(measured_as(operation, nodes).values())
        if algorithm is not Algorithm.DOUBLING or nbytes <= doubling.MAX_BYTES
    ]


def work(cases: list[list[Any]], rounds: int) -> None:
    """A worker: the slowest rank's seconds of every case, as lines on rank 0's stdout."""
    ctx = potluck.init("env", timeout_s=120)
    names = list(dict.fromkeys(member.node for member in ctx.members))
    nodes = tuple(names.index(member.node) for member in ctx.members)
    for name, nbytes in cases:
        operation = Operation(name)
        calls = {
            algorithm: call(ctx, operation, nbytes, algorithm)
            for algorithm in candidates(operation, nodes, nbytes)
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
    model: LinkModel,
    engine: Engine,
    worlds: tuple[int, ...],
    workers: int,
    cases: list[tuple[Operation, int]],
    rounds: int,
) -> list[Cell]:
    """Every cell, by running this script as the workers."""
    found = []
    for num_hosts, rate in itertools.product(worlds, RATES):
        with (
            hosts.Network(num_hosts, rate=rate, burst=RATES[rate]) as network,
            tempfile.TemporaryDirectory(prefix="potluck-cost-model-") as folder,
        ):
            placement = InHosts(network, workers, Path(folder))
            world = num_hosts * workers
            environment = os.environ | {
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": placement.address(0),
                "MASTER_PORT": "29400",
                "POTLUCK_PSK": "ab" * 32,
                "POTLUCK_NATIVE": "1" if engine is Engine.NATIVE else "0",
                "OMP_NUM_THREADS": "1",
            }
            program = [sys.executable, __file__, "--worker", json.dumps(cases), str(rounds)]
            processes = [
                subprocess.Popen(
                    placement.command(rank, program),
                    env=environment
                    | {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(placement.local_rank(rank)),
                        "POTLUCK_HOME": f"{folder}/home{rank // workers}",
                    },
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
                for rank in range(world)
            ]
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                name, nbytes, medians = json.loads(line)
                seconds = by_algorithm(medians)
                cell = Cell(Operation(name), num_hosts, workers, nbytes, rate, seconds)
                found.append(cell)
                print(show_cell(cell, model), flush=True)
            if any(process.wait() for process in processes):
                raise SystemExit(f"a worker of {num_hosts} hosts at {rate} failed")
    return found


def by_algorithm(seconds: dict[str, float]) -> dict[Algorithm, float]:
    return {Algorithm(name): each for name, each in seconds.items()}


def show_cell(cell: Cell, model: LinkModel) -> str:
    chosen, best = cell.chosen(model), min(cell.seconds, key=cell.seconds.__getitem__)
    predicted = cell.predicted(chosen, model)
    mark = "" if cell.loss(model) <= NEAR else "  <-- not chosen well"
    return (
        f"{cell.operation:<15}{cell.hosts:>2} hosts {cell.rate:>7}{show(cell.nbytes):>9}"
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


def badness(cells: list[Cell], model: LinkModel) -> float:
    """What the fit minimizes: choices first, then the seconds. The part of the cells that are not
    chosen well, the mean of what these choices lose, and a little of the error."""
    losses = [cell.loss(model) for cell in cells]
    bad = statistics.mean(loss > NEAR for loss in losses)
    lost = statistics.mean(max(0.0, loss - NEAR) for loss in losses)
    return bad + lost + 0.15 * error(cells, model)


def model_of(values: list[float], model: LinkModel) -> LinkModel:
    alpha, work, frame, gamma = values
    remote = model.remote._replace(alpha_s=alpha, work_s_per_byte=work)
    return replace(model, remote=remote, frame_s=frame, gamma_s_per_byte=gamma)


def fit(cells: list[Cell], model: LinkModel) -> LinkModel:
    """Coordinate descent, in steps of factors that shrink from 2 to 1.05."""
    remote = model.remote
    values = [remote.alpha_s, remote.work_s_per_byte, model.frame_s, model.gamma_s_per_byte]
    least = badness(cells, model)
    factor = 2.0
    while factor > 1.05:
        moved = False
        for index, scale in itertools.product(range(len(values)), (factor, 1 / factor)):
            tried = [*values[:index], values[index] * scale, *values[index + 1 :]]
            if (found := badness(cells, model_of(tried, model))) < least:
                values, least, moved = tried, found, True
        if not moved:
            factor = math.sqrt(factor)
    return model_of(values, model)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Engine, choices=Engine, default=Engine.NATIVE)
    parser.add_argument("--quick", action="store_true", help="few cells and rounds")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"of each cell ({ROUNDS})")
    parser.add_argument("--fit", action="store_true", help="calibrate the constants")
    parser.add_argument("--worlds", nargs="+", type=int, metavar="N", help="numbers of hosts")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="on each host")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was measured")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing; read this")
    parser.add_argument("--worker", nargs=2, metavar=("CASES", "ROUNDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker[0]), int(arguments.worker[1]))
        return 0
    if arguments.read:
        kept = json.loads(arguments.read.read_text())
        engine, processors = Engine(kept["engine"]), kept["processors"]
        cells = [
            Cell(Operation(name), num_hosts, workers, nbytes, rate, by_algorithm(each))
            for name, num_hosts, workers, nbytes, rate, each in kept["cells"]
        ]
        model = replace(LINKS[engine], processors=processors)
    else:
        if reason := hosts.missing():
            print(f"skipped: {reason}")
            return 0
        print(heading(machine()))
        engine, processors = arguments.engine, os.cpu_count() or 1
        operations = OPERATIONS[:4] if arguments.quick else OPERATIONS
        sizes = SIZES[1:4] if arguments.quick else SIZES
        worlds, rounds = ((2, 4), 3) if arguments.quick else (WORLDS, ROUNDS)
        worlds = tuple(arguments.worlds or worlds)
        rounds = arguments.rounds or rounds
        model = replace(LINKS[engine], processors=processors)
        cases = [*itertools.product(operations, sizes)]
        cells = measure(model, engine, worlds, arguments.workers, cases, rounds)
    if arguments.json:
        rows = [[c.operation, c.hosts, c.workers, c.nbytes, c.rate, c.seconds] for c in cells]
        kept = {"engine": engine, "processors": processors, "cells": rows}
        arguments.json.write_text(json.dumps(kept) + "\n")
    for count in sorted({cell.hosts for cell in cells}):
        some = [cell for cell in cells if cell.hosts == count]
        print(f"{count} hosts: {verdict(some, model)[0]:.1%} of {len(some)} cells")
    good, wrong = verdict(cells, model)
    print(f"{good:.1%} of {len(cells)} cells within {NEAR}x of the fastest (wanted: {WANTED:.0%})")
    print(f"model / measured: off by a factor of {math.exp(wrong):.2f} on average")
    if arguments.fit:
        found = fit(cells, model)
        fitted, off = verdict(cells, found)
        print(f"fitted: {fitted:.1%} of the cells, off by a factor of {math.exp(off):.2f}: {found}")
    return 0 if good >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
