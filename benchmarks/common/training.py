"""Training steps of a model over one backend against another, in turns.

Each peer's ranks are processes of their own (``potluck.cli.bench.crew``), told what to do over a
channel (see ``worker``): ``time`` answers the seconds of some steps, ``alone`` those of steps that
communicate nothing, ``digest`` a hash of the parameters as they are now.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import results
from common.script import Page, Say
from potluck.cli.bench.crew import Channel, Crew
from potluck.cli.bench.machine import heading, load, machine
from potluck.cli.bench.peers import PEERS as ALL_PEERS

NO_PEERS = ("hollow", "alone", "single")
PEERS = ("potluck", "gloo", "potluck-tls", "potluck-python")

Step = Callable[[], Any]


class Trained(NamedTuple):
    """What a benchmark makes of its model on one rank.

    ``step`` trains a step, ``alone`` one of the same model by itself, and ``hollow``, if there is
    one, a step with all that PyTorch does around communication, but nothing communicated.
    ``parameters`` gives those that ``step`` trains.
    """

    step: Step
    alone: Step
    parameters: Callable[[], bytes]
    hollow: Step | None = None


Make = Callable[[int, int], Trained]
"""``make(rank, world_size)``."""

_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""For glibc in all workers, whatever the backend. Gradients are freed after each step; whether they
then go back to the system depends on what lies beside them, and costs 8,000 page faults (12 ms) in
each step of whoever has bad luck."""


