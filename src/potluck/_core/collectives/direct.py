"""Direct: pairwise exchange, every rank with every other; rank ``r`` owns chunk ``r``.

One hop for reduce_scatter, all_gather and all_to_all, two for all_reduce, whatever the world size:
the plan for lossy codecs (two quantizations only). Peers are taken in the order right neighbour,
the next one, and so on, so that no two ranks send to the same rank at the same moment (pairwise
exchange: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005). Owners combine in the order of their *left* neighbours, the order of arrival.
"""

from __future__ import annotations

from potluck._core.collectives import centralized
from potluck._core.collectives.builder import Builder, Draft, Rank, copy, reduce_from, send
from potluck._core.collectives.plan import Operation, Step


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


def barrier(me: Rank) -> Draft:
    """An empty all_gather: one hop, and a rank that has heard all others goes on."""
    return all_gather(me)


BUILDERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
    Operation.BROADCAST: broadcast,
    Operation.REDUCE: reduce,
    Operation.SCATTER: centralized.scatter,
    Operation.GATHER: centralized.gather,
    Operation.ALL_TO_ALL: all_to_all,
    Operation.BARRIER: barrier,
}
