"""Direct: pairwise exchange, every rank with every other; rank ``r`` owns chunk ``r``.

One hop for reduce_scatter, all_gather and all_to_all, two for all_reduce, whatever the world size:
the plan for lossy codecs (two quantizations only). Peers are taken in the order right neighbour,
the next one, and so on, so that no two ranks send to the same rank at the same moment (pairwise
exchange: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005). Owners combine in the order of their *left* neighbours, the order of arrival.
"""

from __future__ import annotations

from potluck.collectives import centralized
from potluck.collectives.plan import Operation, Step
from potluck.collectives.seat import Builder, Draft, Seat, copy, reduce_from, send


def reduce_scatter(seat: Seat) -> Draft:
    """Every rank sends each owner its chunk; the owner combines."""
    steps: list[Step] = []
    for i in range(1, seat.world_size):
        steps.append(send(seat.right(i), seat.right(i)))
        steps.append(reduce_from(seat.left(i), seat.rank))
    return Draft(seat.world_size, steps)


def all_gather(seat: Seat) -> Draft:
    """Every owner sends its chunk to all."""
    steps: list[Step] = []
    for i in range(1, seat.world_size):
        steps.append(send(seat.right(i), seat.rank))
        steps.append(copy(seat.left(i), seat.left(i)))
    return Draft(seat.world_size, steps)


def all_reduce(seat: Seat) -> Draft:
    """reduce_scatter, then all_gather: two hops."""
    return Draft(seat.world_size, reduce_scatter(seat).steps + all_gather(seat).steps)


def broadcast(seat: Seat) -> Draft:
    """The root scatters, then every owner sends its chunk to all but the root, which has it."""
    w, rank, root = seat.world_size, seat.rank, seat.root
    steps = centralized.scatter(seat).steps
    for i in range(1, w):
        if seat.right(i) != root:
            steps.append(send(seat.right(i), rank))
        if rank != root:
            steps.append(copy(seat.left(i), seat.left(i)))
    return Draft(w, steps)


def reduce(seat: Seat) -> Draft:
    """reduce_scatter, then every owner sends its chunk to the root."""
    steps = reduce_scatter(seat).steps + centralized.gather(seat).steps
    return Draft(seat.world_size, steps)


def all_to_all(seat: Seat) -> Draft:
    """Every pair exchanges its two chunks."""
    w, rank = seat.world_size, seat.rank
    steps: list[Step] = []
    for i in range(1, w):
        steps.append(send(seat.right(i), rank * w + seat.right(i)))
        steps.append(copy(seat.left(i), seat.left(i) * w + rank))
    return Draft(w * w, steps)


def barrier(seat: Seat) -> Draft:
    """An empty all_gather: one hop, and a rank that has heard all others goes on."""
    return all_gather(seat)


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
