"""Hierarchical: an intra-node reduction, a ring of nodes, then an intra-node broadcast.

The nodes form a ring. Every chunk has a *home* node, and on every node one *leader* rank: the
worker that exchanges this chunk with other nodes. To reduce, the workers of a node send their
contributions to the leader, and the leaders pass partial results along the ring, ending at the home
node. To copy, the leaders pass the chunk along the ring, starting at the home node, and send it to
the workers of their own node. So a node's network interface carries as many bytes as one rank's
would in a ring of nodes, however many workers the node has. The chunks of a node are led by
different workers in turn (a multi-leader design, as in Bayatpour et al., "Scalable Reduction
Collectives with Data Partitioning-based Multi-Leader Design", 2017). Nodes may have unequal numbers
of workers, even one.

With a codec, sums that went along a ring would be encoded at every hop: then the leaders of a chunk
exchange it with the leader at home directly.

scatter, gather and all_to_all have no such plan: no two chunks can share a frame, so a detour
through a leader saves nothing.
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
class _NodeRing:
    """The ring of nodes as one rank sees it.

    ``homes[c]`` is the home node of chunk ``c``. ``leader_index[c]``, modulo the number of workers
    of a node, is the index of the worker that leads the chunk there. ``root``, where given, leads
    all chunks on its own node.
    """

    rank: int
    members: tuple[tuple[int, ...], ...]
    homes: list[int]
    leader_index: list[int]
    root: int | None = None

    @property
    def node(self) -> int:
        return next(i for i, ranks in enumerate(self.members) if self.rank in ranks)

    def leader(self, node: int, chunk: int) -> int:
        ranks = self.members[node % len(self.members)]
        if self.root is not None and self.root in ranks:
            return self.root
        return ranks[self.leader_index[chunk] % len(ranks)]

    def led_chunks(self) -> list[list[int]]:
        """The chunks that this rank leads on its own node, by their home nodes."""
        node = self.node
        chunks: list[list[int]] = [[] for _ in self.members]
        for chunk, home in enumerate(self.homes):
            if self.leader(node, chunk) == self.rank:
                chunks[home].append(chunk)
        return chunks

    def local_peers(self) -> list[int]:
        """The other workers of this node, the next one first."""
        ranks = self.members[self.node]
        here = ranks.index(self.rank)
        return list(ranks[here + 1 :] + ranks[:here])

    def intra_node_reduce(self) -> list[Step]:
        """Reduce every chunk to its leader on this node."""
        node, num_nodes, peers = self.node, len(self.members), self.local_peers()
        steps: list[Step] = []
        chunks = range(len(self.homes))
        for chunk in sorted(chunks, key=lambda c: (node - 1 - self.homes[c]) % num_nodes):
            leader = self.leader(node, chunk)
            if leader == self.rank:
                steps += [reduce_from(peer, chunk) for peer in peers]
            else:
                steps.append(send(leader, chunk))
        return steps

    def reduce_to_home(self) -> list[Step]:
        """Reduce every chunk to the leader of its home node."""
        node, num_nodes, led = self.node, len(self.members), self.led_chunks()
        steps = self.intra_node_reduce()
        for i in range(1, num_nodes):
            steps += [send(self.leader(node + 1, c), c) for c in led[(node - i) % num_nodes]]
            arriving = led[(node - 1 - i) % num_nodes]
            steps += [reduce_from(self.leader(node - 1, c), c) for c in arriving]
        return steps

    def copy_from_home(self) -> list[Step]:
        """Copy every chunk from the leader of its home node to all ranks."""
        node, num_nodes, led = self.node, len(self.members), self.led_chunks()
        steps: list[Step] = []
        for i in range(num_nodes - 1):
            steps += [send(self.leader(node + 1, c), c) for c in led[(node - i) % num_nodes]]
            arriving = led[(node - 1 - i) % num_nodes]
            steps += [copy(self.leader(node - 1, c), c) for c in arriving]
        return steps + self.intra_node_broadcast()

    def direct_exchange(self) -> list[Step]:
        """Reduce every chunk from all nodes' leaders to the leader of its home node, and copy the
        result back, without a ring: each node's sum is encoded once, and the result once."""
        node, num_nodes, led = self.node, len(self.members), self.led_chunks()
        steps: list[Step] = []
        for i in range(1, num_nodes):
            steps += [send(self.leader(node + i, c), c) for c in led[(node + i) % num_nodes]]
            steps += [reduce_from(self.leader(node - i, c), c) for c in led[node]]
        for i in range(1, num_nodes):
            steps += [send(self.leader(node + i, c), c) for c in led[node]]
            steps += [copy(self.leader(node - i, c), c) for c in led[(node - i) % num_nodes]]
        return steps

    def intra_node_broadcast(self) -> list[Step]:
        """Copy every chunk from its leader on this node to all workers of the node."""
        node, num_nodes, peers = self.node, len(self.members), self.local_peers()
        steps: list[Step] = []
        chunks = range(len(self.homes))
        for chunk in sorted(chunks, key=lambda c: (node - self.homes[c]) % num_nodes):
            leader = self.leader(node, chunk)
            if leader == self.rank:
                steps += [send(peer, chunk) for peer in peers]
            else:
                steps.append(copy(leader, chunk))
        return steps


