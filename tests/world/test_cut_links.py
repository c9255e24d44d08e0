"""Two ranks that can't reach each other, while others reach both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from potluck import graphs
from potluck._core.backends.inprocess import InProcessBackend
from potluck._core.context import DistributedContext
from potluck.errors import LinkError, PeerLost
from potluck.testing.world import run_all, run_world
from potluck.torch import DDP, DataParallel, ElasticLoop, Gossip

GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(80, 5, generator=GENERATOR, dtype=torch.float64)
Y = X @ torch.arange(1.0, 6.0, dtype=torch.float64)
START = nn.Linear(5, 1, bias=False).double()


class Training:
    """A linear regression on one rank; ``act(training)`` is called in each step."""

    def __init__(
        self, ctx: DistributedContext, strategy: Any, act: Callable[[Training], None]
    ) -> None:
        self.ctx, self.num_steps = ctx, 0
        self.model = DDP(copy.deepcopy(START), ctx)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.job = ElasticLoop(
            self.model, optimizer, (X, Y), batch_size=8, seed=2, strategy=strategy, epochs=3
        )
        for x, y in self.job:
            with self.job.step():
                act(self)
                optimizer.zero_grad()
                loss = ((self.model(x)[:, 0] - y) ** 2).mean()
                loss.backward()
                optimizer.step()
                self.num_steps += 1
        self.weight = next(self.model.parameters()).detach()[0].clone()
        self.loss = float(((X @ self.weight - Y) ** 2).mean())


def cut_world(world_size: int, *pairs: tuple[int, int]) -> list[InProcessBackend]:
    backends = InProcessBackend.world(world_size)
    for a, b in pairs:
        backends[0].hub.cut(str(a), str(b))
    return backends


@pytest.mark.parametrize("pairs", [[(0, 1)], [(1, 3)], [(0, 1), (2, 3)]])
def test_collectives_go_by_way_of_others(pairs: list[tuple[int, int]]) -> None:
    def work(ctx: DistributedContext) -> list[Any]:
        mine = np.arange(4.0) + ctx.rank
        found = [ctx.group.cut, ctx.all_reduce(mine.copy(), "sum"), ctx.all_gather(mine)]
        found.append(ctx.broadcast(mine.copy(), 1))
        found.append(ctx.reduce_scatter(np.arange(8.0).reshape(4, 2) * ctx.rank, "sum"))
        found.append(ctx.all_to_all(np.arange(4.0) + 10 * ctx.rank))
        ctx.barrier()
        assert ctx.commit(1)
        with pytest.raises(ValueError, match=r"algorithm='direct' needs a link between rank"):
            ctx.all_reduce(mine.copy(), algorithm="direct")
        with pytest.raises(ValueError, match=r"codec='int8' needs a link between rank"):
            ctx.all_reduce(mine.astype("f4"), codec="int8")
        return found

    for rank, found in enumerate(run_world(4, work, backends=cut_world(4, *pairs))):
        cut, total, gathered, sent, scattered, exchanged = found
        assert cut == tuple(pairs)
        np.testing.assert_array_equal(total, 4 * np.arange(4.0) + 6)
        np.testing.assert_array_equal(gathered, [np.arange(4.0) + r for r in range(4)])
        np.testing.assert_array_equal(sent, np.arange(4.0) + 1)
        np.testing.assert_array_equal(scattered, 6 * np.arange(8.0)[2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(exchanged, np.arange(4) * 10 + rank)


def test_what_needs_the_link_says_so_and_the_group_goes_on() -> None:
    def work(ctx: DistributedContext) -> float:
        with pytest.raises(ValueError, match=r"rank 1 to rank 0.*graph\.without"):
            ctx.neighbor_all_reduce(np.ones(3), graphs.ring(3))
        if ctx.rank < 2:
            with pytest.raises(LinkError, match="can't be reached from rank"):
                ctx.send(np.ones(3), 1 - ctx.rank)
            with pytest.raises(LinkError, match="the network between the two is cut"):
                ctx.recv(np.ones(3), 1 - ctx.rank)
        around = graphs.ring(3).without(ctx.group.cut)
        return float(ctx.neighbor_all_reduce(np.full(1, 3.0 * ctx.rank), around)[0])

    found = run_world(3, work, backends=cut_world(3, (0, 1)))
    np.testing.assert_allclose(found, [2 * 0 / 3 + 2, 2 + 2, 3])


def test_a_subgroup_without_a_way_of_its_own_is_refused() -> None:
    def work(ctx: DistributedContext) -> float:
        pair, trio = ctx.new_group([0, 1]), ctx.new_group([2, 1, 0])
        if ctx.rank < 2:
            with pytest.raises(ValueError, match="do not connect all 2 ranks"):
                pair.all_reduce(np.ones(1))
        if ctx.rank == 3:
            return 3.0
        return float(trio.all_reduce(np.full(1, 1.0), "sum")[0])

    assert run_world(4, work, backends=cut_world(4, (0, 1))) == [3.0] * 4


def test_links_that_do_not_connect_all_are_all_tried() -> None:
    def work(ctx: DistributedContext) -> None:
        assert ctx.group.cut == ()
        with pytest.raises(PeerLost):
            ctx.all_reduce(np.ones(1))

    run_world(3, work, backends=cut_world(3, (0, 1), (0, 2)))


@pytest.mark.parametrize("graph", ["exponential", "base", "ring"])
@pytest.mark.parametrize("when", [0, 3])
def test_gossip_goes_on_over_a_cut_link(graph: str, when: int) -> None:
    """The link of ranks 0 and 1 is cut before the first round, or in the fourth; all end with the
    same parameters, as good as those of an uncut training, and every sample counts once."""
    backends = InProcessBackend.world(4)

    def act(training: Training) -> None:
        if training.ctx.rank == 0 and training.num_steps == when:
            backends[0].hub.cut("0", "1")

    found = trained(backends, Gossip(graph), act)
    whole = trained(InProcessBackend.world(4), Gossip(graph), lambda training: None)
    for training in found:
        assert training.ctx.group.cut == ((0, 1),)
        assert training.job.committed == 3 * len(X)
        assert training.loss < 1.2 * whole[0].loss + 1e-3
    assert len({training.job.parameter_hash() for training in found}) == 1


def test_a_healed_link_is_used_again() -> None:
    backends = cut_world(3, (0, 2))
    seen: list[tuple[tuple[int, int], ...]] = []

    def act(training: Training) -> None:
        if training.ctx.rank == 0:
            seen.append(training.ctx.group.cut)
            if training.num_steps == 4:
                backends[0].hub.mend("0", "2")

    found = trained(backends, Gossip("ring"), act)
    assert seen[0] == ((0, 2),)
    assert seen[-1] == ()
    assert len({training.job.parameter_hash() for training in found}) == 1


def test_all_reduce_in_every_step_goes_on_as_well() -> None:
    backends = InProcessBackend.world(3)

    def act(training: Training) -> None:
        if training.ctx.rank == 1 and training.num_steps == 2:
            backends[0].hub.cut("1", "2")

    found = trained(backends, DataParallel(), act)
    whole = trained(InProcessBackend.world(3), DataParallel(), lambda training: None)
    for training in found:
        assert training.ctx.group.cut == ((1, 2),)
        torch.testing.assert_close(training.weight, whole[0].weight)


def trained(
    backends: list[InProcessBackend], strategy: Any, act: Callable[[Training], None]
) -> list[Training]:
    def run(backend: InProcessBackend) -> Training:
        with DistributedContext(backend, timeout_s=30) as ctx:
            return Training(ctx, strategy, act)

    return run_all([lambda b=backend: run(b) for backend in backends])
