"""KMeans, a random forest and boosted trees on two workers of one thread, next to scikit-learn in
one process and, for boosted trees, to two processes of XGBoost.

    python benchmarks/estimators.py kmeans --rounds 3
    python benchmarks/estimators.py forest --rounds 1 --threads 2
    python benchmarks/estimators.py boosting --threads 1 xgboost  # pip install xgboost-cpu
    python benchmarks/estimators.py kmeans --hosts   # between two hosts at 1 Gbit/s; needs root
    python benchmarks/estimators.py kmeans --save    # keep the result in benchmarks/results/

Each round runs potluck's two workers, and scikit-learn with one thread and with two, one after the
other. The samples are made in each process from the same seed; only `fit` is timed, on
potluck's side of the slower worker. The medians of the rounds and their ratios are printed, also
those of the CPU time of the process (of the busier worker), which other work on the machine
disturbs less.

With ``--hosts`` each round is a fit of two workers on one host, which share memory, and one of two
workers on hosts of their own (network namespaces of this machine), whose link has 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import results
from common.placements import InHosts
from common.script import Page

import potluck
from potluck import estimators
from potluck.cli.bench.crew import Channel, Crew
from potluck.cli.bench.machine import heading, machine
from potluck.cli.bench.peers import PEERS
from support.hosts import Network

FEATURES = {"kmeans": 20, "forest": 20, "boosting": 28}
CENTERS = 8
BOOSTED = {"max_iter": 100, "max_leaf_nodes": 31, "max_bins": 255, "learning_rate": 0.1}


def samples(kind: str, num: int, part: int, parts: int) -> tuple[Any, Any]:
    """Part ``part`` of ``num`` samples in overlapping groups, float32, and the number of each, or
    for boosted trees whether that is odd."""
    features = FEATURES[kind]
    centers = np.random.default_rng(0).normal(size=(CENTERS, features)).astype(np.float32)
    start, stop = potluck.DataPartitioner(num, parts).get_partition(part)
    random = np.random.default_rng(1 + part)
    y = random.integers(CENTERS, size=stop - start)
    x = random.standard_normal((stop - start, features), dtype=np.float32)
    x += centers[y]
    return x, y % 2 if kind == "boosting" else y


def model(kind: str, library: Any, **options: Any) -> Any:
    """KMeans from given centers for a fixed number of iterations, a forest, or boosted trees."""
    if kind == "boosting":
        boosted = library.HistGradientBoostingClassifier
        return boosted(early_stopping=False, random_state=0, **BOOSTED, **options)
    if kind == "kmeans":
        first = samples(kind, 1000, 0, 1)[0][:CENTERS]
        return library.KMeans(CENTERS, init=first, n_init=1, max_iter=20, tol=0, **options)
    forest = library.RandomForestClassifier
    return forest(20, min_samples_leaf=5, random_state=0, **options)


def timed(kind: str, estimator: Any, x: Any, y: Any) -> list[float]:
    """Seconds of `fit`: by the clock, and of CPU time."""
    began, cpu = time.perf_counter(), time.process_time()
    estimator.fit(x) if kind == "kmeans" else estimator.fit(x, y)
    return [time.perf_counter() - began, time.process_time() - cpu]


def xgboost_worker(given: dict[str, Any], num: int, rank: int, result: Path) -> None:
    """One of two processes of XGBoost's own distributed mode, with one thread. Of its times the
    larger ones of both are kept; `fit` has the making of its bins, as the others have."""
    import xgboost

    x, y = samples("boosting", num, rank, 2)
    options = {"tree_method": "hist", "grow_policy": "lossguide", "max_depth": 0, "nthread": 1}
    options |= {"max_leaves": BOOSTED["max_leaf_nodes"], "eta": BOOSTED["learning_rate"]}
    options |= {"objective": "binary:logistic", "max_bin": BOOSTED["max_bins"], "lambda": 0}
    with xgboost.collective.CommunicatorContext(**given):
        xgboost.collective.allreduce(np.ones(1), xgboost.collective.Op.SUM)
        began, cpu = time.perf_counter(), time.process_time()
        data = xgboost.QuantileDMatrix(x, y, nthread=1, max_bin=BOOSTED["max_bins"])
        xgboost.train(options, data, num_boost_round=BOOSTED["max_iter"])
        seconds = np.array([time.perf_counter() - began, time.process_time() - cpu])
        slowest = xgboost.collective.allreduce(seconds, xgboost.collective.Op.MAX)
    if rank == 0:
        result.write_text(json.dumps(slowest.tolist()))


def run_xgboost(num: int) -> list[float]:
    """Two processes of XGBoost, which meet at a tracker in this one; their times."""
    from xgboost.tracker import RabitTracker

    tracker = RabitTracker(n_workers=2, host_ip="127.0.0.1")
    tracker.start()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        command = [sys.executable, __file__, "boosting", "--samples", str(num), "--who", "xgboost"]
        command += ["--result", str(result), "--tracker", json.dumps(tracker.worker_args())]
        workers = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            for rank in range(2)
        ]
        assert [each.wait() for each in workers] == [0, 0]
        seconds, cpu = json.loads(result.read_text())
        return [float(seconds), float(cpu)]


def work(kind: str, num: int, who: str, result: Path) -> None:
    """The script of one process."""
    if who == "potluck":
        with potluck.init() as ctx:
            x, y = samples(kind, num, ctx.rank, ctx.world_size)
            ctx.barrier(timeout=600)
            seconds = timed(kind, model(kind, estimators, ctx=ctx), x, y)
            slowest = ctx.all_reduce(np.array(seconds), "max")
            if ctx.is_master:
                result.write_text(json.dumps(slowest.tolist()))
        return
    import sklearn.cluster
    import sklearn.ensemble

    library = sklearn.cluster if kind == "kmeans" else sklearn.ensemble
    parts = [samples(kind, num, part, 2) for part in range(2)]
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    options = {"n_jobs": int(who)} if kind == "forest" else {}
    result.write_text(json.dumps(timed(kind, model(kind, library, **options), x, y)))


def run(kind: str, num: int, who: str) -> list[float]:
    """Start the processes of one measurement; returns its two times."""
    if who == "xgboost":
        return run_xgboost(num)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        command = [__file__, kind, "--samples", str(num), "--who", who, "--result", str(result)]
        threads = "1" if who == "potluck" else who
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        start = [sys.executable]
        if who == "potluck":
            start = [str(Path(sys.executable).with_name("potluck")), "run", "--workers", "2"]
            start += [f"--env={name}=1" for name in names]
        subprocess.run(
            [*start, *command],
            check=True,
            env=os.environ | dict.fromkeys(names, threads),
            stdout=subprocess.DEVNULL,
        )
        seconds, cpu = json.loads(result.read_text())
        return [float(seconds), float(cpu)]


def worker() -> int:
    """One of two ranks with a part of the samples each, told when to fit."""
    with potluck.init(timeout_s=600) as ctx:
        channel = Channel.to_crew(ctx.rank, ctx.world_size)
        while True:
            match channel.receive():
                case {"do": "make", "kind": str(kind), "num": int(num)}:
                    x, y = samples(kind, num, ctx.rank, ctx.world_size)
                    channel.send()
                case {"do": "fit"}:
                    ctx.barrier()
                    channel.send(seconds=timed(kind, model(kind, estimators, ctx=ctx), x, y)[0])
                case {"do": "end"}:
                    return 0


def between_hosts(kind: str, num: int, rounds: int, page: Page) -> dict[str, list[float]]:
    """Seconds of the same fit on one host and on two, in turns."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    program = (sys.executable, __file__)
    with (
        tempfile.TemporaryDirectory(prefix="potluck-fit-") as folder,
        Network(2, rate="1gbit") as network,
        Crew(PEERS["potluck"], 2, Path(folder), program=program) as one,
        Crew(
            PEERS["potluck-tls"], 2, Path(folder), placement=InHosts(network), program=program
        ) as two,
    ):
        crews = {"one host": one, "two hosts": two}
        for crew in crews.values():
            crew.join()
            crew.ask("make", kind=kind, num=num)
        found: dict[str, list[float]] = {name: [] for name in crews}
        for _ in range(rounds):
            for name, crew in crews.items():
                found[name].append(max(answer["seconds"] for answer in crew.ask("fit")))
                page.say(f"{name:>10}: {found[name][-1]:.2f} s")
    here, there = (statistics.median(each) for each in found.values())
    page.say(f"{kind}, {num} x {FEATURES[kind]}, 2 workers, medians of {rounds}")
    page.say(
        f"  one host: {here:.2f} s, two hosts at 1 Gbit/s: {there:.2f} s, {there / here:.2f} times"
    )
    return found


