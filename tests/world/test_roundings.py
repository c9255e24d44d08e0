"""How often a sum of 16-bit numbers is rounded: the table of docs/algorithms.md, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from potluck._core import native
from potluck._core.context import DistributedContext
from potluck._core.engine.arrays import kernels
from support.worlds import open_world

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
ROWS = (
    "| shared_memory (the default on one machine) | 1: three or more ranks",
    "| doubling | one for each of the `log2 w` exchanges, and one more for",
    "| ring, direct, centralized | `w - 1`: at each hop of the ring, or",
    "| tree, spanning_tree | `w - 1`, of which at most two for each level",
    "| hierarchical | once less than there are ranks on the node, and once",
)
"""What the page says."""
SIZES = (2, 3, 4, 5, 8)


def counted(
    monkeypatch: pytest.MonkeyPatch, kind: str, size: int, algorithm: str, **options: Any
) -> tuple[int, int]:
    """The most additions in an element of an all_reduce, and on the longest way into it. They are
    what the loops in Python compute instead of sums: high and low bits of each element."""

    def combine(_: Any, mine: np.ndarray, theirs: np.ndarray) -> None:
        total = (mine >> 32) + (theirs >> 32) + 1
        way = np.maximum(mine & 0xFFFF, theirs & 0xFFFF) + 1
        mine[:] = total << 32 | way

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "combine", combine)
        with open_world(kind, size, segment_bytes=1024, **options) as world:

            def rank(ctx: DistributedContext) -> np.ndarray:
                return ctx.all_reduce(np.zeros(1000, np.int64), "sum", algorithm=algorithm)

            found = np.stack(world.run(rank))
    return int((found >> 32).max()), int((found & 0xFFFF).max())


@pytest.mark.parametrize("size", SIZES)
def test_by_algorithm(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(row in PAGE for row in ROWS)
    exchanges = int(np.log2(size))
    for algorithm in ("ring", "direct", "centralized"):
        assert counted(monkeypatch, "pipes", size, algorithm) == (size - 1, size - 1), algorithm
    extra = 0 if size == 1 << exchanges else 1
    assert counted(monkeypatch, "pipes", size, "doubling") == (size - 1, exchanges + extra)
    total, way = counted(monkeypatch, "pipes", size, "tree")
    assert total == size - 1
    assert way <= 2 * int(np.ceil(np.log2(size + 1)))


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 0, 1, 2, 2, 1)])
def test_between_nodes(nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, "tls", len(nodes), "hierarchical", nodes=nodes)
    most, num_nodes = max(map(nodes.count, nodes)), len(set(nodes))
    assert found[0] == len(nodes) - 1
    assert found[1] <= most - 1 + num_nodes - 1


@pytest.mark.skipif(not native.available, reason="needs the native core")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_once_through_shared_memory(size: int, dtype: Any) -> None:
    """Sums of these numbers are exact in float32, and most need more bits than the dtype has."""
    random = np.random.default_rng(size)
    rows = (random.integers(-120, 121, (size, 5000)) * 2.0 ** random.integers(-5, 4, 5000)).astype(
        dtype
    )
    expected = rows.astype(np.float64).sum(axis=0).astype(np.float32).astype(dtype)

    def rank(ctx: DistributedContext) -> None:
        assert ctx.all_reduce(rows[ctx.rank].copy()).tobytes() == expected.tobytes()

    with open_world("shm", size) as world:
        world.run(rank)
