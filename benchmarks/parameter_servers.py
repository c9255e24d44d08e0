"""A step with one, two and four parameter servers, between four hosts at 100 Mbit/s.

    python benchmarks/parameter_servers.py             # needs root
    python benchmarks/parameter_servers.py --rate 1gbit --megabytes 64

Four workers in network namespaces of this machine, which also are the servers. A synchronous step
without computation: each worker pushes a gradient (32 float32 tensors of equal size, 8 MiB
together) and pulls the next version. Beside it an all-reduce of the same bytes. The ways take
turns; a step is as long as its slowest worker's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common.placements import InHosts

import potluck
from potluck.cli.bench.crew import Channel, Crew
from potluck.cli.bench.machine import load
from potluck.cli.bench.peers import PEERS
from potluck.parameter_server import SGD, ParameterServer
from support.hosts import Network

WORKERS = 4
NUM_TENSORS = 32
WAYS = ("1", "2", "4", "all-reduce")


def worker() -> int:
    """One rank, told when to make a step."""
    with potluck.init(timeout_s=120) as ctx:
        channel = Channel.to_crew(ctx.rank, ctx.world_size)
        gradient: dict[str, np.ndarray] = {}
        servers: dict[str, ParameterServer] = {}
        while True:
            match channel.receive():
                case {"do": "make", "num": int(num)}:
                    gradient = {
                        f"layer{each}": np.full(num, 0.5, np.float32) for each in range(NUM_TENSORS)
                    }
                    for way in WAYS[:-1]:
                        ps = ParameterServer(ctx, optimizer=SGD(0.1), servers=int(way), name=way)
                        ps.set_parameters("m", gradient)
                        ps.get_parameters("m")
                        servers[way] = ps
                    channel.send()
                case {"do": "step", "way": str(way)}:
                    ctx.barrier()
                    began = time.perf_counter()
                    if way == "all-reduce":
                        ctx.all_reduce(np.concatenate(list(gradient.values())), "mean")
                    else:
                        servers[way].accumulate_gradient("m", gradient)
                        servers[way].get_parameters("m")
                    channel.send(seconds=time.perf_counter() - began)
                case {"do": "end"}:
                    for ps in servers.values():
                        ps.close()
                    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="100mbit", help="of each host's link")
    parser.add_argument("--megabytes", type=int, default=8, help="of parameters, in MiB")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="potluck-servers-") as folder,
        Network(WORKERS, rate=given.rate) as network,
        Crew(
            PEERS["potluck-tls"],
            WORKERS,
            Path(folder),
            placement=InHosts(network),
            program=(sys.executable, __file__),
        ) as crew,
    ):
        crew.join()
        crew.ask("make", num=given.megabytes * (1 << 20) // 4 // NUM_TENSORS)
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(given.rounds + 1):
            for way in WAYS:
                seconds = max(answer["seconds"] for answer in crew.ask("step", way=way))
                if number:  # the first makes connections
                    found[way].append(seconds)
    print(
        f"{given.megabytes} MiB, {WORKERS} workers, {given.rate}, {given.rounds} rounds, {load()}"
    )
    for way, each in found.items():
        name = way if way == "all-reduce" else f"{way} server{'s' if way != '1' else ''}"
        of_one = statistics.median(found["1"]) / statistics.median(each)
        print(f"{name:>12}: {statistics.median(each):7.3f} s  {of_one:5.2f} times as fast as 1")
    return 0


if __name__ == "__main__":
    sys.exit(worker() if "BENCH_TOKEN" in os.environ else main())