def beside_scikit_learn(
    kind: str, num: int, rounds: int, threads: list[str], page: Page
) -> dict[str, list[list[float]]]:
    """Seconds, and seconds of CPU, of potluck and of scikit-learn with each number of threads."""
    found: dict[str, list[list[float]]] = {who: [] for who in ("potluck", *threads)}
    for _ in range(rounds):
        for who, times in found.items():
            times.append(run(kind, num, who))
            page.say(f"{who:>8}: {times[-1][0]:.2f} s, {times[-1][1]:.2f} s of CPU")
    page.say(f"{kind}, {num} x {FEATURES[kind]}, medians of {rounds}")
    for column, unit in enumerate(("s", "s of CPU")):
        medians = {who: statistics.median(t[column] for t in times) for who, times in found.items()}
        ours = medians.pop("potluck")
        page.say(f"  potluck: {ours:.2f} {unit}")
        for number, theirs in medians.items():
            name = f"scikit-learn with {number} thread{'s' * (number != '1')}"
            name = "two processes of XGBoost" if number == "xgboost" else name
            page.say(f"  {ours / theirs:.2f} times {name} ({theirs:.2f} {unit})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("kind", choices=[*FEATURES])
    parser.add_argument("--samples", type=int, help="10 M for kmeans, 1 M for trees")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads",
        nargs="+",
        choices=["1", "2", "xgboost"],
        default=["1", "2"],
        help="of scikit-learn; xgboost for two processes of its own",
    )
    parser.add_argument("--hosts", action="store_true", help="one host against two at 1 Gbit/s")
    results.add_option(parser)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tracker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    num = given.samples or (10_000_000 if given.kind == "kmeans" else 1_000_000)
    if given.tracker:
        xgboost_worker(given.tracker, num, given.rank, given.result)
        return
    if given.who:
        work(given.kind, num, given.who, given.result)
        return
    page, facts = Page(), machine("scikit-learn")
    page.say(heading(facts))
    found: dict[str, Any]
    if given.hosts:
        found = between_hosts(given.kind, num, given.rounds, page)
    else:
        found = beside_scikit_learn(given.kind, num, given.rounds, given.threads, page)
    result = {
        "benchmark": f"estimators-{given.kind}{'-hosts' * given.hosts}",
        "machine": facts,
        "samples": num,
        "features": FEATURES[given.kind],
        "seconds": found,
    }
    results.keep(given.save, result, page.lines)


if __name__ == "__main__":
    if "BENCH_TOKEN" in os.environ:
        sys.exit(worker())
    main()
