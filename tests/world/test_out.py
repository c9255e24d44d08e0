"""``out``: results that go into the caller's own memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from potluck._core import native
from potluck._core.context import DistributedContext
from potluck.testing.world import WorldError
from support.worlds import World, open_world

WORLD_SIZE = 3
KINDS = ["tls", *(["shm"] if native.available else [])]


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request.param, WORLD_SIZE) as world:
        world.run(lambda ctx: ctx.barrier())
        yield world


def test_results_go_where_the_caller_wants_them_again_and_again(world: World) -> None:
    def act(ctx: DistributedContext) -> None:
        ranks = np.arange(WORLD_SIZE, dtype=np.float32)
        whole, rows, part = np.empty((2, 3, 4), np.float32)[0], np.empty((3, 4)), np.empty(4)
        for step in range(3):
            mine = np.full(4, ctx.rank + step, np.float32)
            assert ctx.all_gather(mine, out=whole) is whole
            assert (whole == (ranks + step)[:, None]).all()
            gathered = ctx.gather(mine, root=1, out=whole if ctx.rank == 1 else None)
            assert gathered is (whole if ctx.rank == 1 else None)
            parts = np.full((3, 4), float(ctx.rank + step))
            assert ctx.reduce_scatter(parts, out=part) is part
            assert (part == 3 + 3 * step).all()
            assert ctx.all_to_all(parts, out=rows) is rows
            assert (rows == (ranks + step)[:, None]).all()

    world.run(act)


def test_a_work_gives_the_same_memory(world: World) -> None:
    def act(ctx: DistributedContext) -> None:
        whole = torch.empty(3, 2)
        work = ctx.all_gather(torch.full((2,), float(ctx.rank)), out=whole, async_op=True)
        assert work.wait() is whole
        assert whole[:, 0].tolist() == [0, 1, 2]

    world.run(act)


def test_its_shape_and_layout_are_the_callers(world: World) -> None:
    def act(ctx: DistributedContext) -> None:
        mine = np.full((2, 2), ctx.rank)
        flat = ctx.all_gather(mine, out=np.empty(12, mine.dtype))
        assert flat.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        turned = np.empty((2, 2, 3), mine.dtype).T
        assert ctx.all_gather(mine, out=turned) is turned
        assert (turned == np.arange(3)[:, None, None]).all()

    world.run(act)


def test_what_shape_one_rank_wants_is_not_the_others_affair(world: World) -> None:
    def act(ctx: DistributedContext) -> None:
        parts = np.ones((3, 2, 2), np.float32)
        out = np.empty(4, np.float32) if ctx.rank == 1 else None
        assert ctx.reduce_scatter(parts, out=out).ravel().tolist() == [3] * 4
        whole = np.empty(12, np.float32) if ctx.rank == 1 else None
        assert ctx.all_gather(parts[0], out=whole).ravel().tolist() == [1] * 12
        rows = np.empty(12, np.float32) if ctx.rank == 1 else None
        assert ctx.all_to_all(parts, out=rows).ravel().tolist() == [1] * 12

    world.run(act)


@pytest.mark.parametrize(
    "out", [np.empty((3, 3), np.float32), np.empty((3, 4)), np.empty((2, 4), np.float32)]
)
def test_memory_that_does_not_fit_is_refused_before_anything_is_sent(
    world: World, out: np.ndarray
) -> None:
    def act(ctx: DistributedContext) -> None:
        before = out.copy()
        text = r"all_gather: the result is float32 of shape \(3, 4\)"
        with pytest.raises(ValueError, match=text):
            ctx.all_gather(np.zeros(4, np.float32), out=out)
        assert out.tobytes() == before.tobytes()
        ctx.barrier()

    world.run(act)


def test_it_may_be_the_own_part_of_the_whole_and_nothing_else_of_it(world: World) -> None:
    def act(ctx: DistributedContext) -> None:
        whole, rank = np.full((3, 50_000), float(ctx.rank)), ctx.rank
        ctx.all_gather(whole[rank], out=whole)
        assert (whole == np.arange(3.0)[:, None]).all()
        ctx.reduce_scatter(whole, out=whole[rank])
        assert (whole[rank] == 3 * rank).all()
        before = whole.copy()
        for call in (
            lambda: ctx.reduce_scatter(whole, out=whole[rank - 1]),
            lambda: ctx.all_gather(whole[rank - 1], out=whole),
            lambda: ctx.all_to_all(whole, out=whole[:]),
            lambda: ctx.all_to_all(whole, out=whole),
        ):
            with pytest.raises(ValueError, match="out overlaps the array given"):
                call()
        assert (whole == before).all()
        ctx.barrier()

    world.run(act)


def test_parts_must_be_one_for_each_rank_also_with_out(world: World) -> None:
    def act(ctx: DistributedContext) -> None:
        ctx.reduce_scatter(np.zeros(6), out=np.empty(2))

    with pytest.raises(WorldError, match="the first dimension must be 3"):
        world.run(act)
