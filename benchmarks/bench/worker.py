"""One rank of one peer: reads commands from stdin, answers each with one line of JSON.

``check N``: all-reduce N bytes of known random data; answers the error and a digest of the result.
``time N C``: a barrier, then C calls on N bytes; answers the seconds they took.
``end``: close the group and leave.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Peer(NamedTuple):
    """A library under test. ``wrap`` turns NumPy memory into what its all_reduce takes."""

    rank: int
    world_size: int
    wrap: Callable[[Floats], Any]
    all_reduce: Callable[[Any], Any]
    barrier: Callable[[], Any]
    close: Callable[[], Any]


def open_potluck() -> Peer:
    import potluck

    ctx = potluck.init()
    return Peer(
        rank=ctx.rank,
        world_size=ctx.world_size,
        wrap=lambda array: array,
        all_reduce=lambda array: ctx.all_reduce(array, op="sum"),
        barrier=ctx.barrier,
        close=ctx.close,
    )


def open_gloo() -> Peer:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=os.environ["BENCH_STORE"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return Peer(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        wrap=torch.from_numpy,
        all_reduce=dist.all_reduce,
        barrier=dist.barrier,
        close=dist.destroy_process_group,
    )


def serve(role: str) -> int:
    """Take part in ``role``'s group until told to end."""
    answers = os.fdopen(os.dup(1), "w")  # nothing that a library prints can get in between
    os.dup2(2, 1)
    peer = open_gloo() if role == "gloo" else open_potluck()
    buffers = functools.lru_cache(maxsize=1)(lambda nbytes: np.zeros(nbytes // 4, np.float32))

    def answer(**facts: object) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    answer(rank=peer.rank, world_size=peer.world_size)
    for command in sys.stdin:
        match command.split():
            case ["check", nbytes]:
                answer(**check(peer, int(nbytes)))
            case ["time", nbytes, count]:
                buffer = buffers(int(nbytes))
                # Zeros stay zeros however often they are summed; any other value would overflow.
                buffer.fill(0.0)
                answer(seconds=timed(peer, peer.wrap(buffer), int(count)))
            case ["end"]:
                break
    peer.close()
    return 0


def timed(peer: Peer, data: Any, count: int) -> float:
    peer.barrier()
    start = time.perf_counter()
    for _ in range(count):
        peer.all_reduce(data)
    return time.perf_counter() - start


def check(peer: Peer, nbytes: int) -> dict[str, object]:
    """Random numbers, seeded by rank so that each rank knows what all of them hold."""
    inputs = [
        np.random.default_rng([nbytes, rank]).standard_normal(nbytes // 4, np.float32)
        for rank in range(peer.world_size)
    ]
    expected = np.sum(inputs, axis=0, dtype=np.float64)
    mine = inputs[peer.rank].copy()
    peer.all_reduce(peer.wrap(mine))
    return {
        "max_error": float(np.max(np.abs(mine - expected))),
        "digest": hashlib.sha256(mine.tobytes()).hexdigest(),
    }
