"""Direct: pairwise exchange, every rank with every other; rank ``r`` owns chunk ``r``.

One hop for reduce_scatter, all_gather and all_to_all, two for all_reduce, whatever the world size:
the plan for lossy codecs (two quantizations only). Peers are taken in the order right neighbour,
the next one, and so on, so that no two ranks send to the same rank at the same moment (pairwise
exchange: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005). Owners combine in the order of their *left* neighbours, the order of arrival.

So do the plans of a neighbour all_gather (``MPI_Neighbor_allgather``), by which each rank ends with
the chunks of its in-neighbours in a graph.
"""

from __future__ import annotations

from functools import lru_cache

from potluck._core.collectives import centralized
from potluck._core.collectives.plan import (
    Action,
    Algorithm,
    Draft,
    Operation,
    Plan,
    Rank,
    Step,
    copy,
    reduce_from,
    send,
)
from potluck._core.collectives.verify import VerificationError, verify
from potluck.graphs import Graph


def reduce_scatter(me: Rank) -> Draft:
    """Every rank sends each owner its chunk; the owner combines."""
    steps: list[Step] = []
    for i in range(1, me.world_size):
        steps.append(send(me.right(i), me.right(i)))
        steps.append(reduce_from(me.left(i), me.rank))
    return Draft(me.world_size, steps)


def all_gather(me: Rank) -> Draft:
    """Every owner sends its chunk to all."""
    steps: list[Step] = []
    for i in range(1, me.world_size):
        steps.append(send(me.right(i), me.rank))
        steps.append(copy(me.left(i), me.left(i)))
    return Draft(me.world_size, steps)


def all_reduce(me: Rank) -> Draft:
    """reduce_scatter, then all_gather: two hops."""
    return Draft(me.world_size, reduce_scatter(me).steps + all_gather(me).steps)


def broadcast(me: Rank) -> Draft:
    """The root scatters, then every owner sends its chunk to all but the root, which has it."""
    w, rank, root = me.world_size, me.rank, me.root
    steps = centralized.scatter(me).steps
    for i in range(1, w):
        if me.right(i) != root:
            steps.append(send(me.right(i), rank))
        if rank != root:
            steps.append(copy(me.left(i), me.left(i)))
    return Draft(w, steps)


def reduce(me: Rank) -> Draft:
    """reduce_scatter, then every owner sends its chunk to the root."""
    steps = reduce_scatter(me).steps + centralized.gather(me).steps
    return Draft(me.world_size, steps)


def all_to_all(me: Rank) -> Draft:
    """Every pair exchanges its two chunks."""
    w, rank = me.world_size, me.rank
    steps: list[Step] = []
    for i in range(1, w):
        steps.append(send(me.right(i), rank * w + me.right(i)))
        steps.append(copy(me.left(i), me.left(i) * w + rank))
    return Draft(w * w, steps)


scatter, gather = centralized.scatter, centralized.gather


def barrier(me: Rank) -> Draft:
    """An empty all_gather: one hop, and a rank that has heard all others goes on."""
    return all_gather(me)


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
