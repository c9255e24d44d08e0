"""Training over slow networks: how much of a step is computation, by strategy, beside Gloo.

    python benchmarks/slow_networks.py --into grid.json --minutes 10   # a piece; again for the next
    python benchmarks/slow_networks.py --into grid.json --sizes 1m --hosts 2 --strategies int4
    python benchmarks/slow_networks.py --into grid.json --workers-per-host 2 --sizes 25m --hosts 2
    python benchmarks/slow_networks.py --read grid.json --save --docs  # count, draw, write the page

The grid: models of 1 M, 25 M and 110 M parameters on 2 and 4 hosts, in networks from 10 Gbit/s to
20 Mbit/s, by each strategy of the planner and by torch's DDP over Gloo. ``--into`` keeps each cell
as soon as it is measured, and measures none that is there, so the grid can be measured in pieces.
``--read`` measures nothing: it predicts anew, by the model of today, from the measurements that a
result keeps, and draws and counts again.

The computation of a step is timed waits, layer by layer (``common/timed.py``): 200 ms for 25 M
parameters, in proportion for the others. The communication is real: TLS between hosts in network
namespaces of this machine, whose links have a rate (a token bucket), a delay and a jitter (every
frame waits in a program, and each path has both). *Efficiency* is the time of a step that
communicates nothing over the time of a step. A strategy of rounds is measured over whole rounds.
*Predicted* is what ``potluck plan`` says of the strategy, by measurements and rehearsals in the
same network; *auto* marks its choice. ``NAME@SIZE`` is a strategy in buckets of SIZE MiB, or in
rounds of SIZE steps, measured where a plan prefers them. Cells whose bytes alone take longer than
``--longest`` seconds a step are left out, and said so.
With ``--workers-per-host`` each host has several workers, which share its memory and its link;
only there is ``hierarchical`` another strategy than ``plain``. Such cells stand in tables of their
own. Each worker computes for as long as the only one of a host does.
Hosts share the cores of this machine: with more hosts than cores a rank has less than one core for
encoding, encryption and copying, which makes these cells slower than as many machines would be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import claims, results, script, slow_plot, slow_results, timed, wire
from common.claims import Claim
from common.networks import KINDS, Kind, settle, slowed
from common.placements import InHosts
from common.slow_results import Place, Row, at, per_host, place, plan_of, predicted

from potluck.cli.bench.crew import ANSWER_S, Crew
from potluck.cli.bench.machine import heading, load, machine
from potluck.cli.bench.peers import PEERS
from potluck.training.planner import Plan
from potluck.training.planner.candidates import candidates_for
from potluck.training.planner.measured import Measured
from potluck.training.planner.model import bytes_of
from support import hosts

ALL = (*timed.OURS, *timed.GLOO)
_ENOUGH_S = 2.5
"""A cell takes further steps until it has taken this long."""
_TOGETHER_S, _MOST_TOGETHER = 0.3, 30
"""Steps that are shorter are timed several at a time: the first one after a pause is longer."""
LONGEST_S, _LONGEST_QUICK_S = 60.0, 10.0
PLAN_S = 3600.0
"""For a plan: many exchanges, of up to 110 M parameters at 20 Mbit/s."""
_PATIENCE = 3
"""A step may take so many times as long as its bytes alone."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which cells are to be measured."""

    sizes: Sequence[str] = tuple(timed.SIZES)
    networks: Sequence[str] = tuple(KINDS)
    hosts: Sequence[int] = (2, 4)
    workers_per_host: int = 1
    strategies: Sequence[str] = ALL
    steps: int = 10
    """At most, of a cell (or rounds)."""
    longest_s: float = LONGEST_S
    minutes: float = float("inf")
    """After so long no cell is begun."""


