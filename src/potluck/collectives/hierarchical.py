"""Hierarchical: inside the node first, then between nodes, then inside again.

The nodes form a ring. Every chunk has a *home* node, and on every node one *carrier*: the worker
that speaks for the node about this chunk. Inwards, the workers of a node send their contributions
to the carrier, and the carriers pass partial results along the ring, ending at home; outwards, the
carriers pass the chunk along the ring, starting at home, and hand it to the workers of their node.
So every node's wire carries what one rank's wire would carry in a ring of nodes, however many
workers share it. Carriers are spread over a node's workers. Nodes may have unequal numbers of
workers, even one.

scatter, gather and all_to_all have no such plan: no two chunks can share a frame, so a detour
through a carrier saves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from potluck.collectives.builder import Builder, Draft, Rank, copy, reduce_from, send
from potluck.collectives.plan import Operation, Step


@lru_cache(maxsize=256)
def _members(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks of every node; nodes in the order of their lowest ranks."""
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


@dataclass(frozen=True, slots=True)
class _Ring:
    """The nodes' ring as one rank sees it. ``homes[c]`` is chunk ``c``'s home node, ``lanes[c]``
    says which worker carries it; ``root``, where given, carries all chunks on its own node."""

    rank: int
    members: tuple[tuple[int, ...], ...]
    homes: list[int]
    lanes: list[int]
    root: int | None = None

    @property
    def node(self) -> int:
        return next(i for i, ranks in enumerate(self.members) if self.rank in ranks)

    def carrier(self, node: int, chunk: int) -> int:
        ranks = self.members[node % len(self.members)]
        if self.root is not None and self.root in ranks:
            return self.root
        return ranks[self.lanes[chunk] % len(ranks)]

    def carried(self) -> list[list[int]]:
        """The chunks that this rank carries on its own node, by their home nodes."""
        node = self.node
        chunks: list[list[int]] = [[] for _ in self.members]
        for chunk, home in enumerate(self.homes):
            if self.carrier(node, chunk) == self.rank:
                chunks[home].append(chunk)
        return chunks

    def mates(self) -> list[int]:
        """The other workers of this node, the next one first."""
        ranks = self.members[self.node]
        here = ranks.index(self.rank)
        return list(ranks[here + 1 :] + ranks[:here])

    def inward(self) -> list[Step]:
        """Reduce every chunk to the carrier of its home node."""
        node, num_nodes, mates = self.node, len(self.members), self.mates()
        carried = self.carried()
        steps: list[Step] = []
        chunks = range(len(self.homes))
        for chunk in sorted(chunks, key=lambda c: (node - 1 - self.homes[c]) % num_nodes):
            carrier = self.carrier(node, chunk)
            if carrier == self.rank:
                steps += [reduce_from(mate, chunk) for mate in mates]
            else:
                steps.append(send(carrier, chunk))
        for i in range(1, num_nodes):
            steps += [send(self.carrier(node + 1, c), c) for c in carried[(node - i) % num_nodes]]
            arriving = carried[(node - 1 - i) % num_nodes]
            steps += [reduce_from(self.carrier(node - 1, c), c) for c in arriving]
        return steps

    def outward(self) -> list[Step]:
        """Copy every chunk from the carrier of its home node to all ranks."""
        node, num_nodes, mates = self.node, len(self.members), self.mates()
        carried = self.carried()
        steps: list[Step] = []
        for i in range(num_nodes - 1):
            steps += [send(self.carrier(node + 1, c), c) for c in carried[(node - i) % num_nodes]]
            arriving = carried[(node - 1 - i) % num_nodes]
            steps += [copy(self.carrier(node - 1, c), c) for c in arriving]
        chunks = range(len(self.homes))
        for chunk in sorted(chunks, key=lambda c: (node - self.homes[c]) % num_nodes):
            carrier = self.carrier(node, chunk)
            if carrier == self.rank:
                steps += [send(mate, chunk) for mate in mates]
            else:
                steps.append(copy(carrier, chunk))
        return steps


def _spread(me: Rank) -> _Ring:
    """As many chunks for every home, and at least one for every worker to carry."""
    members = _members(me.nodes)
    num_nodes = len(members)
    num_lanes = -(-max(map(len, members)) // num_nodes)
    chunks = range(num_nodes * num_lanes)
    return _Ring(
        me.rank,
        members,
        homes=[c % num_nodes for c in chunks],
        lanes=list(chunks),
    )


def _rooted(me: Rank, num_chunks: int) -> _Ring:
    """All chunks are at home on the root's node, and carried there by the root."""
    members = _members(me.nodes)
    home = next(i for i, ranks in enumerate(members) if me.root in ranks)
    return _Ring(me.rank, members, [home] * num_chunks, list(range(num_chunks)), me.root)


def _owned(me: Rank) -> _Ring:
    """Chunk ``r`` is at home with rank ``r``."""
    members = _members(me.nodes)
    places = {
        rank: (node, lane) for node, ranks in enumerate(members) for lane, rank in enumerate(ranks)
    }
    return _Ring(
        me.rank,
        members,
        homes=[places[rank][0] for rank in range(me.world_size)],
        lanes=[places[rank][1] for rank in range(me.world_size)],
    )


def all_reduce(me: Rank) -> Draft:
    """Every node sends ``2 (n-1)/n`` of the buffer, ``n`` being the number of nodes."""
    ring = _spread(me)
    return Draft(len(ring.homes), ring.inward() + ring.outward())


def reduce_scatter(me: Rank) -> Draft:
    """A node sends every chunk that is at home elsewhere once."""
    return Draft(me.world_size, _owned(me).inward())


def all_gather(me: Rank) -> Draft:
    """A node receives every chunk that is at home elsewhere once."""
    return Draft(me.world_size, _owned(me).outward())


def broadcast(me: Rank) -> Draft:
    """A pipelined chain of nodes; the carriers of a node share its inner work."""
    ring = _rooted(me, max(map(len, _members(me.nodes))))
    return Draft(len(ring.homes), ring.outward())


def reduce(me: Rank) -> Draft:
    """The broadcast chain backwards."""
    ring = _rooted(me, max(map(len, _members(me.nodes))))
    return Draft(len(ring.homes), ring.inward())


def barrier(me: Rank) -> Draft:
    """An empty chunk, reduced to rank 0 and copied back."""
    ring = _rooted(me, 1)
    return Draft(1, ring.inward() + ring.outward())


BUILDERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
    Operation.BROADCAST: broadcast,
    Operation.REDUCE: reduce,
    Operation.BARRIER: barrier,
}
