"""potluck itself, through the calls that a script makes, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import potluck
from potluck.bench.libraries.base import Case, Floats
from potluck.engine import native_loop
from potluck.settings import load_settings


class Ours:
    """A context made from the environment."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self._arguments: dict[str, Any] = dict(arguments)
        self.ctx = ctx = potluck.init("env")
        self.rank, self.world_size = ctx.rank, ctx.world_size

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        ctx, arguments = self.ctx, self._arguments
        parts = mine.reshape(self.world_size, -1) if mine.size % self.world_size == 0 else mine
        if operation == "all-reduce":
            return Case(lambda: ctx.all_reduce(mine, **arguments), lambda: mine, mine.nbytes)
        if operation == "broadcast":
            return Case(lambda: ctx.broadcast(mine), lambda: mine, mine.nbytes)
        if operation == "reduce":
            return Case(lambda: ctx.reduce(mine), lambda: mine, mine.nbytes)
        if operation == "reduce-scatter":
            both = mine.nbytes + mine.nbytes // self.world_size
            return _returning(lambda: ctx.reduce_scatter(parts), both)
        if operation == "all-gather":
            return _returning(lambda: ctx.all_gather(mine), mine.nbytes * (self.world_size + 1))
        return _returning(lambda: ctx.all_to_all(parts), 2 * mine.nbytes)

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
        wire = load_settings().wire
        return ", ".join([potluck.__version__, f"links: {engine} and {wire}", *sorted(used)])

    def close(self) -> None:
        self.ctx.close()


def open_library(arguments: Mapping[str, str]) -> Ours:
    """Join the group that the environment describes."""
    return Ours(arguments)


def _returning(call: Callable[[], Any], nbytes: int) -> Case:
    """For the calls that return a new array."""
    last: list[Any] = [None]

    def run() -> None:
        last[0] = None  # so that its memory can be used again
        last[0] = call()

    return Case(run, lambda: np.asarray(last[0]).reshape(-1), nbytes)
