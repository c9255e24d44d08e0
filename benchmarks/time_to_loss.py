"""How long two hosts train over a slow network until they reach a loss, beside Gloo.

    python benchmarks/time_to_loss.py --strategies local-topk --seeds 1 --save --docs   # needs root
    python benchmarks/time_to_loss.py --networks 100mbit --tasks digits --seeds 1
    python benchmarks/time_to_loss.py --final --save --docs   # the last losses against one machine

Real arithmetic: a CNN on scikit-learn's digits and a small GPT on the source of Python's standard
library (``common/loss_tasks.py``), both hosts on cores of this machine, the same samples in the
same steps for all. One seed of ``local-topk`` takes ten minutes, and of ``int4`` and ``local-sgd``
at 20 Mbit/s longer. The clock counts the steps, and stands while the loss of what is held out is
computed, every 20 steps.

Gloo (torch's DDP in float32, not encrypted) trains to the loss at 1 Gbit/s. Its losses are the same
in all networks, so that the slower ones measure a step, and its time there is that step times the
number of steps. potluck trains to the loss in each network, over TLS.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import claims, loss_plot, pages, results, script
from common.claims import Claim
from common.loss_tasks import TASKS, Task
from common.loss_worker import GLOO, LOOK_EVERY, OURS, SERIAL, worker
from common.networks import KINDS, settle, slowed
from common.placements import InHosts

from potluck.cli.bench.crew import Crew
from potluck.cli.bench.machine import heading, load, machine
from potluck.cli.bench.peers import PEERS
from support import hosts

ASKED = {"1gbit": 3.0, "100mbit": 10.0, "20mbit": 25.0}
"""How many times faster than Gloo, by network."""
FINAL = {"digits": 0.3, "gpt": 1.0}
"""By task: how far a last figure may be from that of one machine, in points or in percent."""
_TIMED_STEPS = 8
DOCS = Path(__file__).parents[1] / "docs" / "slow-networks.md"
PICTURE = DOCS.parent / "assets" / "time-to-loss.png"


def measure(quick: bool, say: script.Say) -> script.Measured:
    """Times to the loss, for ``make bench``."""
    return run(list(ASKED), list(TASKS), list(OURS), range(1 if quick else 3), say)


def run(
    networks: Sequence[str],
    tasks: Sequence[str],
    strategies: Sequence[str],
    seeds: Sequence[int],
    say: script.Say,
) -> script.Measured:
    """A row for each network, task and strategy."""
    facts = machine()
    rows: list[dict[str, Any]] = []
    if reason := hosts.missing():
        say(f"skipped: {reason}")
        return {"machine": facts, "rows": rows}, []
    say(f"{'task':<14}{'network':<26}{'strategy':<12}{'steps':>7}{'time':>10}{'of Gloo':>9}")
    gloo: dict[tuple[str, str], float] = {}
    with hosts.Network(2) as network:
        for peer in (GLOO, "potluck-tls"):
            with crew_of(peer, network) as crew:
                for name in tasks:
                    task = TASKS[name]
                    found = (
                        by_gloo(crew, network, task, networks, seeds)
                        if peer == GLOO
                        else by_us(crew, network, task, networks, strategies, seeds)
                    )
                    for row in found:
                        if peer == GLOO:
                            gloo[name, row["network"]] = row["time_s"]
                        row["of_gloo"] = gloo[name, row["network"]] / row["time_s"]
                        rows.append(row)
                        say(line(row))
    facts["load_after"] = load()
    return {"machine": facts, "rows": rows}, what_follows(rows)


def run_final(
    tasks: Sequence[str], strategies: Sequence[str], seeds: Sequence[int], say: script.Say
) -> script.Measured:
    """The last loss and accuracy of whole trainings, by strategy and on one machine."""
    facts = machine()
    rows: list[dict[str, Any]] = []
    say(f"{'task':<14}{'strategy':<12}{'loss':>8}{'accuracy':>10}")
    with hosts.Network(2) as network, crew_of("potluck-tls", network) as crew:
        for name in tasks:
            for strategy in (SERIAL, *strategies):
                ends = []
                for seed in seeds:
                    crew.ask("make", task=name, strategy=strategy, seed=seed)
                    while crew.ask("time", steps=LOOK_EVERY)[0]["steps"] == LOOK_EVERY:
                        pass
                    ends.append(agreed(crew.ask("validate")))
                losses, rights = zip(*ends, strict=True)
                rows.append({"task": name, "strategy": strategy})
                rows[-1] |= {"losses": losses, "accuracies": rights, "seeds": list(seeds)}
                mean, right = statistics.mean(losses), statistics.mean(rights)
                say(f"{name:<14}{strategy:<12}{mean:>8.4f}{right:>10.2%}")
    facts["load_after"] = load()
    return {"machine": facts, "final": rows}, of_final(rows)


@contextlib.contextmanager
def crew_of(peer: str, network: hosts.Network) -> Iterator[Crew]:
    """The ranks of one library, one in each host."""
    program = (sys.executable, __file__)
    with tempfile.TemporaryDirectory(prefix="potluck-loss-") as folder:
        place = InHosts(network)
        with Crew(
            PEERS[peer], len(network), Path(folder), placement=place, program=program
        ) as crew:
            crew.join()
            yield crew


def by_gloo(
    crew: Crew,
    network: hosts.Network,
    task: Task,
    networks: Sequence[str],
    seeds: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Gloo's rows: to the loss at 1 Gbit/s, then steps alone."""
    with slowed(network, KINDS["1gbit"]):
        whole = [to_the_loss(crew, task, GLOO, seed) for seed in seeds]
    steps = statistics.median(each["steps"] for each in whole)
    for key in networks:
        row = {"task": task.name, "network": key, "strategy": GLOO, "steps": steps}
        if key == "1gbit":
            yield row | median_of(whole)
            continue
        crew.ask("make", task=task.name, strategy=GLOO, seed=seeds[0])
        with slowed(network, KINDS[key]):
            settle(crew, KINDS[key])
            timed = [slowest(crew.ask("time", steps=1)) for _ in range(_TIMED_STEPS)]
        step_s = statistics.median(timed)
        losses = [[(at, at * step_s, loss) for at, _, loss in each["curve"]] for each in whole]
        yield row | {
            "time_s": step_s * steps,
            "step_s": step_s,
            "samples_s": timed,
            "curves": losses,
        }


