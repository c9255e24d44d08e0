"""Communication graphs: which ranks average with which, and with what weights.

An edge from ``j`` to ``i`` says that rank ``i`` receives from rank ``j``. The weights are a *mixing
matrix* ``W``: rank ``i`` ends with the sum of ``W[i, j]`` times rank ``j``'s array, and its rows
have the sum 1. If the columns have it too (``W`` is *doubly stochastic*), the mean over all ranks
stays as it is, and repeated averaging over a connected graph brings all ranks to that mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TOLERANCE = 1e-9
"""How far from 1 the sum of a row may be."""

_Edge = tuple[int, int]


@dataclass(frozen=True)
class Graph:
    """An immutable weighted graph over the ranks 0 to ``num_nodes - 1``.

    ``rows[i]`` has the pairs ``(j, W[i, j])`` with a weight above 0, by rising ``j``, with ``i``
    itself. Make one by [Graph.of][potluck.graphs.Graph.of] or by this module's functions.
    """

    rows: tuple[tuple[tuple[int, float], ...], ...]

    @classmethod
    def of(cls, graph: Any) -> Graph:
        """A Graph of a ``networkx.DiGraph``, or of an object with its ``nodes`` and ``edges``.

        The nodes are the ranks, 0 to n - 1. Edges have the attribute ``weight`` either all or not
        at all. The weight of a self loop is the rank's own; without one it is what the others leave
        of 1. Without weights:

        - if all ranks have ``d`` in- and out-neighbours each, all weights are ``1 / (d + 1)``;
        - else, if each edge has its reverse, ``1 / (1 + the larger degree of the two ranks)``
          (Metropolis-Hastings weights);
        - else ``1 / (in-degree + 1)`` in each row; the columns then have other sums than 1, so that
          the mean over the ranks changes.

        The first two are doubly stochastic. TypeError for other objects, undirected graphs and
        multigraphs. ValueError for other nodes, weights that are negative or not finite, and rows
        whose sum is not 1.
        """
        if isinstance(graph, Graph):
            return graph
        if not hasattr(graph, "nodes") or not hasattr(graph, "edges"):
            raise TypeError(
                f"graph is a {type(graph).__name__}: pass a networkx.DiGraph whose nodes are the "
                "ranks, or a graph of potluck.graphs, such as exponential(world_size)"
            )
        if not graph.is_directed() or graph.is_multigraph():
            raise TypeError(
                f"graph is a {type(graph).__name__}, not a DiGraph: edges have one direction and "
                "one weight each; of an undirected graph pass graph.to_directed()"
            )
        num_nodes = len(graph.nodes)
        _check_nodes(set(graph.nodes), num_nodes)
        edges = {(int(j), int(i)): data.get("weight") for j, i, data in graph.edges(data=True)}
        given = [weight for weight in edges.values() if weight is not None]
        if given and len(given) < len(edges):
            raise ValueError(
                f"{len(given)} of the graph's {len(edges)} edges have a weight: give one to all "
                "of them, or to none"
            )
        if given:
            return _weighted(num_nodes, edges)
        return _unweighted(num_nodes, {edge for edge in edges if edge[0] != edge[1]})

    @property
    def num_nodes(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def edges(self) -> Iterator[_Edge]:
        """The pairs (sender, receiver), without self loops."""
        return ((j, i) for i, row in enumerate(self.rows) for j, _ in row if j != i)

    def in_neighbors(self, rank: int) -> tuple[int, ...]:
        """The ranks from which ``rank`` receives."""
        return tuple(j for j, _ in self.rows[rank] if j != rank)

    def out_neighbors(self, rank: int) -> tuple[int, ...]:
        """The ranks to which ``rank`` sends."""
        return tuple(i for j, i in self.edges if j == rank)

    def matrix(self) -> NDArray[np.float64]:
        """The mixing matrix."""
        matrix = np.zeros((self.num_nodes, self.num_nodes))
        for i, row in enumerate(self.rows):
            for j, weight in row:
                matrix[i, j] = weight
        return matrix

    @cached_property
    def is_doubly_stochastic(self) -> bool:
        """Whether averaging by this graph keeps the mean over all ranks."""
        return bool(np.allclose(self.matrix().sum(axis=0), 1, rtol=0, atol=_TOLERANCE))

    @cached_property
    def digest(self) -> int:
        """A hash of edges and weights, of 63 bits."""
        hashed = blake2b(repr(self.rows).encode(), digest_size=8).digest()
        return int.from_bytes(hashed, "little") >> 1

    def without(self, pairs: Iterable[_Edge]) -> Graph:
        """This graph without the edges between the two ranks of each pair, in both directions.

        Each rank adds the weight of an edge that it loses to its own, so that rows have the sum 1,
        and a symmetric matrix stays doubly stochastic. A doubly stochastic matrix that is not
        symmetric is first replaced by its mean with its transpose, so that the mean over all ranks
        stays as it is; edges then have both directions.
        """
        cut = {edge for a, b in pairs for edge in ((a, b), (b, a))} & set(self.edges)
        if not cut:
            return self
        matrix = self.matrix()
        if self.is_doubly_stochastic:
            matrix = (matrix + matrix.T) / 2
        for j, i in {edge for a, b in cut for edge in ((a, b), (b, a))}:
            matrix[i, i] += matrix[i, j]
            matrix[i, j] = 0
        return _of_matrix(matrix)


def ring(num_nodes: int) -> Graph:
    """Each rank averages with its two neighbours on a circle, with weights of 1/3."""
    _check_size(num_nodes)
    steps = {1 % num_nodes, -1 % num_nodes} - {0}
    return _circulant(num_nodes, steps)


def complete(num_nodes: int) -> Graph:
    """Each rank averages with all others, with equal weights: one call gives the mean."""
    _check_size(num_nodes)
    return _circulant(num_nodes, set(range(1, num_nodes)))


def exponential(num_nodes: int) -> Graph:
    """The exponential graph: rank ``i`` sends to ``i + 1, i + 2, i + 4, ...`` on a circle.

    All weights are equal. Each rank has about ``log2(num_nodes)`` neighbours, and the distance
    from the mean shrinks with every call by a factor that falls only with that logarithm. (Ying et
    al., "Exponential Graph is Provably Efficient for Decentralized Deep Training", 2021.)
    """
    _check_size(num_nodes)
    return _circulant(num_nodes, {1 << k for k in range((num_nodes - 1).bit_length())})


def base(num_nodes: int, k: int = 1) -> tuple[Graph, ...]:
    """The Base-(k+1) graph: a sequence of graphs after which all ranks hold the exact mean.

    Average by one after the other, and begin again at the first. In each of them a rank has at most
    ``k`` neighbours; their number is at most ``2 log(num_nodes, base k+1) + 2``. Edges have both
    directions, and equal weights in both. (Takezawa et al., "Beyond Exponential Graph:
    Communication-Efficient Topologies for Decentralized Learning via Finite-time Convergence",
    2023, algorithms 1 to 3.)

    ValueError for ``k`` below 1.
    """
    _check_size(num_nodes)
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}: a rank has at least 1 neighbour")
    ranks = range(num_nodes)
    rounds = min(
        _simple_base(list(ranks), k), _base(list(ranks), k), key=len
    )  # the simple graph if both are as long
    return tuple(_of_edges(num_nodes, weights) for weights in rounds) or (_of_edges(1, {}),)


# -- Base-(k+1): each round maps undirected edges to weights

_Round = dict[frozenset[int], float]


def _base(ranks: list[int], k: int) -> list[_Round]:
    """Algorithm 3: groups of ``q`` ranks reach their mean, then one rank of each group with the
    ranks at the same place of the others; ``len(ranks) = p * q``, where factors in ``p`` are at
    most k + 1."""
    p, q = _smooth_part(len(ranks), k)
    groups = [ranks[number * q : (number + 1) * q] for number in range(p)]
    within = _together([_simple_base(group, k) for group in groups])
    across = _together([_hyper_hypercube(list(each), k) for each in zip(*groups, strict=True)])
    return within + across


def _hyper_hypercube(ranks: list[int], k: int) -> list[_Round]:
    """Algorithm 1: ranks as numbers of several digits; in each round the ranks that differ in one
    digit alone average. All prime factors of ``len(ranks)`` are at most k + 1."""
    rounds: list[_Round] = []
    stride = 1
    for size in _digits(len(ranks), k):
        weights: _Round = {}
        for a, rank in enumerate(ranks):
            digit = a // stride % size
            for other in range(digit + 1, size):
                peer = ranks[a + (other - digit) * stride]
                weights[frozenset((rank, peer))] = 1 / size
        rounds.append(weights)
        stride *= size
    return rounds


def _simple_base(ranks: list[int], k: int) -> list[_Round]:
    """Algorithm 2. The number of ranks in base k+1 says how they are divided: a digit ``a`` at
    place ``p`` is a *part* of ``a`` cells with ``(k+1) ** p`` ranks each."""
    if _smooth_part(len(ranks), k)[1] == 1:
        return _hyper_hypercube(ranks, k)
    parts = _parts(ranks, k)
    # 1. Every part comes to its own mean.
    rounds = _together([_hyper_hypercube([*chain(*cells)], k) for cells in parts])
    # 2. One part after the other gives its mean to all ranks of the later parts, each of which
    # exchanges with one rank of each cell. The later ranks then hold the mean of both, and a cell
    # has that mean, too, over its ranks: 3. it comes to it while the later parts go on.
    tails: list[list[_Round]] = []
    for number, cells in enumerate(parts[:-1]):
        later = [rank for part in parts[number + 1 :] for cell in part for rank in cell]
        size = sum(map(len, cells))
        weight = size / (size + len(later)) / len(cells)
        exchange = {
            frozenset((cell[place], rank)): weight
            for place, rank in enumerate(later)
            for cell in cells
        }
        after = _together([_hyper_hypercube(cell, k) for cell in cells])
        tails.append([*({} for _ in range(number)), exchange, *after])
    return rounds + _together(tails)


def _parts(ranks: list[int], k: int) -> list[list[list[int]]]:
    """The cells of each part, the largest first."""
    parts: list[list[list[int]]] = []
    cell, begin = 1, 0
    while cell * (k + 1) <= len(ranks):
        cell *= k + 1
    while begin < len(ranks):
        digit = (len(ranks) - begin) // cell
        if digit:
            ends = range(begin, begin + digit * cell, cell)
            parts.append([ranks[start : start + cell] for start in ends])
            begin += digit * cell
        cell //= k + 1
    return parts


def _together(sequences: list[list[_Round]]) -> list[_Round]:
    """Sequences of rounds side by side, as one; no rank has edges of two of them in a round."""
    length = max(map(len, sequences), default=0)
    merged: list[_Round] = [{} for _ in range(length)]
    for sequence in sequences:
        for into, weights in zip(merged, sequence, strict=False):
            into |= weights
    return merged


def _digits(number: int, k: int) -> list[int]:
    """The fewest factors of ``number`` of which none is above k + 1."""
    best: dict[int, list[int]] = {1: []}
    divisors = [each for each in range(2, number + 1) if number % each == 0]
    for each in divisors:
        found = [
            [*best[each // factor], factor]
            for factor in range(2, min(k + 1, each) + 1)
            if each % factor == 0 and each // factor in best
        ]
        if found:
            best[each] = min(found, key=len)
    return best[number]


def _smooth_part(number: int, k: int) -> tuple[int, int]:
    """``(p, q)`` with ``number = p * q``: ``p`` has the prime factors up to k + 1, ``q`` the
    others."""
    p, q = 1, number
    for factor in range(2, k + 2):
        while q % factor == 0:
            p, q = p * factor, q // factor
    return p, q


# -- from edges to rows


def _of_edges(num_nodes: int, weights: _Round) -> Graph:
    matrix = np.zeros((num_nodes, num_nodes))
    for pair, weight in weights.items():
        a, b = pair
        matrix[a, b] = matrix[b, a] = weight
    return _of_matrix(_with_own(matrix))


def _with_own(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The matrix whose diagonal is what the others leave of 1."""
    own = 1 - matrix.sum(axis=1)
    own[np.abs(own) < _TOLERANCE] = 0
    return matrix + np.diag(own)


