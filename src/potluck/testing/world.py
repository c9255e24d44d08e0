"""``run_world``: run a function on every rank of an in-process world, each in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from potluck._core.backends.inprocess import InProcessBackend
from potluck._core.checks import Duration, checked_seconds
from potluck._core.context import DistributedContext

T = TypeVar("T")


class WorldError(AssertionError):
    """A rank of the world raised; ``errors`` maps each such rank to its exception."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        lines = [f"rank {rank}: {type(e).__name__}: {e}" for rank, e in sorted(errors.items())]
        super().__init__("\n".join(lines))
        self.errors = errors


def run_all(functions: Sequence[Callable[[], T]], timeout_s: float = 150.0) -> list[T]:
    """Run each function in a thread; returns their results. WorldError if a function raises or does
    not end within ``timeout_s`` seconds."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), name=f"rank-{index}", daemon=True)
        for index in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for index, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            errors.setdefault(index, TimeoutError(f"still running after {timeout_s} s"))
    if errors:
        raise WorldError(errors) from errors[min(errors)]
    return [results[index] for index in range(len(functions))]


def run_world(
    world_size: int,
    function: Callable[[DistributedContext], T],
    *,
    timeout_s: Duration = 30.0,
    backends: Sequence[InProcessBackend] | None = None,
) -> list[T]:
    """Run ``function(ctx)`` on ``world_size`` ranks at the same time; returns their results.

    Each rank is a thread of this process with an in-process context, which is closed at the end.
    ``timeout_s`` is the default deadline of operations in seconds; the whole world may take two
    minutes more, since a busy machine computes slowly. ``backends`` replaces new backends.
    WorldError, from the error of the lowest rank, if a rank raises or does not end in time.
    """

    def run(backend: InProcessBackend) -> T:
        with DistributedContext(backend, timeout_s=timeout_s) as context:
            return function(context)

    timeout_s = checked_seconds(timeout_s, "timeout_s")
    worlds = backends or InProcessBackend.world(world_size)
    return run_all([partial(run, backend) for backend in worlds], timeout_s + 120)
