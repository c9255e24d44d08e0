"""The graph of nodes and links as measured, and what follows from it: ring order, the node to put
in the middle, rank order and link model for plans, the address to call a node by. Pure."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from potluck.collectives.links import DEFAULT_LINKS, LinkModel, Wire
from potluck.types import Member

_EXACT_RING = 8
"""Up to so many nodes all rings are compared: 2,520 of them."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node is. ``samples_per_s`` is None until it has trained."""

    node: str
    cores: int = 1
    memory_bytes: int = 0
    accelerators: tuple[str, ...] = ()
    samples_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One direction between two nodes: latency one way, bandwidth in bytes per second."""

    source: str
    target: str
    latency_s: float
    bandwidth: float
    interface: str = ""


class Topology:
    """Nodes and their directed links. A link that was not measured counts as the default."""

    def __init__(self, nodes: Iterable[NodeFacts], links: Iterable[LinkFacts] = ()) -> None:
        self.graph: nx.DiGraph[str] = nx.DiGraph()
        for node in nodes:
            self.graph.add_node(node.node, facts=node)
        for link in links:
            if link.source not in self.graph or link.target not in self.graph:
                raise ValueError(f"a link {link.source} -> {link.target} between unknown nodes")
            self.graph.add_edge(link.source, link.target, facts=link)

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, by name."""
        return tuple(sorted(self.graph))

    def facts(self, node: str) -> NodeFacts:
        """What ``node`` is; KeyError if it is not here."""
        found: NodeFacts = self.graph.nodes[node]["facts"]
        return found

    def link(self, source: str, target: str) -> LinkFacts:
        """The link as measured, else the default."""
        if self.graph.has_edge(source, target):
            found: LinkFacts = self.graph.edges[source, target]["facts"]
            return found
        wire = DEFAULT_LINKS.remote
        return LinkFacts(source, target, wire.alpha_s, 1 / wire.beta_s_per_byte)

    def slowest_first(self) -> tuple[LinkFacts, ...]:
        """The measured links, least bandwidth first."""
        links = [facts for _, _, facts in self.graph.edges(data="facts")]
        return tuple(sorted(links, key=lambda each: (each.bandwidth, each.source, each.target)))

    def ring(self) -> tuple[str, ...]:
        """The nodes in the order of the ring whose slowest link, in either direction, is fastest;
        of those the one with the least latency around.

        It begins with the least name. Exact up to 8 nodes; beyond, a nearest-neighbour ring that
        2-opt improves, about ``n**3`` comparisons a round.
        """
        nodes = self.nodes
        if len(nodes) <= 3:
            return self._faster_way(nodes)
        if len(nodes) <= _EXACT_RING:
            first, *rest = nodes
            rings = ((first, *order) for order in itertools.permutations(rest))
            best = min((r for r in rings if r[1] < r[-1]), key=self._ring_cost)
            return self._faster_way(best)
        return self._faster_way(self._improve(self._nearest_neighbours()))

    def center(self) -> str:
        """The node whose slowest link to any other is the fastest: the one to put in the middle
        of a centralized plan. ValueError without nodes."""
        if not self.graph:
            raise ValueError("a topology without nodes has no center")

        def cost(node: str) -> tuple[float, float, str]:
            others = [other for other in self.nodes if other != node]
            worst = min((self._bandwidth(node, other) for other in others), default=0.0)
            return (-worst, sum(self._latency(node, other) for other in others), node)

        return min(self.nodes, key=cost)

    def rank_order(self, members: Iterable[Member]) -> tuple[Member, ...]:
        """Members with those of one node together and the nodes in the ring's order, so that a ring
        over ranks crosses each of its links once. Nodes that are not here come last, by name."""
        place = {node: index for index, node in enumerate(self.ring())}
        last = len(place)
        return tuple(
            sorted(
                members,
                key=lambda m: (place.get(m.node, last), m.node, m.local_rank, m.worker),
            )
        )

    def link_model(self, members: Sequence[Member]) -> LinkModel:
        """What the plans' simulation needs to know of these members, in rank order: who shares a
        node (for ``collectives.hierarchical``), and each measured wire."""
        numbers: dict[str, int] = {}
        nodes = tuple(numbers.setdefault(member.node, len(numbers)) for member in members)
        pairs = []
        for i, source in enumerate(members):
            for j, target in enumerate(members):
                if source.node != target.node and self.graph.has_edge(source.node, target.node):
                    link = self.link(source.node, target.node)
                    pairs.append((i, j, Wire(link.latency_s, 1 / link.bandwidth)))
        return replace(DEFAULT_LINKS, nodes=nodes, pairs=tuple(pairs))

    # Rings.

    def _bandwidth(self, a: str, b: str) -> float:
        return min(self.link(a, b).bandwidth, self.link(b, a).bandwidth)

    def _latency(self, a: str, b: str) -> float:
        return self.link(a, b).latency_s + self.link(b, a).latency_s

    def _ring_cost(self, ring: Sequence[str]) -> tuple[float, float, tuple[str, ...]]:
        pairs = list(zip(ring, (*ring[1:], ring[0]), strict=True))
        slowest = min(self._bandwidth(a, b) for a, b in pairs)
        return (-slowest, sum(self._latency(a, b) for a, b in pairs), tuple(ring))

    def _faster_way(self, ring: Sequence[str]) -> tuple[str, ...]:
        """A ring sends one way round: the way whose slowest link is the faster."""
        if not ring:
            return ()
        start = ring.index(min(ring))
        there = (*ring[start:], *ring[:start])
        back = (there[0], *reversed(there[1:]))

        def slowest(order: Sequence[str]) -> float:
            pairs = zip(order, (*order[1:], order[0]), strict=True)
            return min((self.link(a, b).bandwidth for a, b in pairs if a != b), default=0.0)

        return max((there, back), key=lambda order: (slowest(order), order == there))

    def _nearest_neighbours(self) -> list[str]:
        first, *rest = self.nodes
        ring, left = [first], set(rest)
        while left:
            here = ring[-1]
            following = min(
                left, key=lambda n: (-self._bandwidth(here, n), self._latency(here, n), n)
            )
            ring.append(following)
            left.remove(following)
        return ring

    def _improve(self, ring: list[str]) -> list[str]:
        cost = self._ring_cost(ring)
        improved = True
        while improved:
            improved = False
            for i, j in itertools.combinations(range(1, len(ring)), 2):
                other = [*ring[:i], *reversed(ring[i : j + 1]), *ring[j + 1 :]]
                if (new := self._ring_cost(other)) < cost:
                    ring, cost, improved = other, new, True
        return ring