def _of_matrix(matrix: NDArray[np.float64]) -> Graph:
    return Graph(
        tuple(
            tuple((j, float(row[j])) for j in range(len(row)) if j == i or row[j])
            for i, row in enumerate(matrix)
        )
    )


def _circulant(num_nodes: int, steps: set[int]) -> Graph:
    edges = {(j, (j + step) % num_nodes) for j in range(num_nodes) for step in steps}
    return _unweighted(num_nodes, edges)


def _unweighted(num_nodes: int, edges: set[_Edge]) -> Graph:
    into, out_of = [0] * num_nodes, [0] * num_nodes
    for j, i in edges:
        into[i], out_of[j] = into[i] + 1, out_of[j] + 1
    is_regular = len({*into, *out_of}) == 1
    is_symmetric = all((i, j) in edges for j, i in edges)
    matrix = np.zeros((num_nodes, num_nodes))
    for j, i in edges:
        metropolis = is_symmetric and not is_regular
        matrix[i, j] = 1 / (1 + (max(into[i], into[j]) if metropolis else into[i]))
    return _of_matrix(_with_own(matrix))


def _weighted(num_nodes: int, edges: dict[_Edge, Any]) -> Graph:
    matrix = np.zeros((num_nodes, num_nodes))
    for (j, i), weight in edges.items():
        if not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise ValueError(
                f"the edge from {j} to {i} has the weight {weight!r}; it must be at least 0, finite"
            )
        matrix[i, j] = weight
    for i, row in enumerate(matrix):
        total = float(row.sum())
        if (i, i) in edges and abs(total - 1) > _TOLERANCE:
            raise ValueError(
                f"the weights of rank {i}'s edges, with its self loop, have the sum {total}; it "
                "must be 1"
            )
        if total > 1 + _TOLERANCE:
            raise ValueError(
                f"the weights of the edges to rank {i} have the sum {total}, which leaves no "
                "weight for its own array; it may be at most 1"
            )
        if (i, i) not in edges:
            row[i] = max(0.0, 1 - total)
    return _of_matrix(matrix)


def _check_nodes(nodes: set[Any], num_nodes: int) -> None:
    if nodes != set(range(num_nodes)):
        missing = sorted(set(range(num_nodes)) - nodes)
        others = sorted(map(repr, nodes - set(range(num_nodes))))
        raise ValueError(
            f"the {num_nodes} nodes of a graph are the ranks 0 to {num_nodes - 1}; missing: "
            f"{missing}, of no meaning: {', '.join(others)}"
        )
    if not num_nodes:
        raise ValueError("the graph has no nodes; its nodes are the ranks")


def _check_size(num_nodes: int) -> None:
    if not isinstance(num_nodes, int) or num_nodes < 1:
        raise ValueError(f"num_nodes is {num_nodes!r}; a graph has at least 1 node")
