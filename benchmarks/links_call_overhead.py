"""What Python adds to a 4 KiB all_reduce over links: CPU time of the calling thread.

    python benchmarks/links_call_overhead.py

Two processes reduce over TLS on loopback, without shared memory. ``begin`` is the call with
``async_op=True``: from the script to the native loop, which then has all it needs. ``in a row`` is
the median ``begin`` of 50 gradients that follow each other, as a backward pass makes them;
``alone`` begins when the call before has ended: other threads have had the processor and its caches
meanwhile. ``call`` is the blocking call alone: ``begin``, the wait (which takes no CPU time)
and the end. CPU time, because the clock would count the network too; the median over many calls,
because another program may run between.
Reach: ``in a row`` takes at most 8 us. Exits with 1 if it does not.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

import potluck
from potluck._core.backends.ring import RingBackend
from potluck._core.settings import load_settings
from potluck._core.system import need_posix
from potluck._core.transport.listener import listening_socket

NUM_BYTES = 4096
CALLS = 3000
IN_A_ROW = 50
REACH_US = 8.0


def measure(rank: int, peers: list[str], pipe: Connection) -> None:
    """One rank: microseconds of CPU per call, for each of the ways."""
    settings = load_settings(use_shared_memory=False, psk="5a" * 32)
    backend = RingBackend(peers, rank, settings=settings)
    with potluck.DistributedContext(backend, timeout_s=60) as context:
        arrays = [np.zeros(NUM_BYTES // 4, np.float32) for _ in range(IN_A_ROW)]

        def begin(array: np.ndarray) -> tuple[float, potluck.Work]:
            before = time.thread_time_ns()
            work = context.all_reduce(array, async_op=True)
            return (time.thread_time_ns() - before) / 1e3, work

        def in_a_row() -> list[float]:
            begun = [begin(array) for array in arrays]
            for _, work in begun:
                work.wait()
            return [taken for taken, _ in begun]

        def alone() -> float:
            taken, work = begin(arrays[0])
            work.wait()
            return taken

        def call() -> float:
            before = time.thread_time_ns()
            context.all_reduce(arrays[0])
            return (time.thread_time_ns() - before) / 1e3

        row = [each for _ in range(CALLS // IN_A_ROW) for each in in_a_row()]
        rest = [[way() for _ in range(CALLS)] for way in (alone, call)]
        pipe.send([statistics.median(each) for each in (row, *rest)])


def main() -> int:
    need_posix("forking the ranks")
    fork = multiprocessing.get_context("fork")
    sockets = [listening_socket("127.0.0.1", 0) for _ in range(2)]
    peers = [f"127.0.0.1:{each.port}" for each in sockets]
    for each in sockets:
        each.close()
    pipes = [fork.Pipe() for _ in peers]
    ranks = [
        fork.Process(target=measure, args=(rank, peers, pipe[1])) for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    row, alone, call = pipes[0][0].recv()
    for process in ranks:
        process.join()
    print(f"{NUM_BYTES} bytes, float32, sum, two processes over links; median of {CALLS} calls")
    print(f"begin in a row {row:.1f} us (reach: {REACH_US:.0f})")
    print(f"begin alone {alone:.1f} us, call alone {call:.1f} us")
    return int(row > REACH_US)


if __name__ == "__main__":
    sys.exit(main())