def by_us(
    crew: Crew,
    network: hosts.Network,
    task: Task,
    networks: Sequence[str],
    strategies: Sequence[str],
    seeds: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """potluck's rows, all trained to the loss."""
    for key in networks:
        with slowed(network, KINDS[key]):
            settle(crew, KINDS[key])
            for name in strategies:
                found = [to_the_loss(crew, task, name, seed) for seed in seeds]
                row = {"task": task.name, "network": key, "strategy": name}
                yield row | median_of(found)


def to_the_loss(crew: Crew, task: Task, strategy: str, seed: int) -> dict[str, Any]:
    """Train until the validation loss is at most the task's. ``time_s`` is that of the steps of the
    slower rank; ``curve`` has (steps, seconds, loss) at each look. RuntimeError if a whole training
    does not get there."""
    crew.ask("make", task=task.name, strategy=strategy, seed=seed)
    curve: list[tuple[int, float, float]] = []
    steps, seconds = 0, 0.0
    while True:
        answers = crew.ask("time", steps=LOOK_EVERY)
        steps += answers[0]["steps"]
        seconds += slowest(answers)
        loss, _ = agreed(crew.ask("validate"))
        curve.append((steps, seconds, loss))
        if loss <= task.target:
            return {"steps": steps, "time_s": seconds, "curve": curve}
        if answers[0]["steps"] < LOOK_EVERY:  # the training is over
            raise RuntimeError(
                f"{strategy}, seed {seed}: {task.name} is at {loss:.3f} after {steps} steps, and "
                f"not at {task.target}"
            )


def slowest(answers: Sequence[dict[str, Any]]) -> float:
    return max(float(answer["seconds"]) for answer in answers)


def agreed(answers: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The loss and the accuracy that all ranks have found. RuntimeError if they differ."""
    found = {(answer["loss"], answer["accuracy"]) for answer in answers}
    if len(found) != 1:
        raise RuntimeError(f"ranks have different parameters: {sorted(found)}")
    return found.pop()


def median_of(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "steps": statistics.median(each["steps"] for each in found),
        "time_s": statistics.median(each["time_s"] for each in found),
        "curves": [each["curve"] for each in found],
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['task']:<14}{KINDS[row['network']].name:<26}{row['strategy']:<12}"
        f"{row['steps']:>7g}{row['time_s']:>8.1f} s{row['of_gloo']:>8.1f}x"
    )


def what_follows(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """How much faster than Gloo, by the fastest strategy of each network."""
    found = []
    for key, asked in ASKED.items():
        best = []
        for name in TASKS:
            mine = {
                row["strategy"]: row["of_gloo"]
                for row in rows
                if (row["task"], row["network"]) == (name, key) and row["strategy"] != GLOO
            }
            if mine:
                strategy = max(mine, key=lambda each: mine[each])
                best.append((f"{name} by {strategy}", mine[strategy]))
        if best:
            what = f"the same loss, 2 hosts, {KINDS[key].name}: times as fast as Gloo"
            found.append(claims.at_least(what, f">= {asked:g}x", asked, best))
    return found


def of_final(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """How far the last figures are from those of one machine, by strategy."""
    found = []
    for name, most in FINAL.items():
        mine = [row for row in rows if row["task"] == name]
        alone = [row for row in mine if row["strategy"] == SERIAL]
        if not alone:
            continue
        shown = []
        for row in mine:
            if row["strategy"] == SERIAL:
                continue
            if name == "digits":
                means = [statistics.mean(each["accuracies"]) for each in (*alone, row)]
                shown.append((row["strategy"], (means[0] - means[1]) * 100))
            else:
                means = [statistics.mean(each["losses"]) for each in (*alone, row)]
                shown.append((row["strategy"], (means[1] / means[0] - 1) * 100))
        unit = "points of accuracy lost" if name == "digits" else "% of loss gained"
        seeds = len(alone[0]["seeds"])
        what = f"{TASKS[name].title}, the end of a training, {seeds} seeds: {unit}"
        found.append(claims.at_most(what, f"<= {most:g}", most, shown, ""))
    return found


def into_docs(result: dict[str, Any]) -> None:
    """Replace what stands between this result's marks of docs/slow-networks.md."""
    final = "final" in result
    lines = final_table(result["final"]) if final else time_table(result["rows"])
    name = "final" if final else "loss"
    pages.fill(DOCS, result["machine"], "\n".join(lines), name=name)
    if not final:
        loss_plot.draw(result, PICTURE)


def code_of(strategy: str) -> str:
    if strategy == GLOO:
        return "torch's DDP over Gloo, float32"
    return "one machine" if strategy == SERIAL else f"`{OURS[strategy].code}`"


def time_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys((row["task"], row["network"]) for row in rows))
    heads = [f"{TASKS[task].title}, {KINDS[key].name}" for task, key in columns]
    lines = [f"| strategy | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(row["strategy"] for row in rows):
        here = {(row["task"], row["network"]): row for row in rows if row["strategy"] == name}
        cells = [
            f"{here[at]['time_s']:.1f} s ({here[at]['of_gloo']:.1f}x)" if at in here else "-"
            for at in columns
        ]
        lines.append(f"| {code_of(name)} | {' | '.join(cells)} |")
    return lines


def final_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    heads = [f"{TASKS[task].title}: {'accuracy' if task == 'digits' else 'loss'}" for task in tasks]
    lines = [f"| strategy | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(row["strategy"] for row in rows):
        cells = []
        for task in tasks:
            found = [each for each in rows if (each["task"], each["strategy"]) == (task, name)]
            if not found:  # this strategy did not train that task
                cells.append("-")
            elif task == "digits":
                cells.append(f"{statistics.mean(found[0]['accuracies']):.2%}")
            else:
                cells.append(f"{statistics.mean(found[0]['losses']):.3f}")
        lines.append(f"| {code_of(name)} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=ASKED, default=list(ASKED))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--strategies", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--seeds", type=int, help="how many trainings (3; with --final 5)")
    parser.add_argument("--final", action="store_true", help="whole trainings: the last losses")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses over time")
    parser.add_argument("--save", action="store_true", help="write both to benchmarks/results/")
    parser.add_argument("--docs", action="store_true", help="write into docs/slow-networks.md")
    arguments = parser.parse_args()
    if arguments.final and arguments.plot:
        parser.error("--final has no losses over time to draw")
    page = script.Page()
    page.say(heading(machine()))
    seeds = range(arguments.seeds or (5 if arguments.final else 3))
    if arguments.final:
        result, found = run_final(arguments.tasks, arguments.strategies, seeds, page.say)
    else:
        chosen = arguments.networks, arguments.tasks, arguments.strategies
        result, found = run(*chosen, seeds, page.say)
    result["benchmark"] = "final_loss" if arguments.final else "time_to_loss"
    result["claims"] = claims.as_dicts(found)
    page.say("\n" + claims.markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        loss_plot.draw(result, arguments.plot)
    if arguments.save:
        path = results.save(result, page.lines)
        if not arguments.final:
            loss_plot.draw(result, path.with_suffix(".png"))
        print(f"saved: {path}")
    if arguments.docs:
        into_docs(result)
    return 0 if all(claim.met is not False for claim in found) else 1


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1]) if "BENCH_TOKEN" in os.environ else main())
