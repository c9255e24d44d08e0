"""Spanning tree: everything goes along the links of one tree, which spares the pairs of ranks that
can't reach each other.

The tree is a breadth-first one around the rank that has the most links: a star if that rank reaches
all others. A chunk *converges* on a rank (each rank combines what comes from farther away, and
passes the sum on), *floods* from a rank to all others, or is *carried* from one rank to another.
All ranks take the chunks in the same order, so no two wait for each other.

Cost: the rank in the middle of a star receives and sends ``(w-1) n`` in an all_reduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from potluck._core.collectives.plan import Draft, Rank, Step, copy, reduce_from, send

Cut = tuple[tuple[int, int], ...]
"""Pairs of ranks that can't reach each other, in rising order, the lower rank first."""


def cut_of(pairs: Iterable[Iterable[int]]) -> Cut:
    """``pairs`` of ranks, in the form that plans take."""
    return tuple(sorted({(min(pair), max(pair)) for pair in map(tuple, pairs)}))


def connects(world_size: int, cut: Cut) -> bool:
    """Whether the links that ``cut`` leaves connect all ranks, if need be by way of others."""
    return world_size < 2 or len(_parents(world_size, cut)) == world_size


@lru_cache(maxsize=256)
def _parents(world_size: int, cut: Cut) -> dict[int, int]:
    """By rank, its parent in the tree, or itself in the middle; without the ranks that no links
    connect with the middle."""
    ranks, without = range(world_size), set(cut)
    links = {
        a: [b for b in ranks if b != a and (min(a, b), max(a, b)) not in without] for a in ranks
    }
    middle = max(ranks, key=lambda rank: (len(links[rank]), -rank))
    parents, found = {middle: middle}, deque([middle])
    while found:
        rank = found.popleft()
        for peer in links[rank]:
            if peer not in parents:
                parents[peer] = rank
                found.append(peer)
    return parents


@lru_cache(maxsize=256)
def _ways(world_size: int, cut: Cut) -> tuple[tuple[int, ...], ...]:
    """``ways[a][b]``: the rank to which ``a`` passes on what is for ``b``; ``a`` itself if that is
    ``b``. ValueError unless the links connect all ranks."""
    parents = _parents(world_size, cut)
    if len(parents) < world_size:
        alone = ", ".join(str(rank) for rank in range(world_size) if rank not in parents)
        raise ValueError(
            f"the links that are left do not connect all {world_size} ranks: no way leads to "
            f"{alone}, without the links {', '.join(f'{a}-{b}' for a, b in cut)}"
        )
    ways = [[parents[rank]] * world_size for rank in range(world_size)]
    for target in range(world_size):
        above, below = target, target
        ways[target][target] = target
        while parents[above] != above:
            below, above = above, parents[above]
            ways[above][target] = below
    return tuple(map(tuple, ways))


class _Place:
    """Where ``me`` is in the tree."""

    def __init__(self, me: Rank) -> None:
        self.rank = me.rank
        self._ways = _ways(me.world_size, me.cut)
        mine = self._ways[me.rank]
        self.neighbors = sorted(
            set(mine) - {me.rank}, key=lambda peer: (peer - me.rank) % len(mine)
        )

    def towards(self, rank: int) -> int:
        return self._ways[self.rank][rank]

    def converge(self, rank: int, chunk: int) -> list[Step]:
        """Combine ``chunk`` of all ranks at ``rank``."""
        on = self.towards(rank)
        steps = [reduce_from(peer, chunk) for peer in self.neighbors if peer != on]
        return steps if rank == self.rank else [*steps, send(on, chunk)]

    def flood(self, rank: int, chunk: int) -> list[Step]:
        """Bring ``chunk`` of ``rank`` to all."""
        back = self.towards(rank)
        steps = [send(peer, chunk) for peer in self.neighbors if peer != back]
        return steps if rank == self.rank else [copy(back, chunk), *steps]

    def carry(self, source: int, target: int, chunk: int) -> list[Step]:
        """Bring ``chunk`` of ``source`` to ``target``, past this rank if that is on the way."""
        back, on = self.towards(source), self.towards(target)
        if source == target or (back == on and self.rank not in (source, target)):
            return []
        steps = [] if self.rank == source else [copy(back, chunk)]
        return steps if self.rank == target else [*steps, send(on, chunk)]


def _middle(me: Rank) -> int:
    return next(iter(_parents(me.world_size, me.cut)))


def broadcast(me: Rank) -> Draft:
    """The root's buffer floods the tree."""
    return Draft(1, _Place(me).flood(me.root, 0))


def reduce(me: Rank) -> Draft:
    """All buffers converge on the root."""
    return Draft(1, _Place(me).converge(me.root, 0))


def all_reduce(me: Rank) -> Draft:
    """All buffers converge on the middle, and the result floods the tree."""
    place, middle = _Place(me), _middle(me)
    return Draft(1, place.converge(middle, 0) + place.flood(middle, 0))


def barrier(me: Rank) -> Draft:
    """An empty all_reduce."""
    return all_reduce(me)


def all_gather(me: Rank) -> Draft:
    """Each rank's chunk floods the tree."""
    place, w = _Place(me), me.world_size
    return Draft(w, [step for rank in range(w) for step in place.flood(rank, rank)])


def reduce_scatter(me: Rank) -> Draft:
    """Each chunk converges on its rank."""
    place, w = _Place(me), me.world_size
    return Draft(w, [step for rank in range(w) for step in place.converge(rank, rank)])


def scatter(me: Rank) -> Draft:
    """Each chunk is carried from the root to its rank."""
    place, w = _Place(me), me.world_size
    return Draft(w, [step for rank in range(w) for step in place.carry(me.root, rank, rank)])


def gather(me: Rank) -> Draft:
    """Each chunk is carried from its rank to the root."""
    place, w = _Place(me), me.world_size
    return Draft(w, [step for rank in range(w) for step in place.carry(rank, me.root, rank)])


def all_to_all(me: Rank) -> Draft:
    """Each chunk is carried from its source to its destination."""
    place, ranks = _Place(me), range(me.world_size)
    steps = [
        step
        for source in ranks
        for target in ranks
        for step in place.carry(source, target, source * me.world_size + target)
    ]
    return Draft(me.world_size**2, steps)
