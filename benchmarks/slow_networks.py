"""Training over slow networks: how much of a step is computation, by strategy, beside Gloo.

    python benchmarks/slow_networks.py --save --docs          # about 24 minutes; needs root
    python benchmarks/slow_networks.py --save --docs --quick  # without cells of 10 s a step; 17
    python benchmarks/slow_networks.py --networks 100mbit --hosts 2 --strategies int4 sparse
    python benchmarks/slow_networks.py --read benchmarks/results/DATE-slow_networks.json

The last one measures nothing: it predicts anew, by the model of today, from the measurements that
a result keeps, and draws and counts again.

25 million parameters, 200 ms of computation in a step; the computation is timed waits, layer by
layer (``common/timed.py``), the communication is real: TLS between hosts in network namespaces of
this machine, whose links have a rate (a token bucket), a delay and a jitter (every frame waits in a
program, and each path has both). *Efficiency* is the time of a step that communicates nothing over
the time of a step. A strategy of rounds is measured over whole rounds. *Predicted* is what
``potluck plan`` says of the strategy, by measurements in the same network; *auto* marks its choice.
Hosts share the cores of this machine: with more hosts than cores a rank has less than one core for
encoding, encryption and copying, which the measurements of a plan, taken on all hosts at once, have
in them, and which makes these cells slower than as many machines would be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from common import claims, results, script, slow_plot, timed, wire
from common.claims import Claim
from common.networks import KINDS, Kind, settle, slowed
from common.placements import InHosts

from potluck.bench.crew import Crew
from potluck.bench.machine import heading, load, machine
from potluck.bench.peers import PEERS
from potluck.training.planner import Measured, Plan, decode, make_plan
from support import hosts

ALL = (*timed.OURS, *timed.GLOO)
_ENOUGH_S = 2.5
"""A cell takes further steps until it has taken this long."""
_SLOWEST_QUICK_S = 10.0
DOCS = Path(__file__).parents[1] / "docs" / "slow-networks.md"
MARK, END_MARK = "<!-- measured -->", "<!-- end of measured -->"


def measure(quick: bool, say: script.Say) -> script.Measured:
    """All cells, for ``make bench``."""
    return run(list(KINDS), [2] if quick else [2, 4], ALL, 2 if quick else 10, quick, say)


def run(
    kinds: Sequence[str],
    num_hosts: Sequence[int],
    strategies: Sequence[str],
    steps: int,
    quick: bool,
    say: script.Say,
) -> script.Measured:
    """The cells of these networks, hosts and strategies, with at most ``steps`` steps or rounds."""
    facts = machine()
    rows: list[dict[str, Any]] = []
    plans: list[dict[str, Any]] = []
    if reason := hosts.missing():
        say(f"skipped: {reason}")
        return {"machine": facts, "rows": rows}, []
    began = time.monotonic()
    head = f"{'network':<34}{'hosts':>5}  {'strategy':<14}"
    say(f"{head}{'step':>10}{'predicted':>11}{'efficiency':>12}{'MB/step':>10}")
    for count in num_hosts:
        with hosts.Network(count) as network:
            for peer in ("potluck-tls", "gloo"):
                named = [each for each in strategies if (each in timed.GLOO) == (peer == "gloo")]
                if named:
                    for row in of_peer(peer, network, named, kinds, steps, quick, plans):
                        rows.append(row)
                        say(line(row))
        if count > facts["cores"]:
            say(f"({count} hosts share {facts['cores']} cores)")
    facts["load_after"] = load()
    rows.sort(key=lambda row: (row["hosts"], list(KINDS).index(row["network"])))
    say(f"\n{time.monotonic() - began:.0f} s, load after: {facts['load_after']}")
    result = {
        "machine": facts,
        "num_parameters": timed.NUM_PARAMETERS,
        "asked_compute_s": timed.COMPUTE_S,
        "plans": plans,
        "rows": rows,
    }
    return result, what_follows(rows)


def of_peer(
    peer: str,
    network: hosts.Network,
    strategies: Sequence[str],
    kinds: Sequence[str],
    steps: int,
    quick: bool,
    kept: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The rows of one library: its processes live through all networks, and each strategy is made
    and warmed up while the links are fast. What plans were made from is added to ``kept``."""
    program = (sys.executable, __file__)
    with tempfile.TemporaryDirectory(prefix="potluck-slow-") as folder:
        place = InHosts(network)
        with Crew(
            PEERS[peer], len(network), Path(folder), placement=place, program=program
        ) as crew:
            crew.join()
            compute_s = max(answer["seconds"] for answer in crew.ask("alone"))
            plans = {}
            for key in kinds if peer != "gloo" else ():
                with slowed(network, KINDS[key]):
                    settle(crew, KINDS[key])
                    [text, *_] = [
                        each["measured"] for each in crew.ask("plan", compute_s=compute_s)
                    ]
                plans[key] = make_plan(decode(text))
                kept.append({"network": key, "hosts": len(network), "measured": json.loads(text)})
            for name in strategies:
                crew.ask("make", strategy=name)
                for key in kinds:
                    if quick and too_slow(name, KINDS[key]):
                        continue
                    with slowed(network, KINDS[key]):
                        settle(crew, KINDS[key])
                        row = cell(crew, network, name, steps)
                    if key in plans:
                        row |= predicted(plans[key], name)
                    yield {
                        "network": key,
                        "hosts": len(network),
                        "strategy": name,
                        **row,
                        "compute_s": compute_s,
                        "efficiency": compute_s / row["step_s"],
                    }


