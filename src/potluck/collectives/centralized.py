"""Centralized: everything goes through the root, as with a parameter server.

Two hops whatever the world size, and ``w-1`` times the buffer through the root's wire. For
operations without a root of their own, ``root`` names the centre (0 unless said otherwise).
"""

from __future__ import annotations

from potluck.collectives.plan import Operation, Step
from potluck.collectives.seat import Builder, Draft, Seat, copy, reduce_from, send


def broadcast(seat: Seat) -> Draft:
    """The root sends the whole buffer to every other rank."""
    if seat.position == 0:
        return Draft(1, [send(peer, 0) for peer in seat.others()])
    return Draft(1, [copy(seat.root, 0)])


def reduce(seat: Seat) -> Draft:
    """The root combines the buffers of its right neighbour, the next one, and so on."""
    if seat.position == 0:
        return Draft(1, [reduce_from(peer, 0) for peer in seat.others()])
    return Draft(1, [send(seat.root, 0)])


def all_reduce(seat: Seat) -> Draft:
    """reduce, then broadcast."""
    return Draft(1, reduce(seat).steps + broadcast(seat).steps)


def scatter(seat: Seat) -> Draft:
    """The root sends every rank its chunk."""
    w = seat.world_size
    if seat.position == 0:
        return Draft(w, [send(peer, peer) for peer in seat.others()])
    return Draft(w, [copy(seat.root, seat.rank)])


def gather(seat: Seat) -> Draft:
    """Every rank sends its chunk to the root."""
    w = seat.world_size
    if seat.position == 0:
        return Draft(w, [copy(peer, peer) for peer in seat.others()])
    return Draft(w, [send(seat.root, seat.rank)])


def reduce_scatter(seat: Seat) -> Draft:
    """Chunk by chunk, the root combines all contributions and sends the result to its rank."""
    w = seat.world_size
    steps: list[Step] = []
    for chunk in (seat.rank_at(position) for position in range(w)):
        if seat.position == 0:
            steps += [reduce_from(peer, chunk) for peer in seat.others()]
            if chunk != seat.root:
                steps.append(send(chunk, chunk))
        else:
            steps.append(send(seat.root, chunk))
    if seat.position > 0:
        steps.append(copy(seat.root, seat.rank))
    return Draft(w, steps)


def all_gather(seat: Seat) -> Draft:
    """gather, then the root sends every rank the chunks of all others."""
    w = seat.world_size
    chunks = [seat.rank_at(position) for position in range(w)]
    steps = gather(seat).steps
    if seat.position == 0:
        steps += [send(peer, chunk) for chunk in chunks for peer in seat.others() if peer != chunk]
    else:
        steps += [copy(seat.root, chunk) for chunk in chunks if chunk != seat.rank]
    return Draft(w, steps)


def all_to_all(seat: Seat) -> Draft:
    """Every chunk is relayed by the root."""
    w, root = seat.world_size, seat.root
    if seat.position > 0:
        steps = [send(root, seat.rank * w + dst) for dst in seat.others()]
        sources = [seat.rank_at(position) for position in range(w)]
        steps += [copy(root, src * w + seat.rank) for src in sources if src != seat.rank]
        return Draft(w * w, steps)
    into: list[Step] = []
    outof: list[Step] = [send(peer, root * w + peer) for peer in seat.others()]
    for src in seat.others():
        for dst in ((src + i) % w for i in range(1, w)):
            into.append(copy(src, src * w + dst))
            if dst != root:
                outof.append(send(dst, src * w + dst))
    return Draft(w * w, into + outof)


def barrier(seat: Seat) -> Draft:
    """An empty all_reduce."""
    return all_reduce(seat)


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
