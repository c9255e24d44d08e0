"""What goes wrong in a world of Gloo or MPI, one story after the other in the same processes.

Each story makes a group of its own, and each rank says what it saw.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time

import numpy as np

import potluck
from potluck.errors import GroupError, PotluckError

backend = sys.argv[1]
stories = sys.argv[2].split(",")
ports = sys.argv[3].split(",") if len(sys.argv) > 3 else [""] * len(stories)
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def said(story: str, started: float, error: BaseException | None, **facts: object) -> None:
    told = {"story": story, "rank": rank, "seconds": time.monotonic() - started, **facts}
    if error is not None:
        told |= {"error": type(error).__name__, "text": str(error)}
        told |= {"lost": getattr(error, "rank", None), "cause": type(error.__cause__).__name__}
    line = json.dumps(told) + os.linesep
    os.write(1, line.encode())  # whole, whatever else is written there


def absent(ctx: potluck.DistributedContext) -> None:
    """Rank 1 does not take part before the deadline of the others."""
    if ctx.rank == 1:
        threading.Event().wait(3.0)  # absent: well past the deadline of the others
    ctx.all_reduce(np.ones(1000), timeout=0.5)


def unheard(ctx: potluck.DistributedContext) -> None:
    """Rank 0 waits for a message that nobody sends."""
    if ctx.rank == 0:
        ctx.recv(np.ones(3), 1, tag=3, timeout=0.5)
    else:
        ctx.barrier()


def broken(ctx: potluck.DistributedContext) -> None:
    """Rank 1's own code fails while the others wait for it."""
    if ctx.rank == 1:
        raise ZeroDivisionError("a bad batch")
    ctx.all_reduce(np.ones(1000))


def uncaught(ctx: potluck.DistributedContext) -> None:
    """Rank 1 ends with an exception that nobody catches, in a script without ``with``."""
    if ctx.rank == 1:
        raise AssertionError("nobody caught this")
    ctx.all_reduce(np.ones(1000))


def killed(ctx: potluck.DistributedContext) -> None:
    """The last rank is killed while the others wait for it."""
    if ctx.rank == ctx.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.all_reduce(np.ones(1000))


def host_killed(ctx: potluck.DistributedContext) -> None:
    """Rank 0 is killed, and the store with it."""
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.all_reduce(np.ones(1000))


for story, port in zip(stories, ports, strict=True):
    if port:
        os.environ["MASTER_PORT"] = port
    started = time.monotonic()
    try:
        if story == "worlds":  # they do not agree how many they are
            os.environ["WORLD_SIZE"] = str(3 + rank % 2)
        ctx = potluck.init(backend, timeout_s=30.0)
        with contextlib.nullcontext() if story == "uncaught" else ctx:
            ctx.barrier()
            started = time.monotonic()
            globals()[story](ctx)
    except (PotluckError, ZeroDivisionError) as error:
        again = None
        if isinstance(error, GroupError):
            try:
                ctx.barrier()
            except GroupError as second:
                again = type(second).__name__
        said(story, started, error, again=again)
    else:
        said(story, started, None)
    if story == "worlds":
        os.environ["WORLD_SIZE"] = "3"