def main(script: str, name: str, description: str, worlds: Sequence[int], reach: float) -> int:
    """A script of its own: 1 if the peers end at different parameters."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--world", type=int, nargs="+", default=list(worlds), help="processes")
    parser.add_argument("--rounds", type=int, default=11, help="rounds per peer")
    parser.add_argument("--steps", type=int, default=8, help="steps per round")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS[:2]))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/")
    arguments = parser.parse_args()
    page = Page()
    page.say(heading(machine()))
    numbers = arguments.world, arguments.rounds, arguments.steps
    result = measure(script, arguments.peers, *numbers, reach, page.say)
    result["benchmark"] = name
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.save:
        print(f"saved: {results.save(result, page.lines)}")
    return 0 if all(row["same_parameters"] for row in result["rows"]) else 1


def measure(
    script: str,
    peers: Sequence[str],
    worlds: Sequence[int],
    rounds: int,
    steps: int,
    reach: float,
    say: Say,
) -> dict[str, Any]:
    """The figures, ready for JSON; the table is said row by row."""
    facts = machine()
    rows: list[dict[str, Any]] = []
    for world_size in worlds:
        with crews(peers, world_size, Path(script)) as started:
            row = compare(started, rounds, steps)
        if not rows:
            say("\n" + head(row))
        rows.append(row)
        say(line(row))
    facts["load_after"] = load()
    say(
        "\nMedian milliseconds per training step of the slowest rank. X/gloo: X's time over "
        f"Gloo's;\nbelow 1, X is faster; the reach is {reach}. hollow: with all that torch does "
        "around communication,\nbut nothing communicated: no backend can be faster. alone: the "
        "same step without that.\nsingle: on one process while the others sleep. efficiency: "
        "single over potluck's; its bound is\nsingle over hollow (or alone where there is none)."
        f"\nload after: {facts['load_after']}"
    )
    return {"reach": reach, "machine": facts, "rows": rows}


@contextlib.contextmanager
def crews(peers: Sequence[str], world_size: int, script: Path) -> Iterator[list[Crew]]:
    """A crew per peer, each process running ``script PEER``."""
    for name, value in _MALLOC.items():
        os.environ.setdefault(name, value)
    with (
        tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder,
        contextlib.ExitStack() as s,
    ):
        program = (sys.executable, str(script))
        started = [
            s.enter_context(Crew(ALL_PEERS[peer], world_size, Path(folder), program=program))
            for peer in peers
        ]
        for crew in started:
            crew.join()
        yield started


def compare(started: Sequence[Crew], rounds: int, steps: int) -> dict[str, Any]:
    """Time the crews in turns; they start equal, and take the same steps."""
    row: dict[str, Any] = {"world_size": started[0].world_size}
    has_hollow = all("seconds" in each for each in started[0].ask("hollow", steps=3))
    others = ["hollow"] if has_hollow else []
    names = [*(crew.peer.name for crew in started), *others, "alone", "single"]
    samples: dict[str, list[float]] = {name: [] for name in names}
    for crew in started:
        crew.ask("alone", steps=3)
        crew.ask("time", steps=3)  # the buckets are built, links made, memory touched
    for number in range(rounds):
        # Who goes first changes too: whoever comes second finds a warmer machine.
        first = number % len(started)
        for crew in [*started[first:], *started[:first]]:
            samples[crew.peer.name].append(slowest(crew.ask("time", steps=steps)) / steps)
        for name in (*others, "alone"):
            samples[name].append(slowest(started[0].ask(name, steps=steps)) / steps)
        samples["single"].append(slowest(started[0].ask("single", steps=steps)) / steps)
    ends = [answer for crew in started for answer in crew.ask("digest")]
    digests = {end["digest"] for end in ends}
    norms = [end["norm"] for end in ends]
    row["same_parameters"] = max(norms) - min(norms) <= 1e-5 * max(norms)
    row["same_bits"] = len(digests) == 1
    for name, found in samples.items():
        row[name] = {"samples_s": found, "median_s": statistics.median(found)}
    if "potluck" in row:
        row["efficiency"] = row["single"]["median_s"] / row["potluck"]["median_s"]
        least = row.get("hollow", row["alone"])
        row["efficiency_bound"] = row["single"]["median_s"] / least["median_s"]
    return row


def slowest(answers: Sequence[dict[str, Any]]) -> float:
    return max(float(answer["seconds"]) for answer in answers)


def head(row: dict[str, Any]) -> str:
    columns = [name for name, cell in row.items() if isinstance(cell, dict)]
    peers = [name for name in columns if name not in NO_PEERS]
    ratios = "".join(f"{peer + '/gloo':>18}" for peer in peers if peer != "gloo")
    titles = "".join(f"{peer + ' ms':>16}" for peer in columns)
    return f"{'processes':>9}{titles}{ratios}{'efficiency':>12}{'bound':>7}"


def line(row: dict[str, Any]) -> str:
    peers = [name for name, cell in row.items() if isinstance(cell, dict)]
    text = f"{row['world_size']:>9}"
    text += "".join(f"{row[peer]['median_s'] * 1e3:>16.1f}" for peer in peers)
    if "gloo" in peers:
        gloo = row["gloo"]["median_s"]
        others = [peer for peer in peers if peer not in ("gloo", *NO_PEERS)]
        text += "".join(f"{row[peer]['median_s'] / gloo:>18.2f}" for peer in others)
    if "efficiency" in row:
        text += f"{row['efficiency']:>12.0%}{row['efficiency_bound']:>7.0%}"
    return text + ("" if row["same_parameters"] else "  WRONG: the parameters differ")


def worker(peer: str, make: Make) -> int:
    """One rank: take part in ``peer``'s group until told to end."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if peer == "gloo" else "potluck")
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trained = make(rank, world_size)
    channel = Channel.to_crew(rank, world_size)
    while True:
        match channel.receive():
            case {"do": "hollow"} if trained.hollow is None:
                channel.send()
            case {"do": "single"} if rank:
                channel.send(seconds=0.0)
            case {"do": ("time" | "hollow" | "alone" | "single") as what, "steps": int(count)}:
                if what != "single":
                    dist.barrier()
                step = {"time": trained.step, "hollow": trained.hollow}.get(what) or trained.alone
                start = time.perf_counter()
                for _ in range(count):
                    step()
                channel.send(seconds=time.perf_counter() - start)
            case {"do": "digest"}:
                data = trained.parameters()
                values = torch.frombuffer(bytearray(data), dtype=torch.float32).double()
                norm = values.norm().item()
                channel.send(digest=hashlib.sha256(data).hexdigest(), norm=norm)
            case {"do": "end"}:
                break
    dist.destroy_process_group()
    return 0
