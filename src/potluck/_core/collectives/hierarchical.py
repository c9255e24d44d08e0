"""Hierarchical: a reduction within nodes, a ring of nodes, then a broadcast within nodes; or over
nested levels (node < rack < site).

The groups of the outermost level form a ring: nodes, or sites. Every chunk has a *home* there, and
in every group of every level one *leader* rank: the worker that exchanges this chunk with other
groups. To reduce, the leaders of a group's parts (the workers of a node, the nodes of a rack) send
what they have to the group's leader, level by level; and the leaders of the outermost groups pass
partial results along the ring, ending at the home. To copy, they pass the chunk along the ring,
starting at the home, and send it down the levels. So a node's network interface carries as many
bytes as one rank's would in a ring of nodes, however many workers the node has, and the links
between two sites carry each chunk once, however many nodes a site has. The chunks of a group are
led by its workers in turn (a multi-leader design, as in Bayatpour et al., "Scalable Reduction
Collectives with Data Partitioning-based Multi-Leader Design", 2017). Groups may be of unequal size,
even of one rank.

With a codec, sums that went along a ring would be encoded at every hop: then the leaders of a chunk
exchange it with the leader at home directly, and the levels are the nodes alone.

scatter, gather and all_to_all have no such plan: no two chunks can share a frame, so a detour
through a leader saves nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from potluck._core.collectives.plan import Draft, Rank, Step, copy, reduce_from, send

_MOST_CHUNKS = 256
"""With which the workers of a group take turns: of more workers some lead none."""


@dataclass(frozen=True, slots=True)
class _Levels:
    """Nested groups of ranks, the innermost level first.

    ``groups[level][rank]`` is the group of a rank; ``parts[level][group]`` are the groups of the
    level below that are in it, or its ranks, by their lowest ranks; a child that is one of the
    ``stride[level]``-th in turn leads.
    """

    groups: tuple[tuple[int, ...], ...]
    parts: tuple[dict[int, tuple[int, ...]], ...]
    strides: tuple[int, ...]
    tops: tuple[int, ...]
    """The groups of the outermost level, by their lowest ranks."""

    @property
    def num_turns(self) -> int:
        """After so many chunks every rank has led one."""
        return self.strides[0] * max(map(len, self.parts[0].values()))


@lru_cache(maxsize=256)
def _levels(*groups: tuple[int, ...]) -> _Levels:
    """The nested groups in which rank ``r`` is in ``groups[level][r]``, the innermost first."""
    parts: list[dict[int, tuple[int, ...]]] = []
    below = tuple(range(len(groups[0])))
    for level in groups:
        found: dict[int, dict[int, None]] = {}
        for part, group in zip(below, level, strict=True):
            found.setdefault(group, {})[part] = None
        parts.append({group: tuple(each) for group, each in found.items()})
        below = level
    most = [max(map(len, each.values())) for each in parts]
    strides = tuple(math.prod(most[level + 1 :]) for level in range(len(groups)))
    return _Levels(groups, tuple(parts), strides, tuple(parts[-1]))


@dataclass(frozen=True, slots=True)
class _Ring:
    """The ring of outermost groups as one rank sees it; ``node`` is the place of a group in it.

    ``homes[c]`` is the home of chunk ``c``. ``turns[c]`` chooses the leaders of the chunk; but
    ``owners[c]``, where there is one, leads it in all its own groups.
    """

    rank: int
    levels: _Levels
    homes: list[int]
    turns: list[int]
    owners: list[int | None]

    @property
    def num_nodes(self) -> int:
        return len(self.levels.tops)

    @property
    def node(self) -> int:
        return self.levels.tops.index(self.levels.groups[-1][self.rank])

    def leader(self, node: int, chunk: int) -> int:
        """The rank that leads a chunk in an outermost group."""
        top = self.levels.tops[node % self.num_nodes]
        return self._leader(len(self.levels.groups) - 1, top, chunk)

    def _leader(self, level: int, group: int, chunk: int) -> int:
        levels, owner = self.levels, self.owners[chunk]
        if owner is not None and levels.groups[level][owner] == group:
            return owner
        parts = levels.parts[level][group]
        part = parts[self.turns[chunk] // levels.strides[level] % len(parts)]
        return part if level == 0 else self._leader(level - 1, part, chunk)

    def _exchange(self, level: int, chunk: int) -> tuple[int, list[int]] | None:
        """Of a chunk in this rank's group of ``level``: the leader, and the leaders of the other
        parts, the next one after this rank first; None if this rank leads no part."""
        group = self.levels.groups[level][self.rank]
        parts = self.levels.parts[level][group]
        members = [p if level == 0 else self._leader(level - 1, p, chunk) for p in parts]
        if self.rank not in members:
            return None
        here = members.index(self.rank)
        return self._leader(level, group, chunk), members[here + 1 :] + members[:here]

    def led_chunks(self) -> list[list[int]]:
        """The chunks that this rank leads in its outermost group, by their homes."""
        node = self.node
        chunks: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for chunk, home in enumerate(self.homes):
            if self.leader(node, chunk) == self.rank:
                chunks[home].append(chunk)
        return chunks

    def inner_reduce(self) -> list[Step]:
        """Reduce every chunk to its leader in this outermost group."""
        node, steps = self.node, []
        chunks = range(len(self.homes))
        for chunk in sorted(chunks, key=lambda c: (node - 1 - self.homes[c]) % self.num_nodes):
            for level in range(len(self.levels.groups)):
                exchange = self._exchange(level, chunk)
                if exchange is None:
                    break
                leader, others = exchange
                if leader == self.rank:
                    steps += [reduce_from(each, chunk) for each in others]
                else:
                    steps.append(send(leader, chunk))
        return steps

    def inner_broadcast(self) -> list[Step]:
        """Copy every chunk from its leader in this outermost group to all its ranks."""
        node, steps = self.node, []
        chunks = range(len(self.homes))
        for chunk in sorted(chunks, key=lambda c: (node - self.homes[c]) % self.num_nodes):
            for level in reversed(range(len(self.levels.groups))):
                exchange = self._exchange(level, chunk)
                if exchange is None:
                    continue
                leader, others = exchange
                if leader == self.rank:
                    steps += [send(each, chunk) for each in others]
                else:
                    steps.append(copy(leader, chunk))
        return steps

    def reduce_to_home(self) -> list[Step]:
        """Reduce every chunk to the leader at its home."""
        node, num_nodes, led = self.node, self.num_nodes, self.led_chunks()
        steps = self.inner_reduce()
        for i in range(1, num_nodes):
            steps += [send(self.leader(node + 1, c), c) for c in led[(node - i) % num_nodes]]
            arriving = led[(node - 1 - i) % num_nodes]
            steps += [reduce_from(self.leader(node - 1, c), c) for c in arriving]
        return steps

    def copy_from_home(self) -> list[Step]:
        """Copy every chunk from the leader at its home to all ranks."""
        node, num_nodes, led = self.node, self.num_nodes, self.led_chunks()
        steps: list[Step] = []
        for i in range(num_nodes - 1):
            steps += [send(self.leader(node + 1, c), c) for c in led[(node - i) % num_nodes]]
            arriving = led[(node - 1 - i) % num_nodes]
            steps += [copy(self.leader(node - 1, c), c) for c in arriving]
        return steps + self.inner_broadcast()

    def direct_exchange(self) -> list[Step]:
        """Reduce every chunk from all leaders to the one at its home, and copy the result back,
        without a ring: each node's sum is encoded once, and the result once."""
        node, num_nodes, led = self.node, self.num_nodes, self.led_chunks()
        steps: list[Step] = []
        for i in range(1, num_nodes):
            steps += [send(self.leader(node + i, c), c) for c in led[(node + i) % num_nodes]]
            steps += [reduce_from(self.leader(node - i, c), c) for c in led[node]]
        for i in range(1, num_nodes):
            steps += [send(self.leader(node + i, c), c) for c in led[node]]
            steps += [copy(self.leader(node - i, c), c) for c in led[(node - i) % num_nodes]]
        return steps


