"""Bytes per second of arrays of 100 MiB that a service takes, beside those of a plain link.

    POTLUCK_USE_SHARED_MEMORY=0 potluck run --workers 2 benchmarks/service_push.py
    POTLUCK_USE_SHARED_MEMORY=0 potluck run --workers 2 benchmarks/service_push.py --save

Worker 1 pushes, by ``remote.take(array)`` and by ``ctx.send`` in turn, and both end with an answer
of worker 0. Both ways are encrypted, by TLS 1.3 over the loopback, since shared memory is left out.
``--save`` keeps the result in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from common import results
from common.script import Page

import potluck
from potluck.cli.bench.machine import heading, machine
from potluck.services import Call, service

TAG_ANSWER = 7


@service("sink")
def take(call: Call, array: np.ndarray) -> int:
    return int(array[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    results.add_option(parser)
    options = parser.parse_args()
    page, facts = Page(), machine()
    ctx = potluck.init()
    array = np.ones(options.mib << 20, np.uint8)
    answer = np.zeros(1, np.uint8)
    if ctx.rank == 0:
        ctx.serve(take)
    ctx.barrier()
    remote = ctx.connect("sink", rank=0) if ctx.rank == 1 else None

    def push() -> None:
        if remote is not None:
            remote.take(array)
        ctx.barrier()

    def send() -> None:
        if ctx.rank == 1:
            ctx.send(array, 0)
            ctx.recv(answer, 0)
        else:
            ctx.recv(array, 1)
            ctx.send(answer, 1)
        ctx.barrier()

    seconds: dict[str, list[float]] = {"push": [], "send": []}
    for number in range(options.rounds + 2):
        for name, run in (("push", push), ("send", send)):
            began = time.perf_counter()
            run()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
    if ctx.rank == 1:
        pushed, sent = (statistics.median(seconds[name]) for name in ("push", "send"))
        page.say(heading(facts))
        page.say(f"{options.mib} MiB, medians of {options.rounds} rounds")
        for name, each in (("service", pushed), ("plain link", sent)):
            page.say(f"{name}: {each * 1e3:.1f} ms, {(options.mib << 20) / each / 1e9:.2f} GB/s")
        page.say(f"service over plain link: {sent / pushed:.2f} of the bandwidth")
        result = {
            "benchmark": "service_push",
            "machine": facts,
            "nbytes": options.mib << 20,
            "push_s": seconds["push"],
            "send_s": seconds["send"],
            "bandwidth_ratio": sent / pushed,
        }
        results.keep(options.save, result, page.lines)


if __name__ == "__main__":
    main()