def predicted(plan: Plan, name: str) -> dict[str, Any]:
    """What a plan made in the same network has said of a strategy, before it was measured."""
    [found] = [each for each in plan.predictions if each.candidate.name == name]
    return {"predicted_s": found.step_s, "is_choice": plan.choice.name == name}


def predict_anew(result: dict[str, Any]) -> None:
    """Replace the predictions and choices in a kept result by those of the model of today.

    ValueError for a result that has not kept what its plans were made from.
    """
    if not result.get("plans"):
        raise ValueError("this result has not kept the measurements that its plans were made from")
    plans = {
        (each["network"], each["hosts"]): make_plan(msgspec.convert(each["measured"], Measured))
        for each in result["plans"]
    }
    for row in result["rows"]:
        plan = plans.get((row["network"], row["hosts"]))
        if plan is not None and row["strategy"] in timed.OURS:
            row |= predicted(plan, row["strategy"])
    result["claims"] = claims.as_dicts(what_follows(result["rows"]))


def cell(crew: Crew, network: hosts.Network, name: str, steps: int) -> dict[str, Any]:
    """The seconds of a step, the median of several (of several rounds divided by their steps), and
    the processor time of a step, the mean over the ranks and steps."""
    per_round = timed.round_steps(name)
    samples: list[float] = []
    sent, busy_s = 0, 0.0
    while not samples or (len(samples) < steps and sum(samples) * per_round < _ENOUGH_S):
        before = wire.sent_bytes(network[0])
        answers = crew.ask("time", steps=per_round)
        sent += wire.sent_bytes(network[0]) - before
        samples.append(max(sum(each["seconds"]) for each in answers) / per_round)
        busy_s += statistics.mean(each["busy_s"] for each in answers)
    num_steps = len(samples) * per_round
    return {
        "step_s": statistics.median(samples),
        "samples_s": samples,
        "steps_each": per_round,
        "busy_s": busy_s / num_steps,
        "wire_bytes_per_step": sent / num_steps,
    }


def too_slow(name: str, kind: Kind) -> bool:
    """Whether a step certainly takes too long for a quick look."""
    parts = {"plain": 1, "gloo": 1, "local-sgd": 1, "bf16": 0.5, "gloo-fp16": 0.5, "int8": 0.25}
    part = parts.get(name, 0)
    return timed.NUM_PARAMETERS * 32 * part / kind.bits_per_s > _SLOWEST_QUICK_S


def line(row: dict[str, Any]) -> str:
    kind = KINDS[row["network"]]
    said = f"{row['predicted_s'] * 1e3:.0f} ms" if "predicted_s" in row else "-"
    return (
        f"{kind.name:<34}{row['hosts']:>5}  {row['strategy']:<14}{row['step_s'] * 1e3:>7.0f} ms"
        f"{said:>11}{row['efficiency']:>12.1%}{row['wire_bytes_per_step'] / 1e6:>10.2f}"
        f"{'  auto' if row.get('is_choice') else ''}"
    )


