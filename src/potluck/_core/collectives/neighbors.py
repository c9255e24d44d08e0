"""The plans of a neighbour all_gather: each rank ends with the chunks of its in-neighbours.

Chunk ``r`` is what rank ``r`` contributes, as in an all_gather. (MPI calls the operation
``MPI_Neighbor_allgather``.)
"""

from __future__ import annotations

from functools import lru_cache

from potluck._core.collectives.builder import copy, send
from potluck._core.collectives.plan import Action, Algorithm, Operation, Plan
from potluck._core.collectives.verify import VerificationError, verify
from potluck.graphs import Graph


@lru_cache(maxsize=1024)
def plans_for(graph: Graph) -> tuple[Plan, ...]:
    """The verified plans of all ranks. Cost of the first call: linear in the number of edges."""
    plans = tuple(_plan(graph, rank) for rank in range(graph.num_nodes))
    verify_on(graph, plans)
    return plans


def verify_on(graph: Graph, plans: tuple[Plan, ...]) -> None:
    """Prove that ``plans`` bring each rank the chunks of its in-neighbours, by edges alone.

    VerificationError as ``verify``, and for a step between ranks without an edge.
    """
    edges = set(graph.edges)
    for plan in plans:
        for action, peer, _ in plan.steps:
            edge = (plan.rank, peer) if action is Action.SEND else (peer, plan.rank)
            if edge not in edges:
                raise VerificationError(f"rank {edge[0]} sends to rank {edge[1]} without an edge")
    wanted = [[rank, *graph.in_neighbors(rank)] for rank in range(graph.num_nodes)]
    verify(plans, outputs=wanted)


def _plan(graph: Graph, rank: int) -> Plan:
    world = graph.num_nodes

    def distance(peer: int) -> int:  # no two ranks begin with the same peer
        return (peer - rank) % world

    steps = [send(peer, rank) for peer in sorted(graph.out_neighbors(rank), key=distance)]
    steps += [copy(peer, peer) for peer in sorted(graph.in_neighbors(rank), key=distance)]
    return Plan(Operation.ALL_GATHER, Algorithm.DIRECT, world, rank, world, tuple(steps))