def _spread(rank: int, levels: _Levels) -> _Ring:
    """The same number of chunks for every home, so many that every worker leads at least one."""
    num_homes = len(levels.tops)
    chunks_per_home = -(-min(levels.num_turns, _MOST_CHUNKS) // num_homes)
    chunks = range(num_homes * chunks_per_home)
    homes = [c % num_homes for c in chunks]
    return _Ring(rank, levels, homes, list(chunks), [None] * len(chunks))


def _rooted(me: Rank, num_chunks: int) -> _Ring:
    """All chunks have their home in the root's group, and the root leads them there."""
    levels = _levels(me.nodes, *me.sites)
    home = levels.tops.index(levels.groups[-1][me.root])
    turns = list(range(num_chunks))
    return _Ring(me.rank, levels, [home] * num_chunks, turns, [me.root] * num_chunks)


def _owned(me: Rank) -> _Ring:
    """Chunk ``r`` has its home in the group of rank ``r``, and rank ``r`` leads it there."""
    levels = _levels(me.nodes, *me.sites)
    tops, ranks = levels.groups[-1], range(me.world_size)
    places = [levels.tops.index(tops[rank]) for rank in ranks]
    turns = [places[:rank].count(places[rank]) for rank in ranks]
    return _Ring(me.rank, levels, places, turns, list(ranks))


def all_reduce(me: Rank) -> Draft:
    """Every node sends ``2 (n-1)/n`` of the buffer, ``n`` being the number of nodes; with sites
    every site does, ``n`` being their number."""
    ring = _spread(me.rank, _levels(me.nodes, *me.sites))
    return Draft(len(ring.homes), ring.reduce_to_home() + ring.copy_from_home())


def coded_all_reduce(me: Rank) -> Draft:
    """The same bytes and messages for a node, over more links: see ``engine/arrays/coding.py``."""
    ring = _spread(me.rank, _levels(me.nodes))
    steps = ring.inner_reduce() + ring.direct_exchange() + ring.inner_broadcast()
    return Draft(len(ring.homes), steps)


def reduce_scatter(me: Rank) -> Draft:
    """A node sends every chunk once whose home is another node."""
    return Draft(me.world_size, _owned(me).reduce_to_home())


def all_gather(me: Rank) -> Draft:
    """A node receives every chunk once whose home is another node."""
    return Draft(me.world_size, _owned(me).copy_from_home())


def broadcast(me: Rank) -> Draft:
    """A pipelined chain of nodes; the leaders of a node share the intra-node broadcast."""
    ring = _rooted(me, min(_levels(me.nodes, *me.sites).num_turns, _MOST_CHUNKS))
    return Draft(len(ring.homes), ring.copy_from_home())


def reduce(me: Rank) -> Draft:
    """The broadcast chain backwards."""
    ring = _rooted(me, min(_levels(me.nodes, *me.sites).num_turns, _MOST_CHUNKS))
    return Draft(len(ring.homes), ring.reduce_to_home())


def barrier(me: Rank) -> Draft:
    """An empty chunk, reduced to rank 0 and copied back."""
    ring = _rooted(me, 1)
    return Draft(1, ring.reduce_to_home() + ring.copy_from_home())
