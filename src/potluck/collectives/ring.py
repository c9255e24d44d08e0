"""Ring: every rank talks to its two neighbours only, to the right.

all_reduce is a reduce_scatter followed by an all_gather; each rank moves ``2 (w-1)/w`` of the
buffer, the least any algorithm can (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009). Rooted operations run along the chain that the ring becomes
when it is cut beside the root; the engine's segments pipeline it.
"""

from __future__ import annotations

from potluck.collectives.plan import Operation, Step
from potluck.collectives.seat import Builder, Draft, Seat, copy, reduce_from, send


def reduce_scatter(seat: Seat) -> Draft:
    """``w-1`` rounds; chunk ``c`` starts right of rank ``c`` and comes home fully reduced."""
    w, rank, right, left = seat.world_size, seat.rank, seat.right(), seat.left()
    steps: list[Step] = []
    for i in range(w - 1):
        steps.append(send(right, (rank - 1 - i) % w))
        steps.append(reduce_from(left, (rank - 2 - i) % w))
    return Draft(w, steps)


def all_gather(seat: Seat) -> Draft:
    """``w-1`` rounds; every chunk travels once around, starting at its owner."""
    w, rank, right, left = seat.world_size, seat.rank, seat.right(), seat.left()
    steps: list[Step] = []
    for i in range(w - 1):
        steps.append(send(right, (rank - i) % w))
        steps.append(copy(left, (rank - 1 - i) % w))
    return Draft(w, steps)


def all_reduce(seat: Seat) -> Draft:
    """``2 (w-1)`` rounds of one ``w``-th of the buffer each; rank ``c`` owns chunk ``c``."""
    w = seat.world_size
    return Draft(w, reduce_scatter(seat).steps + all_gather(seat).steps)


def broadcast(seat: Seat) -> Draft:
    """A pipelined chain: root, its right neighbour, and so on."""
    steps: list[Step] = []
    if seat.position > 0:
        steps.append(copy(seat.left(), 0))
    if seat.position < seat.world_size - 1:
        steps.append(send(seat.right(), 0))
    return Draft(1, steps)


def reduce(seat: Seat) -> Draft:
    """The broadcast chain backwards: the far end starts, the root finishes."""
    steps: list[Step] = []
    if seat.position < seat.world_size - 1:
        steps.append(reduce_from(seat.right(), 0))
    if seat.position > 0:
        steps.append(send(seat.left(), 0))
    return Draft(1, steps)


def scatter(seat: Seat) -> Draft:
    """Chunks walk down the chain, the one with the longest way first."""
    w, position = seat.world_size, seat.position
    steps: list[Step] = []
    for far in range(w - 1, position, -1):
        if position > 0:
            steps.append(copy(seat.left(), seat.rank_at(far)))
        steps.append(send(seat.right(), seat.rank_at(far)))
    if position > 0:
        steps.append(copy(seat.left(), seat.rank))
    return Draft(w, steps)


def gather(seat: Seat) -> Draft:
    """Chunks walk up the chain, the nearest first."""
    w, position = seat.world_size, seat.position
    steps: list[Step] = []
    if position > 0:
        steps.append(send(seat.left(), seat.rank))
    for far in range(position + 1, w):
        steps.append(copy(seat.right(), seat.rank_at(far)))
        if position > 0:
            steps.append(send(seat.left(), seat.rank_at(far)))
    return Draft(w, steps)


def all_to_all(seat: Seat) -> Draft:
    """Relay: a chunk for the rank ``d`` places away makes ``d`` hops, the longest ways first.

    Moves ``w/2`` times the bytes of the direct plan: for networks where only neighbours are linked.
    """
    w, rank, right, left = seat.world_size, seat.rank, seat.right(), seat.left()
    steps: list[Step] = []
    for hop in range(w - 1):
        here, before = (rank - hop) % w, (rank - 1 - hop) % w
        for distance in range(w - 1, hop, -1):
            steps.append(send(right, here * w + (here + distance) % w))
            steps.append(copy(left, before * w + (before + distance) % w))
    return Draft(w * w, steps)


def barrier(seat: Seat) -> Draft:
    """An empty chunk runs up the chain to the root and back."""
    return Draft(1, reduce(seat).steps + broadcast(seat).steps)


BUILDERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
    Operation.BROADCAST: broadcast,
    Operation.REDUCE: reduce,
    Operation.SCATTER: scatter,
    Operation.GATHER: gather,
    Operation.ALL_TO_ALL: all_to_all,
    Operation.BARRIER: barrier,
}
