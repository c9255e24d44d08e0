"""MLX's ring backend. MLX is lazy: each call is evaluated at once, into a new array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from potluck.cli.bench.libraries.base import Case, Floats


class Mlx:
    """The group that MLX_HOSTFILE and MLX_RANK describe."""

    def __init__(self) -> None:
        mx.set_default_device(mx.cpu)
        self._group = mx.distributed.init(strict=True, backend="ring")
        self.rank, self.world_size = self._group.rank(), self._group.size()

    def prepare(self, operation: str, mine: Floats) -> Case | None:
        array = mx.array(mine)
        match operation:
            case "all-reduce":
                return _evaluated(mx.distributed.all_sum, array, self._group, 2 * mine.nbytes)
            case "all-gather":
                nbytes = mine.nbytes * (self.world_size + 1)
                return _evaluated(mx.distributed.all_gather, array, self._group, nbytes)
        return None  # its ring has neither broadcast nor reduce_scatter

    def barrier(self) -> None:
        mx.eval(mx.distributed.all_sum(mx.zeros(1), group=self._group))

    def describe(self) -> str:
        return f"MLX {version('mlx')}, ring"

    def close(self) -> None:
        return None


def open_library(arguments: Mapping[str, str]) -> Mlx:
    """Join the group that the environment describes."""
    return Mlx()


def _evaluated(function: Callable[..., Any], array: Any, group: Any, nbytes: int) -> Case:
    last: list[Any] = [None]

    def run() -> None:
        last[0] = None
        last[0] = function(array, group=group)
        mx.eval(last[0])

    return Case(run, lambda: np.array(last[0]).reshape(-1), nbytes)
