"""Ring: every rank talks to its two neighbours only, to the right.

all_reduce is a reduce_scatter followed by an all_gather; each rank moves ``2 (w-1)/w`` of the
buffer, the least any algorithm can (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009). Rooted operations run along the chain that the ring becomes
when it is cut beside the root; the engine's segments pipeline it.
"""

from __future__ import annotations

from potluck._core.collectives.plan import Draft, Rank, Step, copy, reduce_from, send


def reduce_scatter(me: Rank) -> Draft:
    """``w-1`` rounds; chunk ``c`` starts right of rank ``c`` and comes home fully reduced."""
    w, rank, right, left = me.world_size, me.rank, me.right(), me.left()
    steps: list[Step] = []
    for i in range(w - 1):
        steps.append(send(right, (rank - 1 - i) % w))
        steps.append(reduce_from(left, (rank - 2 - i) % w))
    return Draft(w, steps)


def all_gather(me: Rank) -> Draft:
    """``w-1`` rounds; every chunk travels once around, starting at its owner."""
    w, rank, right, left = me.world_size, me.rank, me.right(), me.left()
    steps: list[Step] = []
    for i in range(w - 1):
        steps.append(send(right, (rank - i) % w))
        steps.append(copy(left, (rank - 1 - i) % w))
    return Draft(w, steps)


def all_reduce(me: Rank) -> Draft:
    """``2 (w-1)`` rounds of one ``w``-th of the buffer each; rank ``c`` owns chunk ``c``."""
    w = me.world_size
    return Draft(w, reduce_scatter(me).steps + all_gather(me).steps)


def broadcast(me: Rank) -> Draft:
    """A pipelined chain: root, its right neighbour, and so on."""
    steps: list[Step] = []
    if me.position > 0:
        steps.append(copy(me.left(), 0))
    if me.position < me.world_size - 1:
        steps.append(send(me.right(), 0))
    return Draft(1, steps)


def reduce(me: Rank) -> Draft:
    """The broadcast chain backwards: the far end starts, the root finishes."""
    steps: list[Step] = []
    if me.position < me.world_size - 1:
        steps.append(reduce_from(me.right(), 0))
    if me.position > 0:
        steps.append(send(me.left(), 0))
    return Draft(1, steps)


def scatter(me: Rank) -> Draft:
    """Chunks walk down the chain, the one with the longest way first."""
    w, position = me.world_size, me.position
    steps: list[Step] = []
    for far in range(w - 1, position, -1):
        if position > 0:
            steps.append(copy(me.left(), me.rank_at(far)))
        steps.append(send(me.right(), me.rank_at(far)))
    if position > 0:
        steps.append(copy(me.left(), me.rank))
    return Draft(w, steps)


def gather(me: Rank) -> Draft:
    """Chunks walk up the chain, the nearest first."""
    w, position = me.world_size, me.position
    steps: list[Step] = []
    if position > 0:
        steps.append(send(me.left(), me.rank))
    for far in range(position + 1, w):
        steps.append(copy(me.right(), me.rank_at(far)))
        if position > 0:
            steps.append(send(me.left(), me.rank_at(far)))
    return Draft(w, steps)


def all_to_all(me: Rank) -> Draft:
    """Relay: a chunk for the rank ``d`` places away makes ``d`` hops, the longest ways first.

    Moves ``w/2`` times the bytes of the direct plan: for networks where only neighbours are linked.
    """
    w, rank, right, left = me.world_size, me.rank, me.right(), me.left()
    steps: list[Step] = []
    for hop in range(w - 1):
        here, before = (rank - hop) % w, (rank - 1 - hop) % w
        for distance in range(w - 1, hop, -1):
            steps.append(send(right, here * w + (here + distance) % w))
            steps.append(copy(left, before * w + (before + distance) % w))
    return Draft(w * w, steps)


def barrier(me: Rank) -> Draft:
    """An empty chunk runs up the chain to the root and back."""
    return Draft(1, reduce(me).steps + broadcast(me).steps)