@dataclass(frozen=True, slots=True)
class Address:
    """One of a node's addresses, as that node knows it: ``network`` in prefix notation, such as
    ``192.168.1.0/24``. ``bandwidth`` (bytes per second) where it is known of the interface."""

    host: str
    network: str
    interface: str = ""
    bandwidth: float = 0.0


def choose_address(
    theirs: Iterable[Address], mine: Iterable[Address], heard_from: str = ""
) -> Address | None:
    """The address to call another machine by; None if none of ``theirs`` can be of use.

    Never the loopback (127.0.1.1 out of a hosts file, ``lo`` aliases, ::1), which every machine
    has. First those in a network that I am in too, the faster interface (of the slower end) before
    the slower; then ``heard_from``, which has reached me; then what a router may know, IPv4
    first. A link-local address only in a network of mine.
    """
    own = [each for each in mine if not _is_loopback(each.host)]
    ranked = []
    for address in theirs:
        if _is_loopback(address.host):
            continue
        shared = [each for each in own if each.network == address.network]
        ip = ipaddress.ip_address(address.host)
        if ip.is_link_local and not shared:
            continue
        speed = max((min(each.bandwidth, address.bandwidth) for each in shared), default=0.0)
        is_known = address.host == heard_from
        key = (not shared, ip.is_link_local, -speed, not is_known, ip.version, address.host)
        ranked.append((key, address))
    return min(ranked, key=lambda each: each[0])[1] if ranked else None


def _is_loopback(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_loopback or ip.is_unspecified or (mapped is not None and mapped.is_loopback)
