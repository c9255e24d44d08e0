"""The worker program: one rank of one peer, which joins the peer's group and then serves requests.

Run as ``python -m potluck.cli.bench.worker PEER``. Between two requests it blocks on its control
channel, outside of the library under test, so that a library that waits by spinning uses no CPU
time of the other peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import sys
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from potluck.cli.bench import operations
from potluck.cli.bench.crew import Channel
from potluck.cli.bench.libraries import LIBRARIES, BenchLibrary, Case, Floats
from potluck.cli.bench.peers import PEERS, Competitor


class Worker:
    """A library under test, with the buffers of the last operation that was requested."""

    def __init__(self, library: BenchLibrary) -> None:
        self.library = library
        self._case: Case | None = None
        self._key: tuple[str, int] | None = None
        judge("all-reduce", library.world_size, 1 << 16, library.rank, None)  # NumPy loads its code
        release_free_memory()
        self._at_first = resident()
        library.barrier()  # makes the connections of libraries that connect at the first call

    def case(self, operation: str, nbytes: int) -> Case:
        """The operation on buffers of zeros, kept until another operation or size is requested."""
        if self._key != (operation, nbytes):
            self._case = self._key = None
            mine = operations.zeros(operation, self.library.world_size, nbytes)
            self._case = self.library.prepare(operation, mine)
            self._key = operation, nbytes
        assert self._case is not None
        return self._case

    def check(self, operation: str, nbytes: int) -> dict[str, Any]:
        """One call on known numbers: the largest error and a digest of the result."""
        rank, world_size = self.library.rank, self.library.world_size
        self._case = self._key = None
        mine = operations.known(operation, world_size, nbytes, rank)
        case = self.library.prepare(operation, mine)
        if case is None:
            return {"has": False}
        try:
            case.call()
        # Gloo, MPI and MLX report a dtype or operation that they lack by different classes.
        except (NotImplementedError, RuntimeError, ValueError) as error:
            words = str(error).lower()
            if any(word in words for word in ("not support", "unsupported", "not implement")):
                return {"has": False}
            raise
        return {"has": True} | judge(operation, world_size, nbytes, rank, case.result())

    def time(self, operation: str, nbytes: int, calls: int, warm: bool) -> dict[str, Any]:
        """The seconds and CPU seconds of ``calls`` calls; ``warm``: after one warm-up call."""
        call = self.case(operation, nbytes).call
        if warm:
            call()
        self.library.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        for _ in repeat(None, calls):
            call()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "cpu_s": time.process_time() - cpu}

    def one_call(self, operation: str, nbytes: int, calls: int) -> dict[str, Any]:
        """The median of ``calls`` calls timed one by one, in seconds. Includes reading the clock,
        which ``time`` does not."""
        call = self.case(operation, nbytes).call
        clock = time.perf_counter
        stamps = [0.0] * (calls + 1)
        self.library.barrier()
        stamps[0] = clock()
        for number in range(1, calls + 1):
            call()
            stamps[number] = clock()
        return {"seconds": float(np.median(np.diff(stamps)))}

    def memory(self, operation: str, nbytes: int) -> dict[str, Any]:
        """The memory of the library in bytes: the peak of this process in three calls, with its
        part of shared memory, less the user's buffers and the memory before the first call.
        Connections that are made at the first call count. None where the system does not report
        it."""
        self._case = self._key = None
        release_free_memory()
        case = self.case(operation, nbytes)
        reset_peak()
        for _ in range(3):
            case.call()
        peak = resident(peak=True)  # counts shared memory in every process that has it mapped
        if peak is None or self._at_first is None:
            return {"bytes": None}
        own = peak - others_part_of_shared_memory() - self._at_first - case.nbytes
        return {"bytes": max(0, own)}


def judge(
    operation: str, world_size: int, nbytes: int, rank: int, result: Floats | None
) -> dict[str, Any]:
    """The largest absolute error and the SHA-256 of ``result`` (None: of the input)."""
    if result is None:
        result = operations.known(operation, world_size, nbytes, rank)
    expected = operations.expected(operation, world_size, nbytes, rank)
    return {
        "max_error": float(np.max(np.abs(result - expected))) if expected.size else 0.0,
        "digest": hashlib.sha256(result.tobytes()).hexdigest(),
    }


def resident(*, peak: bool = False) -> int | None:
    """Resident bytes of this process without shared memory; ``peak``: the highest value so far,
    with shared memory. None on systems without ``/proc``."""
    try:
        kib = _kib("status", "VmHWM", "VmRSS", "RssShmem")
    except (OSError, KeyError):
        return None
    return (kib["VmHWM"] if peak else kib["VmRSS"] - kib["RssShmem"]) * 1024


def others_part_of_shared_memory() -> int:
    """Resident bytes of shared memory that belong to other processes: of a page mapped by n
    processes, (n - 1) / n."""
    try:
        kib = _kib("status", "RssShmem") | _kib("smaps_rollup", "Pss_Shmem")
    except (OSError, KeyError):
        return 0
    return max(0, kib["RssShmem"] - kib["Pss_Shmem"]) * 1024


def _kib(file: str, *names: str) -> dict[str, int]:
    """Figures of this process in KiB, by their names in ``/proc/self/FILE``."""
    lines = Path("/proc/self", file).read_text().splitlines()
    facts = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {name: int(facts[name].split()[0]) for name in names}


def reset_peak() -> None:
    """Reset VmHWM to the current value, on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release_free_memory() -> None:
    """Return freed memory to the system, where the C library is glibc."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def serve(peer: Competitor) -> int:
    """Serve requests until one says end (returns 0), or the comparison is gone (returns 1)."""
    library = LIBRARIES[peer.module](peer.arguments)
    channel = Channel.to_crew(library.rank, library.world_size)
    worker = Worker(library)
    code = channel.serve(
        {
            "check": worker.check,
            "time": worker.time,
            "one_call": worker.one_call,
            "memory": worker.memory,
            "describe": lambda: {"text": library.describe()},
        }
    )
    if code == 0:
        library.close()
    channel.close()
    return code


if __name__ == "__main__":
    sys.exit(serve(PEERS[sys.argv[1]]))
