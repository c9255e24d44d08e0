"""Training steps of a model over one backend against another, in turns.

Each peer's ranks are processes of their own, told over stdin what to do (see ``worker``):
``time N`` answers the seconds of N steps, ``alone N`` those of N steps that communicate nothing
(all ranks take them at the same time: what is left of a step if communication were free),
``digest`` a hash of the parameters as they are now.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import ranks, report

PEERS = ("potluck", "gloo", "potluck-tls")

Step = Callable[[], Any]
Make = Callable[[int, int], tuple[Step, Step, Callable[[], bytes]]]
"""``make(rank, world_size)``: one function trains a step, one trains a step of the same model
without any communication, one gives all parameters of the first."""


def main(script: str, name: str, description: str, worlds: Sequence[int], reach: float) -> int:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--world", type=int, nargs="+", default=list(worlds), help="processes")
    parser.add_argument("--rounds", type=int, default=11, help="rounds per peer")
    parser.add_argument("--steps", type=int, default=8, help="steps per round")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS[:2]))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/")
    arguments = parser.parse_args()
    machine = report.machine()
    text = [report.heading(machine), "", head(arguments.peers)]
    print("\n".join(text), flush=True)
    rows = []
    for world_size in arguments.world:
        with ranks.Group.all_of(arguments.peers, world_size, Path(script)) as groups:
            row = compare(groups, arguments.rounds, arguments.steps)
        rows.append(row)
        text.append(line(row))
        print(text[-1], flush=True)
    text.append(
        "\nMedian milliseconds per training step of the slowest rank. X/gloo: X's time over "
        f"Gloo's;\nbelow 1, X is faster; the reach is {reach}. alone: the same step without "
        "communication,\non as many processes at once: no backend can be faster."
    )
    print(text[-1])
    result = {"benchmark": name, "reach": reach, "machine": machine, "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.save:
        folder = Path(script).parent / "results"
        print(f"saved: {save(result, text, folder)}")
    return 0 if all(row["same_parameters"] for row in rows) else 1


def compare(groups: Sequence[ranks.Group], rounds: int, steps: int) -> dict[str, Any]:
    """Time the groups in turns; they start equal, and take the same steps."""
    row: dict[str, Any] = {"world_size": groups[0].world_size}
    samples: dict[str, list[float]] = {role: [] for role in [*(g.role for g in groups), "alone"]}
    for group in groups:
        group.ask("alone 3")
        group.ask("time 3")  # the buckets are built, links made, memory touched
    for number in range(rounds):
        # Who goes first alternates too: whoever comes second finds a warmer machine.
        for group in groups if number % 2 == 0 else groups[::-1]:
            slowest = max(answer["seconds"] for answer in group.ask(f"time {steps}"))
            samples[group.role].append(slowest / steps)
        slowest = max(answer["seconds"] for answer in groups[0].ask(f"alone {steps}"))
        samples["alone"].append(slowest / steps)
    ends = [answer for group in groups for answer in group.ask("digest")]
    digests = {end["digest"] for end in ends}
    norms = [end["norm"] for end in ends]
    row["same_parameters"] = max(norms) - min(norms) <= 1e-5 * max(norms)
    row["same_bits"] = len(digests) == 1
    for role, found in samples.items():
        row[role] = {"samples_s": found, "median_s": statistics.median(found)}
    return row


def head(peers: Sequence[str]) -> str:
    ratios = "".join(f"{peer + '/gloo':>18}" for peer in peers if peer != "gloo")
    columns = [*peers, "alone"]
    return f"{'processes':>9}" + "".join(f"{peer + ' ms':>16}" for peer in columns) + ratios


def line(row: dict[str, Any]) -> str:
    peers = [name for name, cell in row.items() if isinstance(cell, dict)]
    text = f"{row['world_size']:>9}"
    text += "".join(f"{row[peer]['median_s'] * 1e3:>16.1f}" for peer in peers)
    if "gloo" in peers:
        gloo = row["gloo"]["median_s"]
        others = [peer for peer in peers if peer not in ("gloo", "alone")]
        text += "".join(f"{row[peer]['median_s'] / gloo:>18.2f}" for peer in others)
    return text + ("" if row["same_parameters"] else "  WRONG: the parameters differ")


def save(result: dict[str, Any], text: Sequence[str], folder: Path) -> Path:
    """Write ``DATE-NAME.json`` and ``.txt``; never overwrite."""
    folder.mkdir(exist_ok=True)
    stem = f"{result['machine']['date']}-{result['benchmark']}"
    number = 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.json").exists():
        number += 1
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".txt").write_text("\n".join(text) + "\n")
    return path


def worker(role: str, make: Make) -> int:
    """One rank: take part in ``role``'s group until told to end."""
    answers = os.fdopen(os.dup(1), "w")  # nothing that a library prints can get in between
    os.dup2(2, 1)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if role == "gloo" else "potluck")
    torch.manual_seed(0)
    step, alone, parameters = make(dist.get_rank(), dist.get_world_size())

    def answer(**facts: object) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    answer(rank=dist.get_rank(), world_size=dist.get_world_size())
    for command in sys.stdin:
        match command.split():
            case [("time" | "alone") as what, count]:
                dist.barrier()
                start = time.perf_counter()
                for _ in range(int(count)):
                    (step if what == "time" else alone)()
                answer(seconds=time.perf_counter() - start)
            case ["digest"]:
                data = parameters()
                values = torch.frombuffer(bytearray(data), dtype=torch.float32).double()
                norm = values.norm().item()
                answer(digest=hashlib.sha256(data).hexdigest(), norm=norm)
            case ["end"]:
                break
    dist.destroy_process_group()
    return 0
