"""Fits on shards, one shard per rank of an in-process world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from potluck._core.context import DistributedContext
from potluck.testing.world import run_world


def on_shards(shards: Sequence[Any], fit: Callable[[DistributedContext, Any], Any]) -> list[Any]:
    """``fit(ctx, shard)`` on as many ranks as there are shards."""
    return run_world(len(shards), lambda ctx: fit(ctx, shards[ctx.rank]))


def refusal(shards: Sequence[Any], fit: Callable[[DistributedContext, Any], Any]) -> str:
    """The ValueError that every rank raises, after which the group still works."""

    def try_it(ctx: DistributedContext, shard: Any) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            fit(ctx, shard)
        assert ctx.all_reduce(np.ones(1))[0] == ctx.world_size
        return str(caught.value)

    [message] = set(on_shards(shards, try_it))
    return str(message)
