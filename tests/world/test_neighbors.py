"""Averages of neighbours: what travels, and what happens to ranks that disagree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from potluck import graphs
from potluck._core.context import DistributedContext
from potluck.errors import Desync, OperationTimeout
from potluck.testing import WorldError
from support.worlds import open_world


@pytest.mark.parametrize("kind", ["inproc", "tls"])
def test_only_neighbours_have_links_and_exchange_bytes(kind: str) -> None:
    graph = graphs.ring(5)

    def check(ctx: DistributedContext) -> set[str]:
        x = np.full(1000, float(ctx.rank))
        for _ in range(3):
            ctx.neighbor_all_reduce(x, graph)
        links = ctx.stats()["links"].items()
        return {peer for peer, link in links if link["bytes_sent"] or link["bytes_received"]}

    with open_world(kind, 5) as world:
        for rank, peers in enumerate(world.run(check)):
            assert peers == {f"worker {peer}" for peer in graph.in_neighbors(rank)}


def test_tensors_of_torch_are_averaged_in_place() -> None:
    def check(ctx: DistributedContext) -> None:
        x = torch.full((3, 4), float(ctx.rank), dtype=torch.float64, requires_grad=True)
        assert ctx.neighbor_all_reduce(x, graphs.ring(3)) is x
        assert x.tolist() == [[1.0] * 4] * 3
        half = torch.full((4,), float(ctx.rank), dtype=torch.bfloat16)
        assert ctx.neighbor_all_reduce(half, graphs.ring(3)).tolist() == [1.0] * 4

    with open_world("tls", 3) as world:
        world.run(check)


@pytest.mark.parametrize("kind", ["inproc", "tls"])
def test_a_rank_may_be_calls_ahead_of_ranks_that_are_not_its_neighbours(kind: str) -> None:
    """Rank 1 is late: rank 2 hears from rank 3 of later calls than from rank 1."""
    edges = {(3, 2), (1, 2), (0, 1)}
    matrix = np.eye(4)
    for j, i in edges:
        matrix[i, j] = 0.25
        matrix[i, i] -= 0.25
    graph = graphs.Graph(
        tuple(tuple((j, w) for j, w in enumerate(row) if w) for row in matrix.tolist())
    )

    def check(ctx: DistributedContext) -> list[float]:
        if ctx.rank == 1:
            ctx.recv(np.zeros(1), 3)  # rank 3 has made all its calls
        x = np.full(1, float(2**ctx.rank))
        works = [ctx.neighbor_all_reduce(x, graph)[0] for _ in range(3)]
        if ctx.rank == 3:
            ctx.send(np.zeros(1), 1)
        return [float(value) for value in works]

    with open_world(kind, 4) as world:
        got = np.array(world.run(check))
    state = 2.0 ** np.arange(4)
    for call in range(3):
        state = matrix @ state
        np.testing.assert_allclose(got[:, call], state, rtol=1e-15)


@pytest.mark.parametrize("kind", ["inproc", "tls"])
@pytest.mark.parametrize("differ", ["graph", "dtype", "size"])
def test_ranks_that_disagree_learn_it_all(kind: str, differ: str) -> None:
    def check(ctx: DistributedContext) -> None:
        odd = ctx.rank == 2
        graph = graphs.exponential(5) if odd and differ == "graph" else graphs.ring(5)
        dtype = np.float32 if odd and differ == "dtype" else np.float64
        size = 3 if odd and differ == "size" else 4
        with pytest.raises(Desync):
            ctx.neighbor_all_reduce(np.zeros(size, dtype), graph)
            ctx.barrier()
        with pytest.raises(Desync, match="neighbor_all_reduce") as caught:
            ctx.barrier()
        assert "all ranks must pass the same graph" in str(caught.value)

    with open_world(kind, 5) as world:
        world.run(check)


def test_a_neighbour_that_never_calls_is_named_after_the_timeout() -> None:
    def check(ctx: DistributedContext) -> None:
        if ctx.rank:
            ctx.neighbor_all_reduce(np.zeros(4), graphs.ring(2), timeout=0.5)

    with open_world("tls", 2) as world, pytest.raises(WorldError) as caught:
        world.run(check)
    assert isinstance(caught.value.errors[1], OperationTimeout)


def test_sub_groups_have_graphs_of_their_own() -> None:
    def check(ctx: DistributedContext) -> None:
        group = ctx.new_group([3, 1])
        x = np.full(2, float(ctx.rank))
        work = ctx.neighbor_all_reduce(x, graphs.base(4, 3)[0], async_op=True)
        if group is not None:
            y = np.full(2, float(ctx.rank))
            assert group.neighbor_all_reduce(y, graphs.ring(2)).tolist() == [2.0] * 2
        assert work.wait().tolist() == [1.5] * 2

    with open_world("tls", 4) as world:
        world.run(check)