def _spread(me: Rank) -> _NodeRing:
    """The same number of chunks for every home node, so many that every worker leads at least
    one."""
    members = _members(me.nodes)
    num_nodes = len(members)
    chunks_per_home = -(-max(map(len, members)) // num_nodes)
    chunks = range(num_nodes * chunks_per_home)
    return _NodeRing(
        me.rank,
        members,
        homes=[c % num_nodes for c in chunks],
        leader_index=list(chunks),
    )


def _rooted(me: Rank, num_chunks: int) -> _NodeRing:
    """All chunks have their home on the root's node, and the root leads them there."""
    members = _members(me.nodes)
    home = next(i for i, ranks in enumerate(members) if me.root in ranks)
    return _NodeRing(me.rank, members, [home] * num_chunks, list(range(num_chunks)), me.root)


def _owned(me: Rank) -> _NodeRing:
    """Chunk ``r`` has its home on the node of rank ``r``, and rank ``r`` leads it there."""
    members = _members(me.nodes)
    places = {
        rank: (node, index)
        for node, ranks in enumerate(members)
        for index, rank in enumerate(ranks)
    }
    return _NodeRing(
        me.rank,
        members,
        homes=[places[rank][0] for rank in range(me.world_size)],
        leader_index=[places[rank][1] for rank in range(me.world_size)],
    )


def all_reduce(me: Rank) -> Draft:
    """Every node sends ``2 (n-1)/n`` of the buffer, ``n`` being the number of nodes."""
    ring = _spread(me)
    return Draft(len(ring.homes), ring.reduce_to_home() + ring.copy_from_home())


def coded_all_reduce(me: Rank) -> Draft:
    """The same bytes and messages for a node, over more links: see ``engine/arrays/coding.py``."""
    ring = _spread(me)
    steps = ring.intra_node_reduce() + ring.direct_exchange() + ring.intra_node_broadcast()
    return Draft(len(ring.homes), steps)


def reduce_scatter(me: Rank) -> Draft:
    """A node sends every chunk once whose home is another node."""
    return Draft(me.world_size, _owned(me).reduce_to_home())


def all_gather(me: Rank) -> Draft:
    """A node receives every chunk once whose home is another node."""
    return Draft(me.world_size, _owned(me).copy_from_home())


def broadcast(me: Rank) -> Draft:
    """A pipelined chain of nodes; the leaders of a node share the intra-node broadcast."""
    ring = _rooted(me, max(map(len, _members(me.nodes))))
    return Draft(len(ring.homes), ring.copy_from_home())


def reduce(me: Rank) -> Draft:
    """The broadcast chain backwards."""
    ring = _rooted(me, max(map(len, _members(me.nodes))))
    return Draft(len(ring.homes), ring.reduce_to_home())


def barrier(me: Rank) -> Draft:
    """An empty chunk, reduced to rank 0 and copied back."""
    ring = _rooted(me, 1)
    return Draft(1, ring.reduce_to_home() + ring.copy_from_home())


BUILDERS: dict[Operation, Builder] = {
    Operation.ALL_REDUCE: all_reduce,
    Operation.REDUCE_SCATTER: reduce_scatter,
    Operation.ALL_GATHER: all_gather,
    Operation.BROADCAST: broadcast,
    Operation.REDUCE: reduce,
    Operation.BARRIER: barrier,
}
