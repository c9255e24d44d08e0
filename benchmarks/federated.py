"""A federation next to Flower's: same model, data, seeds and rounds; 10 and 100 simulated clients.

    python3 -m venv /tmp/flower && /tmp/flower/bin/pip install 'flwr[simulation]' scikit-learn
    FLOWER_PYTHON=/tmp/flower/bin/python python benchmarks/federated.py --save
    python benchmarks/federated.py --plot federated.png      # accuracy by seconds, as a picture

Both simulate on all cores of this machine, Flower by Ray's processes, potluck by threads. The time
of a round is from one evaluation to the next; the median leaves out the first round, in which
Flower starts its processes. The two run one after the other, in turns.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import federated_task as task
from common import script
from common.claims import at_most

from potluck import federated
from potluck.cli.bench.machine import machine
from potluck.federated import FedAvg, Federation, Patience, Update

CLIENTS, ROUNDS, TURNS = (10, 100), 20, 2
FLOWER = Path(__file__).parent / "common" / "federated_flower.py"

Run = dict[str, list[float]]
"""``seconds`` of each round, and ``accuracies`` after each."""


def measure(quick: bool, say: script.Say) -> script.Measured:
    """Both frameworks in turns."""
    rounds, turns = (4, 1) if quick else (ROUNDS, TURNS)
    flower = os.environ.get("FLOWER_PYTHON", "")
    if not flower:
        say("FLOWER_PYTHON is not set: potluck alone is measured")
    found: dict[str, dict[str, list[Run]]] = {}
    claims = []
    for num in CLIENTS:
        runs = found[str(num)] = {"potluck": [], "flower": []}
        for _ in range(turns):
            runs["potluck"].append(ours(num, rounds))
            if flower:
                runs["flower"].append(theirs(flower, num, rounds))
        for who, each in runs.items():
            if each:
                last = [run["accuracies"][-1] for run in each]
                say(f"{num:>4} clients, {who:>7}: {seconds(each):.3f} s a round, accuracy {last}")
        if flower:
            ratio = seconds(runs["potluck"]) / seconds(runs["flower"])
            points = 100 * max(
                abs(a["accuracies"][-1] - b["accuracies"][-1])
                for a in runs["potluck"]
                for b in runs["flower"]
            )
            name = f"federation of {num} clients"
            claims += [
                at_most(f"{name}: seconds a round", "<= 0.5x", 0.5, [("Flower", ratio)]),
                at_most(f"{name}: accuracy apart", "<= 0.3%", 0.3, [("Flower", points)], "%"),
            ]
    return {"machine": machine(), "rounds": rounds, "runs": found}, claims


def seconds(runs: list[Run]) -> float:
    """The median time of a round, without each run's first."""
    return statistics.median(each for run in runs for each in run["seconds"][1:])


def ours(num_clients: int, rounds: int) -> Run:
    """The federation on potluck."""
    ends: list[float] = []
    accuracies: list[float] = []

    def train(parameters: Any, config: Mapping[str, Any]) -> Update:
        here = federated.site()
        return Update(*task.train(parameters, here.index, num_clients, config["round"]))

    def evaluate(number: int, parameters: Any) -> Mapping[str, float]:
        ends.append(time.perf_counter())
        accuracies.append(task.accuracy(parameters))
        return {"accuracy": accuracies[-1]}

    def main(federation: Federation) -> None:
        ends.append(time.perf_counter())
        patience = Patience(min_clients=num_clients)
        federation.run(
            task.first(), rounds=rounds, aggregation=FedAvg(), patience=patience, evaluate=evaluate
        )

    federated.simulate(main, train, num_clients=num_clients)
    spent = [after - before for before, after in itertools.pairwise(ends)]
    return {"seconds": spent, "accuracies": accuracies}


def theirs(python: str, num_clients: int, rounds: int) -> Run:
    """The federation on Flower, in a process of its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [python, str(FLOWER), str(num_clients), str(rounds), str(result)]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=1800)
        if done.returncode != 0 or not result.exists():
            raise RuntimeError(f"Flower failed: {(done.stdout + done.stderr)[-3000:]}")
        run: Run = json.loads(result.read_text())
        return run


def plot(result: Mapping[str, Any], file: Path) -> None:
    """Accuracy by seconds since the end of the first round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CLIENTS), figsize=(10, 4), sharey=True)
    for axis, (num, runs) in zip(axes, result["runs"].items(), strict=True):
        for who, each in runs.items():
            for number, run in enumerate(each):
                since = [sum(run["seconds"][1 : n + 1]) for n in range(len(run["seconds"]))]
                label = who if number == 0 else None
                colour = {"potluck": "tab:blue", "flower": "tab:orange"}[who]
                axis.plot(since, run["accuracies"], color=colour, label=label)
        axis.set(title=f"{num} clients", xlabel="seconds after the first round", ylabel="accuracy")
        axis.legend()
    figure.tight_layout()
    figure.savefig(file)


def with_plot(file: Path) -> script.Measure:
    """``measure``, and its picture in ``file``."""

    def measured(quick: bool, say: script.Say) -> script.Measured:
        result, claims = measure(quick, say)
        plot(result, file)
        return result, claims

    return measured


if __name__ == "__main__":
    wanted: script.Measure = measure
    if "--plot" in sys.argv[:-1]:
        at = sys.argv.index("--plot")
        wanted = with_plot(Path(sys.argv[at + 1]))
        del sys.argv[at : at + 2]
    sys.exit(script.main("federated", (__doc__ or "").split("\n")[0], wanted))
