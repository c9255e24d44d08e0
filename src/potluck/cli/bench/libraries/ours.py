"""potluck itself, through the public calls of a context, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from potluck._core.context import init
from potluck._core.engine.loop import native as native_loop
from potluck._core.version import VERSION
from potluck.cli.bench.libraries.base import Case, Floats


class Ours:
    """A context from the environment variables. ``arguments`` are added to each all_reduce."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self._arguments: dict[str, Any] = dict(arguments)
        self.ctx = ctx = init("env")
        self.rank, self.world_size = ctx.rank, ctx.world_size

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        ctx = self.ctx
        parts = mine.reshape(self.world_size, -1) if mine.size % self.world_size == 0 else mine
        in_place: dict[str, Callable[[], object]] = {
            "all-reduce": partial(ctx.all_reduce, mine, **self._arguments),
            "broadcast": partial(ctx.broadcast, mine),
            "reduce": partial(ctx.reduce, mine),
        }
        if operation in in_place:
            return Case(in_place[operation], lambda: mine, mine.nbytes)
        count = mine.size * self.world_size if operation == "all-gather" else mine.size
        out = np.empty(
            count // self.world_size if operation == "reduce-scatter" else count, np.float32
        )
        nbytes = mine.nbytes + out.nbytes
        if operation == "reduce-scatter":
            return Case(lambda: ctx.reduce_scatter(parts, out=out), lambda: out, nbytes)
        if operation == "all-gather":
            return Case(lambda: ctx.all_gather(mine, out=out), lambda: out, nbytes)
        return Case(lambda: ctx.all_to_all(parts, out=out), lambda: out, nbytes)

    def barrier(self) -> None:
        self.ctx.barrier()

    def describe(self) -> str:
        operations = self.ctx.stats()["operations"].items()
        used = {
            algorithm
            for name, each in operations
            if name != "barrier"
            for algorithm in each.get("algorithms", {})
        }
        engine = "native" if native_loop.is_available() else "Python"
        return ", ".join([VERSION, f"links: {engine}", *sorted(used)])

    def close(self) -> None:
        self.ctx.close()


def open_library(arguments: Mapping[str, str]) -> Ours:
    """Join the group that the environment describes."""
    return Ours(arguments)
