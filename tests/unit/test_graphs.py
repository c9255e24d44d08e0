"""Communication graphs: their weights, and what averaging by them comes to."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from potluck import graphs
from potluck._core.collectives.direct import plans_for, verify_on
from potluck._core.collectives.plan import Action
from potluck._core.collectives.verify import VerificationError
from potluck.graphs import Graph
from potluck.training.strategies import Gossip

nx = pytest.importorskip("networkx", reason="graphs of networkx are taken; torch brings it")


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_base_graphs_reach_the_exact_mean_in_few_rounds(k: int) -> None:
    for num_nodes in range(1, 34):
        sequence = graphs.base(num_nodes, k)
        product = np.eye(num_nodes)
        for graph in sequence:
            matrix = graph.matrix()
            assert (matrix >= 0).all()
            assert (matrix == matrix.T).all()
            assert graph.is_doubly_stochastic
            assert max(len(graph.in_neighbors(rank)) for rank in range(num_nodes)) <= k
            product = matrix @ product
        np.testing.assert_allclose(product, 1 / num_nodes, rtol=0, atol=1e-13)
        assert len(sequence) <= 2 * math.log(num_nodes, k + 1) + 2


def test_the_base_two_graph_of_five_ranks_has_these_edges() -> None:
    sequence = graphs.base(5)
    pairs = [sorted({tuple(sorted(edge)) for edge in graph.edges}) for graph in sequence]
    assert pairs == [
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
        [(0, 4)],
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
    ]
    assert sequence[2].matrix()[0, 4] == pytest.approx(4 / 5)


def test_exponential_and_ring_are_doubly_stochastic() -> None:
    for num_nodes in range(1, 20):
        assert graphs.exponential(num_nodes).is_doubly_stochastic
        assert graphs.ring(num_nodes).is_doubly_stochastic
    assert graphs.exponential(8).out_neighbors(6) == (0, 2, 7)
    assert graphs.ring(4).in_neighbors(0) == (1, 3)
    assert graphs.ring(1).rows == (((0, 1.0),),)


def test_a_graph_without_weights_gets_those_that_keep_the_mean() -> None:
    regular = Graph.of(nx.DiGraph([(0, 1), (1, 2), (2, 0)]))
    assert regular.matrix()[1].tolist() == [0.5, 0.5, 0]
    star = Graph.of(nx.star_graph(3).to_directed())  # Metropolis-Hastings
    assert star.is_doubly_stochastic
    assert star.matrix()[1].tolist() == [0.25, 0.75, 0, 0]
    one_way = Graph.of(nx.DiGraph([(0, 1), (0, 2), (1, 2)]))
    assert one_way.matrix().sum(axis=1).tolist() == [1, 1, 1]
    assert not one_way.is_doubly_stochastic


def test_weights_of_edges_are_taken_as_they_are() -> None:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (1, 0, 0.5)])
    assert Graph.of(graph).matrix().tolist() == [[0.5, 0.5], [0.25, 0.75]]
    graph.add_weighted_edges_from([(0, 0, 0.5), (1, 1, 0.75)])
    assert Graph.of(graph).matrix().tolist() == [[0.5, 0.5], [0.25, 0.75]]
    assert Graph.of(nx.DiGraph([(0, 0), (0, 1), (1, 0)])).matrix().tolist() == [[0.5, 0.5]] * 2


def weighted(*edges: tuple[int, int, object]) -> Any:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(edges)
    return graph


@pytest.mark.parametrize(
    ("graph", "error", "text"),
    [
        (np.eye(3), TypeError, "pass a networkx"),
        (nx.path_graph(3), TypeError, "to_directed"),
        (nx.MultiDiGraph([(0, 1)]), TypeError, "not a DiGraph"),
        (nx.DiGraph(), ValueError, "no nodes"),
        (nx.DiGraph([(0, 1), (1, 3)]), ValueError, r"missing: \[2\], of no meaning: 3"),
        (nx.DiGraph([("a", "b")]), ValueError, "of no meaning: 'a', 'b'"),
        (weighted((0, 1, 0.5), (1, 0, -0.1)), ValueError, "from 1 to 0 has the weight -0.1"),
        (weighted((0, 1, math.nan), (1, 0, 0.1)), ValueError, "the weight nan"),
        (weighted((0, 1, "x"), (1, 0, 0.1)), ValueError, "the weight 'x'"),
        (weighted((0, 1, 1.5), (1, 0, 0.5)), ValueError, "leaves no weight for its own"),
        (weighted((0, 1, 0.5), (1, 1, 0.4)), ValueError, "with its self loop, have the sum 0.9"),
        (weighted((0, 1, 0.5), (1, 0, None)), ValueError, "1 of the graph's 2 edges"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(graph: object, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Graph.of(graph)


def test_sizes_that_make_no_sense_are_refused() -> None:
    for make in (graphs.ring, graphs.exponential, graphs.base):
        with pytest.raises(ValueError, match="at least 1 node"):
            make(0)
    with pytest.raises(ValueError, match="at least 1 neighbour"):
        graphs.base(4, 0)


def test_a_graph_without_a_cut_link_still_keeps_the_mean() -> None:
    graph = graphs.ring(4)
    cut = graph.without([(1, 0)])
    assert cut.in_neighbors(0) == (3,)
    assert cut.in_neighbors(1) == (2,)
    assert cut.is_doubly_stochastic
    assert cut.rows[0] == ((0, pytest.approx(2 / 3)), (3, 1 / 3))
    assert cut.without([(0, 1)]) == cut
    assert cut.digest != graph.digest


def test_directed_weights_are_made_symmetric_before_a_link_is_left_out() -> None:
    graph = graphs.exponential(6)
    assert not np.array_equal(graph.matrix(), graph.matrix().T)
    for pair in [(0, 1), (1, 3), (5, 0)]:
        cut = graph.without([pair])
        assert cut.is_doubly_stochastic
        assert np.array_equal(cut.matrix(), cut.matrix().T)
        assert not {pair, pair[::-1]} & set(cut.edges)
    assert graph.without([]) is graph
    assert graph.without([(0, 3)]) is graph, "it has no such edge"


def test_gossip_around_a_cut_link_keeps_the_mean_and_all_together() -> None:
    chain = nx.path_graph(4).to_directed()
    for graph in ("ring", "exponential", "base", chain):
        for pair in combinations(range(4), 2):
            made = Gossip(graph).graphs(4, (pair,))
            assert all(each.is_doubly_stochastic for each in made)
            assert all(not {pair, pair[::-1]} & set(each.edges) for each in made)
            mean = np.eye(4)
            for number in range(200):
                mean = made[number % len(made)].matrix() @ mean
            np.testing.assert_allclose(mean, 0.25, atol=1e-6)
    (whole,) = Gossip(chain).graphs(4, ((1, 2),))
    assert set(whole.edges) > {(0, 2), (0, 3), (1, 3)}, "all links that are left"


def test_plans_are_proved_and_a_step_without_an_edge_is_found() -> None:
    plans = plans_for(graphs.exponential(5))
    sent = {(p.rank, peer) for p in plans for action, peer, _ in p.steps if action is Action.SEND}
    assert sent == set(graphs.exponential(5).edges)
    with pytest.raises(VerificationError, match="without an edge"):
        verify_on(graphs.ring(5), plans)
    with pytest.raises(VerificationError, match="ends with garbage in chunk 3"):
        verify_on(graphs.exponential(5), plans_for(graphs.ring(5)))
