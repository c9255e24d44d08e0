"""Gossip: averaging with the neighbours in a graph only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck import graphs
from potluck._core.collectives.spanning_tree import Cut
from potluck.graphs import Graph
from potluck.training.strategies.kinds import Rounds

_NAMED: dict[str, Callable[[int], Any]] = {
    "base": graphs.base,
    "exponential": graphs.exponential,
    "ring": graphs.ring,
}


@dataclass(frozen=True, slots=True)
class Gossip(Rounds):
    """Each rank keeps parameters of its own, and averages them with those of its neighbours.

    (Decentralized parallel SGD: Lian et al., "Can Decentralized Algorithms Outperform Centralized
    Algorithms?", NeurIPS 2017; here a rank averages after its steps.) After every ``every`` steps
    a rank's parameters become the weighted mean of its own and its neighbours', as
    [neighbor_all_reduce][potluck.DistributedContext.neighbor_all_reduce] computes it. Before a
    checkpoint and at the end all ranks take the mean over all of them.

    ``graph`` is ``"exponential"``, ``"base"`` (the Base-2 graphs, one after the other) or
    ``"ring"``; a ``networkx.DiGraph`` or a sequence of them, of which each round takes the next; or
    a function of the world size that returns one of these. In a world of another size than that of
    a DiGraph the exponential graph takes its place. Edges between ranks that can't reach each
    other are left out, and their weight goes to the ranks themselves.

    Cost of a round: each rank sends its parameters to each of its out-neighbours. Votes and
    reports, of some hundred bytes, are those of all strategies, between all ranks. ``deadline``
    ends a slow rank's steps as in [DiLoCo][potluck.torch.DiLoCo].

    ValueError for other words, and for graphs that change the mean (their mixing matrix is not
    doubly stochastic) or fall into parts.
    """

    graph: Any = "exponential"
    neighbors_only = True

    def __post_init__(self) -> None:
        Rounds.__post_init__(self)
        if isinstance(self.graph, str):
            if self.graph not in _NAMED:
                raise ValueError(
                    f"graph is {self.graph!r}; the graphs with a name are {', '.join(_NAMED)}"
                )
        elif not callable(self.graph):
            made = _sequence(self.graph)
            _check(made, made[0].num_nodes)

    def graphs(self, world_size: int, cut: Cut = ()) -> tuple[Graph, ...]:
        """The graphs of the rounds in a world of this size, in turn.

        They have no edge between the pairs of ranks in ``cut``, which can't reach each other. Where
        they would fall into parts without these edges, the graph of all other links takes their
        place, unless that falls into parts, too.
        """
        made = self._uncut(world_size)
        left = tuple(graph.without(cut) for graph in made)
        if not cut or _is_connected(left, world_size):
            return left
        return (graphs.complete(world_size).without(cut),)

    def _uncut(self, world_size: int) -> tuple[Graph, ...]:
        if isinstance(self.graph, str):
            return _sequence(_NAMED[self.graph](world_size))
        if callable(self.graph):
            made = _sequence(self.graph(world_size))
            _check(made, world_size)
            return made
        made = _sequence(self.graph)
        fits = made[0].num_nodes == world_size
        return made if fits else (graphs.exponential(world_size),)


def _sequence(graph: Any) -> tuple[Graph, ...]:
    several = isinstance(graph, Sequence)
    made = tuple(map(Graph.of, graph)) if several else (Graph.of(graph),)
    if not made:
        raise ValueError("graph is an empty sequence; it must have at least one graph")
    return made


def _check(made: tuple[Graph, ...], world_size: int) -> None:
    """ValueError unless the mean stays as it is, and every rank's array comes to all others."""
    for graph in made:
        if graph.num_nodes != world_size:
            raise ValueError(
                f"a graph has {graph.num_nodes} nodes, and {world_size} are wanted: its nodes are "
                "the ranks"
            )
        if not graph.is_doubly_stochastic:
            raise ValueError(
                "the columns of the graph's mixing matrix have other sums than 1, so that the mean "
                "of the parameters would drift: pass weights whose rows and columns have the sum 1"
            )
    if not _is_connected(made, world_size):
        raise ValueError(
            "the graph falls into parts: what some ranks learn would never come to the others"
        )


def _is_connected(made: tuple[Graph, ...], world_size: int) -> bool:
    """Whether every rank's array comes to all others."""
    reached = np.eye(world_size, dtype=bool)
    for graph in made:
        reached |= graph.matrix() > 0
    for _ in range(world_size.bit_length()):
        reached = reached @ reached
    return bool(reached.all())
