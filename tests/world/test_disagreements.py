"""Ranks that make different calls: every rank's error names both calls, over every kind of link."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from potluck._core.context import DistributedContext
from potluck.errors import Desync
from support.process_groups import process_group
from support.worlds import WORLD_KINDS, open_world

Act = Callable[[DistributedContext], Any]

CALLS: dict[str, tuple[Act, str]] = {
    "barrier": (lambda ctx: ctx.barrier(), r"barrier(?!\()"),
    "sum": (
        lambda ctx: ctx.all_reduce(np.ones(12, np.float32)),
        r"all_reduce\(float32, (shape \(12,\)|12 elements), op sum, [a-z_-]+\)",
    ),
    "later": (
        lambda ctx: ctx.all_reduce(np.ones(12, np.float32), async_op=True).wait(),
        r"all_reduce\(float32, (shape \(12,\)|12 elements), op sum, [a-z_-]+\)",
    ),
    "mean": (
        lambda ctx: ctx.all_reduce(np.ones(12, np.float32), "mean"),
        r"all_reduce\(float32, (shape \(12,\)|12 elements), op mean, [a-z_-]+\)",
    ),
    "longer": (
        lambda ctx: ctx.all_reduce(np.ones(400_000, np.float32)),
        r"all_reduce\(float32, (shape \(400000,\)|400000 elements), op sum, [a-z_-]+\)",
    ),
    "elsewhere": (
        lambda ctx: ctx.all_reduce(np.ones(12, np.float32), algorithm="ring"),
        r"all_reduce\(float32, (shape \(12,\)|12 elements), op sum, ring\)",
    ),
    "gather": (
        lambda ctx: ctx.all_gather(np.ones((2, 3), np.int64)),
        r"all_gather\(int64, (shape \(2, 3\)|6 elements), [a-z_-]+\)",
    ),
    "broadcast": (
        lambda ctx: ctx.broadcast(np.ones(4)),
        r"broadcast\(float64, (shape \(4,\), root 0|4 elements), [a-z_-]+\)",
    ),
}
PAIRS = [
    *(("barrier", "sum"), ("sum", "barrier"), ("later", "barrier"), ("gather", "later")),
    *(("sum", "mean"), ("longer", "sum"), ("broadcast", "gather"), ("sum", "elsewhere")),
]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_both_errors_name_both_calls(kind: str, pair: tuple[str, str]) -> None:
    def act(ctx: DistributedContext) -> str:
        ctx.all_reduce(np.ones(3))
        with pytest.raises(Desync) as caught:
            CALLS[pair[ctx.rank]][0](ctx)
            ctx.barrier()  # what only sends may have ended before the other's frames came
            ctx.barrier()
        return str(caught.value)

    with open_world(kind, 2) as world:
        for text in world.run(act):
            for rank, name in enumerate(pair):
                called = rf"rank {rank} \([^)]*\) called {CALLS[name][1]}"
                assert re.search(called, text), text


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_a_third_rank_hears_of_both_calls_too(kind: str) -> None:
    def act(ctx: DistributedContext) -> str:
        with pytest.raises(Desync) as caught:
            CALLS["barrier" if ctx.rank == 1 else "sum"][0](ctx)
            ctx.barrier()
            ctx.barrier()
        return str(caught.value)

    with open_world(kind, 3) as world:
        world.run(lambda ctx: ctx.all_reduce(np.ones(3)))
        for text in world.run(act):
            assert re.search(CALLS["sum"][1], text), text
            assert re.search(CALLS["barrier"][1], text), text


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_a_message_that_does_not_fit_is_named_on_both_sides(kind: str) -> None:
    def act(ctx: DistributedContext) -> str:
        ctx.all_reduce(np.ones(3))
        with pytest.raises(Desync) as caught:
            if ctx.rank == 0:
                ctx.send(np.ones(4, np.float32), 1)
                ctx.barrier()
            else:
                ctx.recv(np.ones(3, np.float32), 0)
        return str(caught.value)

    with open_world(kind, 2) as world:
        for text in world.run(act):
            assert "called recv(float32, shape (3,), from rank 0, tag 0), but rank 0 (" in text
            assert "sent 16 bytes of float32" in text


@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_torchs_barrier_beside_another_ranks_gradients(kind: str) -> None:
    """What DDP's second forward met: one rank had left the loop for a barrier."""

    def act(ctx: DistributedContext) -> str:
        with process_group(ctx) as group:
            group.allreduce([torch.ones(3)]).wait()
            options, waited = dist.AllreduceOptions(), dist.BarrierOptions()
            options.asyncOp = waited.asyncOp = False
            with pytest.raises(Desync) as caught:
                if ctx.rank == 0:
                    group.allreduce([torch.ones(12)], options).wait()
                else:
                    group.barrier(waited).wait()
                group.barrier(waited).wait()
                group.barrier(waited).wait()
        return str(caught.value)

    with open_world(kind, 2) as world:
        for text in world.run(act):
            assert re.search(CALLS["sum"][1], text), text
            assert re.search(rf"rank 1 \([^)]*\) called {CALLS['barrier'][1]}", text), text


@pytest.mark.parametrize("kind", WORLD_KINDS)
@pytest.mark.parametrize("differ", ["dtype", "row", "root"])
def test_uneven_parts_that_differ_in_more_than_their_length(kind: str, differ: str) -> None:
    """Every rank names all kinds of parts, with the ranks that gave them."""

    def act(ctx: DistributedContext) -> str:
        is_odd = ctx.rank == 1
        dtype = np.float64 if is_odd and differ == "dtype" else np.float32
        mine = np.ones((ctx.rank, 4 if is_odd and differ == "row" else 3), dtype)
        with pytest.raises(Desync) as caught:
            ctx.gather_uneven(mine, root=2 if is_odd and differ == "root" else 0)
        with pytest.raises(Desync):
            while True:  # the loop of the links ends the group a moment later
                ctx.barrier()
        return str(caught.value)

    odd = {
        "dtype": r"rank 1 gave float64 of shape \(\*, 3\) with root 0",
        "row": r"rank 1 gave float32 of shape \(\*, 4\) with root 0",
        "root": r"rank 1 gave float32 of shape \(\*, 3\) with root 2",
    }[differ]
    with open_world(kind, 3) as world:
        for told in world.run(act):
            assert re.search(r"ranks 0, 2 gave float32 of shape \(\*, 3\) with root 0", told), told
            assert re.search(odd, told), told