def what_follows(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The asked efficiency of each network, by the strategy that the plan has chosen there."""
    found = []
    for key, kind in KINDS.items():
        best = []
        for count in sorted({row["hosts"] for row in rows}):
            mine = {
                row["strategy"]: row["efficiency"] * 100
                for row in rows
                if (row["network"], row["hosts"]) == (key, count) and row.get("is_choice")
            }
            best += [(f"{count} hosts by {name}", value) for name, value in mine.items()]
        if best:
            what = f"25 M parameters, 200 ms of computation, {kind.name}: efficiency"
            reach = kind.reach * 100
            found.append(claims.at_least(what, f">= {reach:g}%", reach, best, "%"))
    return found + of_predictions(rows)


def of_predictions(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """How many cells were predicted within 15%, and how often the choice was within 5% of the
    fastest."""
    ours = [row for row in rows if "predicted_s" in row]
    if not ours:
        return []
    near = [abs(row["predicted_s"] / row["step_s"] - 1) <= 0.15 for row in ours]
    what = "200 ms of computation, all cells: steps predicted within 15%"
    shown = [(f"{sum(near)} of {len(near)} cells", sum(near) / len(near) * 100)]
    found = [claims.at_least(what, ">= 90%", 90.0, shown, "%")]
    best: dict[tuple[str, int], float] = {}
    for row in ours:
        key = row["network"], row["hosts"]
        best[key] = min(best.get(key, row["step_s"]), row["step_s"])
    chosen = [row for row in ours if row["is_choice"]]
    good = [row["step_s"] <= 1.05 * best[row["network"], row["hosts"]] for row in chosen]
    if good:
        what = "200 ms of computation, all networks: choices within 5% of the fastest measured"
        shown = [(f"{sum(good)} of {len(good)} networks", sum(good) / len(good) * 100)]
        found.append(claims.at_least(what, ">= 90%", 90.0, shown, "%"))
    return found


def into_docs(result: dict[str, Any]) -> None:
    """Replace what stands between the marks of docs/slow-networks.md by the efficiencies."""
    rows = result["rows"]
    columns = [
        (key, count)
        for key in KINDS
        for count in sorted({row["hosts"] for row in rows})
        if any((row["network"], row["hosts"]) == (key, count) for row in rows)
    ]
    heads = [f"{KINDS[key].name}, {count} hosts" for key, count in columns]
    lines = [f"| strategy | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(row["strategy"] for row in rows):
        code = f"`{timed.OURS[name].code}`" if name in timed.OURS else timed.GLOO[name]
        cells = []
        for key, count in columns:
            at = (key, count, name)
            found = [r for r in rows if (r["network"], r["hosts"], r["strategy"]) == at]
            shown = f"{found[0]['efficiency']:.0%}" if found else "-"
            cells.append(f"**{shown}**" if found and found[0].get("is_choice") else shown)
        lines.append(f"| {code} | {' | '.join(cells)} |")
    where = "\n".join(f"    {line}" for line in heading(result["machine"]).splitlines())
    said = "\n".join(
        f"- {claim['what'].split(': ')[-1]}: {claim['measured']}"
        for claim in result["claims"]
        if "all" in claim["what"]
    )
    page = DOCS.read_text()
    start, end = page.index(MARK) + len(MARK), page.index(END_MARK)
    table = "\n".join(lines)
    DOCS.write_text(f"{page[:start]}\n{where}\n\n{table}\n\n{said}\n{page[end:]}")
    print(f"written into {DOCS.name}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--strategies", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--steps", type=int, default=10, help="at most, for each cell (or rounds)")
    parser.add_argument("--quick", action="store_true", help="without cells of 10 s a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them")
    parser.add_argument("--save", action="store_true", help="write both to benchmarks/results/")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="predict a kept result anew, and draw it"
    )
    parser.add_argument("--docs", action="store_true", help="write into docs/slow-networks.md")
    arguments = parser.parse_args()
    if arguments.read:
        kept = json.loads(arguments.read.read_text())
        try:
            predict_anew(kept)
        except ValueError as error:
            print(f"as it was predicted then: {error}")
        print("\n".join(line(row) for row in kept["rows"]))
        print("\n" + claims.markdown([Claim(**each) for each in kept["claims"]]))
        slow_plot.draw(kept, KINDS, arguments.plot or arguments.read.with_suffix(".png"))
        if arguments.docs:
            into_docs(kept)
        return 0
    page = script.Page()
    page.say(heading(machine()))
    result, found = run(
        arguments.networks,
        arguments.hosts,
        arguments.strategies,
        arguments.steps,
        arguments.quick,
        page.say,
    )
    result["benchmark"] = "slow_networks"
    result["claims"] = claims.as_dicts(found)
    page.say("\n" + claims.markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        slow_plot.draw(result, KINDS, arguments.plot)
    if arguments.save:
        path = results.save(result, page.lines)
        slow_plot.draw(result, KINDS, path.with_suffix(".png"))
        print(f"saved: {path}")
    if arguments.docs:
        into_docs(result)
    return 0 if all(claim.met is not False for claim in found) else 1


if __name__ == "__main__":
    sys.exit(timed.worker(sys.argv[1]) if "BENCH_TOKEN" in os.environ else main())
