"""What Python adds to a 4 KiB all_reduce over links: CPU time of the calling thread.

    python benchmarks/links_call_overhead.py

Two processes reduce over TLS on loopback, without shared memory. ``begin`` is the call with
``async_op=True``: from the script to the native loop, which then has all it needs. ``call`` is the
blocking call: the same, the wait (which takes no CPU time) and the end. CPU time, because the clock
would count the network too; the median over many calls, because another program may run between.
Reach: ``begin`` takes at most 8 us. Exits with 1 if it does not.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

import potluck
from potluck.backends.ring import RingBackend
from potluck.settings import load_settings
from potluck.system import need_posix
from potluck.transport.acceptor import listening_socket

NUM_BYTES = 4096
CALLS = 3000
REACH_US = 8.0


def measure(rank: int, peers: list[str], pipe: Connection) -> None:
    """One rank: microseconds of CPU per call, for each of the ways."""
    settings = load_settings(use_shared_memory=False, passphrase="what a call costs over links")
    backend = RingBackend(peers, rank, settings=settings)
    with potluck.DistributedContext(backend, timeout_s=60) as context:
        array = np.zeros(NUM_BYTES // 4, np.float32)

        def begin() -> float:
            before = time.thread_time_ns()
            work = context.all_reduce(array, async_op=True)
            taken = time.thread_time_ns() - before
            work.wait()
            return taken / 1e3

        def call() -> float:
            before = time.thread_time_ns()
            context.all_reduce(array)
            return (time.thread_time_ns() - before) / 1e3

        ways: tuple[Callable[[], float], ...] = (begin, call)
        pipe.send([statistics.median([way() for _ in range(CALLS)]) for way in ways])


def main() -> int:
    need_posix("forking the ranks")
    fork = multiprocessing.get_context("fork")
    sockets = [listening_socket("127.0.0.1", 0) for _ in range(2)]
    peers = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    pipes = [fork.Pipe() for _ in peers]
    ranks = [
        fork.Process(target=measure, args=(rank, peers, pipe[1])) for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    begin, call = pipes[0][0].recv()
    for process in ranks:
        process.join()
    print(f"{NUM_BYTES} bytes, float32, sum, two processes over links; median of {CALLS} calls")
    print(f"begin {begin:.1f} us, call {call:.1f} us of CPU; reach: begin in {REACH_US:.0f} us")
    return int(begin > REACH_US)


if __name__ == "__main__":
    sys.exit(main())
