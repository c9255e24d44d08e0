"""Reducing while the main thread is busy in pure Python: does its lock slow the reduction?

    python benchmarks/busy_main_thread.py          # hosts at 1 Gbit/s need Linux and root
    python benchmarks/busy_main_thread.py --save   # keep the result in benchmarks/results/

Two workers all-reduce buckets of 25 MiB, one after the other. In turns the main thread of each
waits, or counts in pure Python until the bucket is done. Between two hosts at 1 Gbit/s, where the
wire decides how long it takes; and on one host, where the two main threads also take the cores
that the engines need, whatever the lock does.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import claims, script
from common.claims import Claim
from common.placements import InHosts

import potluck
from potluck._core.system import usable_cpus
from potluck.cli.bench.crew import Channel, Crew
from potluck.cli.bench.machine import machine
from potluck.cli.bench.peers import PEERS, Competitor
from potluck.cli.bench.placement import Here
from support import hosts

BUCKET_BYTES = 25 << 20
NUM_WORKERS = 2


def measure(quick: bool, say: script.Say) -> script.Measured:
    result: dict[str, Any] = {"machine": machine(), "places": {}}
    found = []
    for place, is_claimed in (("2 hosts at 1 Gbit/s, TLS", True), ("one host", False)):
        reason = hosts.missing() if is_claimed else ""
        if reason:
            say(f"\n{place}: skipped: {reason}")
            continue
        with placed(is_claimed) as placement:
            # Namespaces share the machine's memory, hosts do not.
            peer = PEERS["potluck-tls" if is_claimed else "potluck"]
            row = compare(peer, placement, rounds=2 if quick else 9, calls=1 if quick else 4)
        result["places"][place] = row
        idle, busy = row["idle_s"], row["busy_s"]
        say(f"\n{place}: idle {idle * 1e3:.1f} ms, busy {busy * 1e3:.1f} ms, {row['engine']}")
        what = f"25 MiB buckets, {place}: time with the main thread busy over idle"
        if is_claimed:
            found.append(claims.at_most(what, "<= 1.1x", 1.1, [("", busy / idle)]))
        else:
            found.append(
                Claim(what, f"- ({len(usable_cpus())} cores)", f"{busy / idle:.3g}x", None)
            )
    return result, found


@contextlib.contextmanager
def placed(in_hosts: bool) -> Iterator[Here]:
    if not in_hosts:
        yield Here()
        return
    with hosts.Network(NUM_WORKERS, rate="1gbit") as network:
        yield InHosts(network)


def compare(peer: Competitor, placement: Here, rounds: int, calls: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {"idle": [], "busy": []}
    program = (sys.executable, __file__)
    with (
        tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder,
        Crew(peer, NUM_WORKERS, Path(folder), placement=placement, program=program) as crew,
    ):
        crew.join()
        crew.ask("idle", calls=2)
        for _ in range(rounds):
            for how, found in samples.items():
                answers = crew.ask(how, calls=calls)
                found.append(max(answer["seconds"] for answer in answers) / calls)
        engine = crew.ask("describe")[0]["text"]
    medians = {f"{how}_s": statistics.median(found) for how, found in samples.items()}
    return {**medians, "samples_s": samples, "engine": engine}


def worker() -> int:
    """One rank; see ``potluck.cli.bench.worker``."""
    from potluck.cli.bench.libraries import Ours

    library = Ours({})
    ctx = library.ctx
    channel = Channel.to_crew(ctx.rank, ctx.world_size)
    bucket = np.zeros(BUCKET_BYTES // 4, np.float32)
    while True:
        match channel.receive():
            case {"do": ("idle" | "busy") as how, "calls": int(calls)}:
                ctx.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    (reduce_idle if how == "idle" else reduce_busy)(ctx, bucket)
                channel.send(seconds=time.perf_counter() - start)
            case {"do": "describe"}:
                channel.send(text=library.describe())
            case {"do": "end"}:
                break
    ctx.close()
    return 0


def reduce_idle(ctx: potluck.DistributedContext, bucket: Any) -> None:
    ctx.all_reduce(bucket)


def reduce_busy(ctx: potluck.DistributedContext, bucket: Any) -> None:
    work = ctx.all_reduce(bucket, async_op=True)
    counted = 0
    while not work.done():
        for _ in range(1000):
            counted += 1
    work.wait()


if __name__ == "__main__":
    sys.exit(worker() if "BENCH_TOKEN" in os.environ else script.main("busy", __doc__, measure))