class Kept:
    """A result, on disk after each cell."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.result: dict[str, Any] = {
            "benchmark": "slow_networks",
            "machine": machine(),
            "sizes": {
                key: {"num_parameters": size.num_parameters, "asked_compute_s": size.compute_s}
                for key, size in timed.SIZES.items()
            },
            "pieces": [],
            "plans": [],
            "skipped": [],
            "rows": [],
        }
        if file is not None and file.exists():
            self.result = json.loads(file.read_text())

    def has(self, where: Place, strategy: str) -> bool:
        """Whether this cell was measured before."""
        rows = self.result["rows"]
        return any(place(row) == where and row["strategy"] == strategy for row in rows)

    def plan(self, where: Place) -> dict[str, Any] | None:
        """What the plan for this network was made from."""
        return next((each for each in self.result["plans"] if place(each) == where), None)

    def add(self, kind: str, item: dict[str, Any]) -> None:
        self.result[kind].append(item)
        order = list(timed.SIZES), list(KINDS)
        self.result["rows"].sort(
            key=lambda r: (
                *(order[0].index(r["size"]), per_host(r), r["hosts"]),
                order[1].index(r["network"]),
            )
        )
        self.write()

    def write(self) -> None:
        if self.file is not None:
            made = self.file.with_suffix(".new")
            made.write_text(json.dumps(self.result, indent=1) + "\n")
            made.replace(self.file)


def measure(quick: bool, say: script.Say) -> script.Measured:
    """The cells of 25 M parameters, for ``make bench``."""
    part = Part(
        sizes=["25m"],
        hosts=[2] if quick else [2, 4],
        steps=2 if quick else 10,
        longest_s=_LONGEST_QUICK_S if quick else LONGEST_S,
    )
    kept = Kept(None)
    return kept.result, run(part, kept, say)


def run(part: Part, kept: Kept, say: script.Say) -> list[Claim]:
    """Measure those cells of ``part`` that ``kept`` has not, and add them."""
    if reason := hosts.missing():
        say(f"skipped: {reason}")
        return []
    began, load_before = time.monotonic(), load()

    def is_over() -> bool:
        return time.monotonic() - began > part.minutes * 60

    say(
        f"{'parameters':<11}{'network':<34}{'hosts':>5}  {'strategy':<14}"
        f"{'step':>10}{'predicted':>11}{'off':>6}{'efficiency':>12}{'MB/step':>10}"
    )
    for count in part.hosts:
        with hosts.Network(count) as network:
            # Workers of one host share memory, as they do in a cluster; hosts never do.
            ours_ = "potluck-tls" if part.workers_per_host == 1 else "potluck"
            for peer in (ours_, "gloo"):
                ours = [
                    name for name in part.strategies if (name in timed.GLOO) == (peer == "gloo")
                ]
                if ours and not is_over():
                    of_peer(peer, network, ours, part, kept, say, is_over)
    if is_over():
        say(f"stopped after {part.minutes:g} minutes: the same command goes on")
    took_s, load_after = time.monotonic() - began, load()
    kept.add("pieces", {"load_before": load_before, "seconds": took_s, "load_after": load_after})
    say(f"\n{took_s:.0f} s, load after: {load_after}")
    return slow_results.what_follows(kept.result["rows"])


def of_peer(
    peer: str,
    network: hosts.Network,
    strategies: Sequence[str],
    part: Part,
    kept: Kept,
    say: script.Say,
    is_over: Callable[[], bool],
) -> None:
    """The cells of one library: its processes live through all networks and models, and each
    strategy is made and warmed up while the links are fast."""
    program = (sys.executable, __file__)
    count, workers = len(network), part.workers_per_host
    known = {each.name for each in candidates_for(_crowd(count, workers))} | set(timed.GLOO)
    strategies = [name for name in strategies if name in known]
    with tempfile.TemporaryDirectory(prefix="potluck-slow-") as folder:
        place_ = InHosts(network, workers, Path(folder) if workers > 1 else None)
        with Crew(
            PEERS[peer], count * workers, Path(folder), placement=place_, program=program
        ) as crew:
            crew.join()
            for size in part.sizes:
                cells = {
                    key: list(_to_measure(strategies, (size, key, count, workers), part, kept, say))
                    for key in part.networks
                }
                if not any(cells.values()) or is_over():
                    continue
                compute_s = max(answer["seconds"] for answer in crew.ask("alone", size=size))
                plans: dict[str, Plan] = {}
                for key in part.networks if peer != "gloo" else ():
                    if cells[key] and not is_over():
                        where = size, key, count, workers
                        plans[key] = made = _plan(crew, network, where, kept)
                        best = [timed.cell_name(each.candidate) for each in made.predictions]
                        other = [name for name in best if "@" in name]
                        cells[key] += [name for name in other if not kept.has(where, name)]
                for name in dict.fromkeys(name for some in cells.values() for name in some):
                    keys = [key for key in part.networks if name in cells[key]]
                    if is_over():
                        break
                    crew.ask("make", size=size, strategy=name)
                    for key in keys:
                        if is_over():
                            break
                        where = size, key, count, workers
                        with slowed(network, KINDS[key]):
                            settle(crew, KINDS[key])
                            row = cell(crew, network, name, part.steps, _step_s(name, where))
                        row = at(where) | {
                            "strategy": name,
                            **row,
                            "compute_s": compute_s,
                            "efficiency": compute_s / row["step_s"],
                        }
                        if key in plans:
                            source = kept.plan(where)
                            assert source is not None
                            row |= predicted(source, plans[key], name)
                        kept.add("rows", row)
                        say(line(row))


def _to_measure(
    strategies: Sequence[str], where: Place, part: Part, kept: Kept, say: script.Say
) -> Iterator[str]:
    """The strategies that are to be measured there; says which are too slow."""
    size, key, count, _ = where
    for name in strategies:
        least_s = transfer_s(name, timed.SIZES[size], count, KINDS[key])
        if least_s > part.longest_s:
            reason = f"its bytes alone take {least_s:.0f} s a step"
            item = at(where) | {"strategy": name}
            if not any(place(e) == where and e["strategy"] == name for e in kept.result["skipped"]):
                kept.add("skipped", item | {"reason": reason})
            say(f"{timed.SIZES[size].name:<11}{KINDS[key].name:<34}{count:>5}  {name:<14} {reason}")
        elif not kept.has(where, name):
            yield name


def _plan(crew: Crew, network: hosts.Network, where: Place, kept: Kept) -> Plan:
    """The plan for a network: made from what was measured in an earlier piece, or now."""
    found = kept.plan(where)
    if found is None:
        size, key, *_ = where
        if KINDS[key].delay_s:
            # Cells come from a fast network, and the congestion control of links keeps something of
            # that: links that were slow from their first byte took twice as long on the Wi-Fi-like.
            for name in ("plain", "int8"):
                crew.ask("make", size="25m", strategy=name)
        with slowed(network, KINDS[key]):
            settle(crew, KINDS[key])
            began = time.monotonic()
            answers = crew.ask("plan", timeout_s=PLAN_S, size=size)
            [text, *_] = [each["measured"] for each in answers]
            took_s = time.monotonic() - began
        found = at(where) | {"took_s": took_s}
        found["measured"] = json.loads(text)
        kept.add("plans", found)
    return plan_of(found)


def _step_s(name: str, where: Place) -> float:
    """The least seconds of a step there."""
    key, network, count, _ = where
    size = timed.SIZES[key]
    return size.compute_s + transfer_s(name, size, count, KINDS[network])


def _crowd(count: int, workers: int) -> tuple[str, ...]:
    """The host of each rank."""
    return tuple(str(rank // workers) for rank in range(count * workers))


def transfer_s(name: str, size: timed.Size, count: int, kind: Kind) -> float:
    """The least seconds in which what a host sends for a step can leave it: with several workers
    on each, if they add up first."""
    if name in timed.GLOO:
        name = {"gloo": "plain", "gloo-fp16": "bf16"}.get(name, "powersgd")
    group = Measured(
        compute_s=(1.0,) * count,
        bytes_per_s=(1.0,) * count,
        crossing_bytes_per_s=(1.0,) * count,
        latency_s=0.0,
        nodes=_crowd(count, 1),
        shapes=((size.width, size.width),) * size.depth,
        encode_s={},
        decode_s={},
        copy_s=0.0,
        hash_s=0.0,
    )
    return bytes_of(group, timed.candidate_of(name)) * 8 / kind.bits_per_s


def cell(
    crew: Crew, network: hosts.Network, name: str, steps: int, least_s: float
) -> dict[str, Any]:
    """The seconds of a step, the median of several (of several rounds divided by their steps), and
    the processor time of a step, the mean over the ranks and steps. ``least_s``: of a step, by
    which the crew is waited for."""

    def timed_(num_steps: int) -> list[dict[str, Any]]:
        patience_s = ANSWER_S + _PATIENCE * num_steps * least_s
        return crew.ask("time", timeout_s=patience_s, steps=num_steps)

    per_round = timed.round_steps(name)
    if per_round == 1:
        [first_s, *_] = sorted(sum(each["seconds"]) for each in timed_(1))
        per_round = max(1, min(_MOST_TOGETHER, round(_TOGETHER_S / first_s)))
    samples: list[float] = []
    sent, busy_s = 0, 0.0
    while not samples or (len(samples) < steps and sum(samples) * per_round < _ENOUGH_S):
        before = wire.sent_bytes(network[0])
        answers = timed_(per_round)
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


def _hosts(row: Row) -> str:
    """ "2x4": two hosts with four workers each."""
    return f"{row['hosts']}" if per_host(row) == 1 else f"{row['hosts']}x{per_host(row)}"


def line(row: Row) -> str:
    kind, said, off = KINDS[row["network"]], "-", ""
    if "predicted_s" in row:
        said = f"{row['predicted_s'] * 1e3:.4g} ms"
        off = f"{row['predicted_s'] / row['step_s'] - 1:+.0%}"
    return (
        f"{timed.SIZES[row['size']].name:<11}{kind.name:<34}{_hosts(row):>5}  "
        f"{row['strategy']:<14}{row['step_s'] * 1e3:>7.4g} ms{said:>11}{off:>6}"
        f"{row['efficiency']:>12.1%}{row['wire_bytes_per_step'] / 1e6:>10.3g}"
        f"{'  auto' if row.get('is_choice') else ''}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes, networks, counts = list(timed.SIZES), list(KINDS), [2, 4]
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes)
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks)
    parser.add_argument("--hosts", nargs="+", type=int, default=counts)
    parser.add_argument(
        "--workers-per-host", type=int, default=1, metavar="N", help="on each host (default 1)"
    )
    parser.add_argument("--strategies", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--steps", type=int, default=10, help="at most, for each cell (or rounds)")
    parser.add_argument(
        "--longest", type=float, default=LONGEST_S, metavar="SECONDS", help="of a step's transfer"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no cell after so long"
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="keep each cell there; measure none that is there"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them")
    parser.add_argument("--save", action="store_true", help="write both to benchmarks/results/")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="measure nothing: predict a kept result anew"
    )
    parser.add_argument("--docs", action="store_true", help="write into docs/slow-networks.md")
    arguments = parser.parse_args()
    if arguments.workers_per_host < 1:
        parser.error(f"--workers-per-host {arguments.workers_per_host}: at least 1 is needed")
    page = script.Page()
    if arguments.read:
        kept = Kept(arguments.read)
        slow_results.predict_anew(kept.result)
        page.say(heading(kept.result["machine"]))
        page.say("\n".join(line(row) for row in kept.result["rows"]))
        found = [Claim(**each) for each in kept.result["claims"]]
    else:
        page.say(heading(machine()))
        part = Part(
            sizes=arguments.sizes,
            networks=arguments.networks,
            hosts=arguments.hosts,
            workers_per_host=arguments.workers_per_host,
            strategies=arguments.strategies,
            steps=arguments.steps,
            longest_s=arguments.longest,
            minutes=arguments.minutes,
        )
        kept = Kept(arguments.into)
        found = run(part, kept, page.say)
        kept.result["claims"] = claims.as_dicts(found)
        kept.write()
    page.say("\n" + claims.markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(kept.result, indent=1) + "\n")
    if arguments.plot:
        slow_plot.draw(kept.result, KINDS, arguments.plot)
    if arguments.save:
        path = results.save(kept.result, page.lines)
        slow_plot.draw(kept.result, KINDS, path.with_suffix(".png"))
        print(f"saved: {path}")
    if arguments.docs:
        slow_results.into_docs(kept.result)
    return 0 if all(claim.met is not False for claim in found) else 1


if __name__ == "__main__":
    sys.exit(timed.worker(sys.argv[1]) if "BENCH_TOKEN" in os.environ else main())
