"""Centralized: everything goes through the root, as with a parameter server.

Two hops whatever the world size, and ``w-1`` times the buffer through the root's wire. For
operations without a root of their own, ``root`` names the centre (0 unless said otherwise).
"""

from __future__ import annotations

from potluck._core.collectives.plan import Draft, Rank, Step, copy, reduce_from, send


def broadcast(me: Rank) -> Draft:
    """The root sends the whole buffer to every other rank."""
    if me.position == 0:
        return Draft(1, [send(peer, 0) for peer in me.others()])
    return Draft(1, [copy(me.root, 0)])


def reduce(me: Rank) -> Draft:
    """The root combines the buffers of its right neighbour, the next one, and so on."""
    if me.position == 0:
        return Draft(1, [reduce_from(peer, 0) for peer in me.others()])
    return Draft(1, [send(me.root, 0)])


def all_reduce(me: Rank) -> Draft:
    """reduce, then broadcast."""
    return Draft(1, reduce(me).steps + broadcast(me).steps)


def scatter(me: Rank) -> Draft:
    """The root sends every rank its chunk."""
    w = me.world_size
    if me.position == 0:
        return Draft(w, [send(peer, peer) for peer in me.others()])
    return Draft(w, [copy(me.root, me.rank)])


def gather(me: Rank) -> Draft:
    """Every rank sends its chunk to the root."""
    w = me.world_size
    if me.position == 0:
        return Draft(w, [copy(peer, peer) for peer in me.others()])
    return Draft(w, [send(me.root, me.rank)])


def reduce_scatter(me: Rank) -> Draft:
    """Chunk by chunk, the root combines all contributions and sends the result to its rank."""
    w = me.world_size
    steps: list[Step] = []
    for chunk in (me.rank_at(position) for position in range(w)):
        if me.position == 0:
            steps += [reduce_from(peer, chunk) for peer in me.others()]
            if chunk != me.root:
                steps.append(send(chunk, chunk))
        else:
            steps.append(send(me.root, chunk))
    if me.position > 0:
        steps.append(copy(me.root, me.rank))
    return Draft(w, steps)


def all_gather(me: Rank) -> Draft:
    """gather, then the root sends every rank the chunks of all others."""
    w = me.world_size
    chunks = [me.rank_at(position) for position in range(w)]
    steps = gather(me).steps
    if me.position == 0:
        steps += [send(peer, chunk) for chunk in chunks for peer in me.others() if peer != chunk]
    else:
        steps += [copy(me.root, chunk) for chunk in chunks if chunk != me.rank]
    return Draft(w, steps)


def all_to_all(me: Rank) -> Draft:
    """Every chunk is relayed by the root."""
    w, root = me.world_size, me.root
    if me.position > 0:
        steps = [send(root, me.rank * w + dst) for dst in me.others()]
        sources = [me.rank_at(position) for position in range(w)]
        steps += [copy(root, src * w + me.rank) for src in sources if src != me.rank]
        return Draft(w * w, steps)
    into: list[Step] = []
    outof: list[Step] = [send(peer, root * w + peer) for peer in me.others()]
    for src in me.others():
        for dst in ((src + i) % w for i in range(1, w)):
            into.append(copy(src, src * w + dst))
            if dst != root:
                outof.append(send(dst, src * w + dst))
    return Draft(w * w, into + outof)


def barrier(me: Rank) -> Draft:
    """An empty all_reduce."""
    return all_reduce(me)
