"""Half an hour of training at 100 Mbit/s on machines that join and die, by DiLoCo with top-k.

    python benchmarks/soak.py --save               # 30 minutes; needs root
    python benchmarks/soak.py --minutes 3 --every 10

Four hosts in network namespaces, each with its agent and one worker; every 20 s one of the last
three is killed (SIGKILL of its agent and its worker) or starts again, by chance with a fixed seed;
the first stays. Asked: the loss keeps falling, the exchanges are exact (``common/soak_training.py``
compares each), and nothing leaks: what the first host's agent and worker hold in memory, threads
and open files does not grow, and at the end only agents are left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import claims, results, script
from common.claims import Claim

from potluck.cli.bench.machine import heading, load, machine
from support import hosts
from support.commands import Command
from support.machines import Machine, form, machines

COMMON = Path(__file__).parent / "common"
RATE = "100mbit"
NUM_HOSTS = 4
_LINE = re.compile(r"\[ *\d+ (\w+)\] soak (\{.*\})")
_EXACT = 1e-6
"""Of the largest element: what float32 sums of decoded values may differ from float64."""
_START_S = 120.0


def run(minutes: float, every_s: float, seed: int, say: script.Say) -> script.Measured:
    """The soak. AssertionError if the training ends, or has not begun after two minutes."""
    facts = machine()
    with (
        tempfile.TemporaryDirectory(prefix="potluck-soak-") as folder,
        hosts.Network(NUM_HOSTS, rate=RATE) as network,
        machines(network, Path(folder) / "homes") as made,
    ):
        job = Path(folder) / "job"
        (job / "common").mkdir(parents=True)
        shutil.copy(COMMON / "soak_training.py", job / "train.py")
        for name in ("__init__.py", "loss_tasks.py"):
            shutil.copy(COMMON / name, job / "common" / name)
        form(*made)
        stop = Path(folder) / "stop"
        with made[0].run(job / "train.py", stop) as training:
            training.wait_for(f" {made[0].name}] soak {{", _START_S)
            result = disturbed(training, made, minutes * 60, every_s, random.Random(seed), say)
            stop.touch()
            code = training.finish(_START_S)
            result["exit_code"], result["text"] = code, training.text[-3000:] if code else ""
        result["left_over"] = sum(len(each.left_over()) for each in made if each.is_up)
    facts["load_after"] = load()
    result |= {"machine": facts, "minutes": minutes, "every_s": every_s, "seed": seed}
    found = what_follows(result)
    return result, found


def disturbed(
    training: Command,
    made: Sequence[Machine],
    seconds: float,
    every_s: float,
    chance: random.Random,
    say: script.Say,
) -> dict[str, Any]:
    """Let machines join and die for so long; what the first host's worker and agent say."""
    began = time.monotonic()
    kills = joins = 0
    looks: list[dict[str, Any]] = []
    while (now := time.monotonic() - began) < seconds:
        guest = chance.choice(made[1:])
        if guest.is_up:
            guest.kill()
            kills += 1
        else:
            guest.start()
            joins += 1
        since = training.mark
        training.lacks(lambda line: "Traceback" in line, every_s, since=since)
        shown = reports(training.text, made[0].name)
        up = sum(each.is_up for each in made)
        looks.append({"second": round(now), "up": up, "agent_rss": made[0].resident_bytes()})
        looks[-1] |= shown[-1]
        looks[-1]["agent_files"] = len(os.listdir(f"/proc/{made[0].pid}/fd"))
        last = shown[-1]
        say(
            f"{now:>6.0f} s  {up} machines, {kills} killed, {joins} joined, step {last['step']}, "
            f"loss {last['loss']:.3f}, {last['checked']} exchanges within {last['worst']:.1g}, "
            f"{last['rss'] >> 20} MiB"
        )
    return {"kills": kills, "joins": joins, "looks": looks}


def reports(text: str, name: str) -> list[dict[str, Any]]:
    """What the worker on the machine ``name`` has said."""
    return [json.loads(found[2]) for found in _LINE.finditer(text) if found[1] == name]


def what_follows(result: dict[str, Any]) -> list[Claim]:
    looks = result["looks"]
    changes = result["kills"] + result["joins"]
    of = f"{result['minutes']:g} minutes at 100 Mbit/s, {changes} joins and deaths"
    fifth = max(1, len(looks) // 5)
    means = [
        statistics.mean(each["loss"] for each in looks[start : start + fifth])
        for start in range(0, fifth * 5, fifth)
        if looks[start : start + fifth]
    ]
    falls = all(after < before for before, after in itertools.pairwise(means))
    losses = " > ".join(f"{mean:.3f}" for mean in means)
    last = looks[-1]
    half = looks[len(looks) // 2]
    grown = {
        name: last[name] - half[name]
        for name in ("rss", "agent_rss", "files", "agent_files", "threads")
    }
    leaks = (
        grown["rss"] > 32 << 20
        or grown["agent_rss"] > 16 << 20
        or max(grown["files"], grown["agent_files"], grown["threads"]) > 16
        or result["left_over"] > 0
    )
    said = (
        f"worker {grown['rss'] / 2**20:+.1f} MiB, agent {grown['agent_rss'] / 2**20:+.1f} MiB, "
        f"files {grown['files']:+d} and {grown['agent_files']:+d}, threads {grown['threads']:+d}, "
        f"{result['left_over']} processes left"
    )
    return [
        Claim(f"{of}: mean loss by fifth", "falls", losses, falls),
        Claim(
            f"{of}: exchanges that differ from what went in less residuals",
            f"<= {_EXACT:g} of the largest element",
            f"{last['worst']:.2g} at most, of {last['checked']}",
            last["worst"] <= _EXACT,
        ),
        Claim(f"{of}: held by the first host in the second half", "does not grow", said, not leaks),
        Claim(f"{of}: exit code", "0", str(result["exit_code"]), result["exit_code"] == 0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="seconds (20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--save", action="store_true", help="write them to benchmarks/results/")
    arguments = parser.parse_args()
    page = script.Page()
    page.say(heading(machine()))
    if reason := hosts.missing():
        page.say(f"skipped: {reason}")
        return 0
    result, found = run(arguments.minutes, arguments.every, arguments.seed, page.say)
    result["benchmark"] = "soak"
    result["claims"] = claims.as_dicts(found)
    page.say("\n" + claims.markdown(found))
    if result["text"]:
        page.say(result["text"])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.save:
        print(f"saved: {results.save(result, page.lines)}")
    return 0 if all(claim.met is not False for claim in found) else 1


if __name__ == "__main__":
    sys.exit(main())
