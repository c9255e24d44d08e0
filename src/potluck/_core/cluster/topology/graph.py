"""The graph of nodes and measured links, and what follows from it: the ring order that avoids slow
links, the paths for a group's cost model, the order in which a node's addresses are called, and
stragglers. Pure.

A straggler is a node or link that is much slower than the best of the cluster. Every collective
lasts as long as its slowest link, so a straggler is worth a person's look: at the cable, at the
distance to the access point, or at `potluck ban`."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Callable, Iterable, Sequence

from potluck._core.collectives.links import LINKS
from potluck._core.types import Engine, MeasuredPath, Member
from potluck._core.wire.facts import Address, LinkFacts, NodeFacts

MAX_PATHS = 240
"""All of 16 nodes."""

_EXACT_RING = 8
"""Up to this number of nodes all rings are compared; 8 nodes have 2,520."""


class Topology:
    """Nodes and their directed links. A link that was not measured counts as the default."""

    def __init__(self, nodes: Iterable[NodeFacts], links: Iterable[LinkFacts] = ()) -> None:
        self._facts = {node.node: node for node in nodes}
        self._links: dict[tuple[str, str], LinkFacts] = {}
        for link in links:
            if link.source not in self._facts or link.target not in self._facts:
                raise ValueError(f"a link {link.source} -> {link.target} between unknown nodes")
            self._links[link.source, link.target] = link

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, by name."""
        return tuple(sorted(self._facts))

    def facts(self, node: str) -> NodeFacts:
        """The facts about ``node``; KeyError if it is not in the graph."""
        return self._facts[node]

    def link(self, source: str, target: str) -> LinkFacts:
        """The link as measured, else the default."""
        found = self._links.get((source, target))
        if found is not None:
            return found
        wire = LINKS[Engine.NATIVE].remote
        return LinkFacts(source, target, wire.alpha_s, 1 / wire.beta_s_per_byte)

    def slowest_first(self) -> tuple[LinkFacts, ...]:
        """The measured links, least bandwidth first."""
        links = self._links.values()
        return tuple(sorted(links, key=lambda each: (each.bandwidth, each.source, each.target)))

    def ring(self) -> tuple[str, ...]:
        """The nodes in the order of the best ring: its slowest link, in either direction, is the
        fastest possible; of equal rings the one with the least latency around.

        It begins with the least name. Exact up to 8 nodes. For more, a nearest-neighbour ring is
        improved by 2-opt, with about ``n**3`` comparisons a round.
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

    def paths(self, nodes: Iterable[str]) -> tuple[MeasuredPath, ...]:
        """The measured paths between ``nodes``, for the plans of a group on them, with figures of
        two digits. Of more than ``MAX_PATHS`` the slowest: the others count as fast as the fastest
        of these."""
        wanted = set(nodes)
        found = [
            MeasuredPath(
                link.source,
                link.target,
                float(f"{link.latency_s:.1e}"),
                float(f"{link.bandwidth:.1e}"),
            )
            for link in self.slowest_first()
            if link.source in wanted and link.target in wanted
        ]
        return tuple(found[:MAX_PATHS])

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
        """The direction of ``ring`` to send in: the one whose slowest link is faster."""
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


def in_ring(members: Iterable[Member], ring: Sequence[str]) -> tuple[Member, ...]:
    """``members``, given in order of seniority, in the order of a ring of nodes.

    The most senior member stays first: it is rank 0. Members of one node stand together, so that
    a ring over ranks crosses each link between nodes once. Nodes that are not in ``ring`` come
    last.
    """
    given = tuple(members)
    if not ring or not given:
        return given
    first = given[0].node
    start = ring.index(first) if first in ring else 0
    turned = dict.fromkeys([first, *ring[start:], *ring[:start], *(m.node for m in given)])
    place = {node: index for index, node in enumerate(turned)}
    return tuple(sorted(given, key=lambda member: place[member.node]))


def rank_addresses(
    theirs: Iterable[Address], mine: Iterable[Address], heard_from: str = ""
) -> list[Address]:
    """The addresses ``theirs`` of another machine in the order to call them, the likeliest first.

    Loopback addresses (127.0.1.1 out of a hosts file, ``lo`` aliases, ::1) are left out, since
    every machine has them; so are link-local addresses of other networks. Addresses in a network
    that this machine (``mine``) is in come first, by the bandwidth of the slower of the two
    interfaces; then ``heard_from``, the address that the other machine has called from; then the
    rest, which a router may know, IPv4 first.
    """
    own = [each for each in mine if not _is_loopback(each.host)]
    ranked = []
    for address in theirs:
        if _is_loopback(address.host):
            continue
        shared = [each for each in own if each.network == address.network]
        ip = ipaddress.ip_address(address.host)
        if any(each.host == address.host for each in own) or (ip.is_link_local and not shared):
            continue
        speed = max((min(each.bandwidth, address.bandwidth) for each in shared), default=0.0)
        is_known = address.host == heard_from
        key = (not shared, ip.is_link_local, -speed, not is_known, ip.version, address.host)
        ranked.append((key, address))
    return [address for _, address in sorted(ranked, key=lambda each: each[0])]


def _is_loopback(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return True  # no address at all
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_loopback or ip.is_unspecified or (mapped is not None and mapped.is_loopback)


_TIMES_SLOWER = 4.0
"""A link is slow if the best one is more than this factor better. Two bands of Wi-Fi differ by
less."""

_LATENCY_S = 5e-3
"""Nor is a link slow whose latency is within this of the best: wireless links jitter by as much."""


def slow_links(links: Iterable[LinkFacts]) -> tuple[frozenset[str], ...]:
    """The pairs of nodes whose link, in either direction, has less than a quarter of the best
    link's bandwidth, or more than four times the least latency and 5 ms more. A link that was not
    measured (0) is not slow. In order of the names."""
    known = tuple(links)
    best = max((link.bandwidth for link in known), default=0.0)
    least = min((link.latency_s for link in known if link.latency_s), default=0.0)
    limit = max(_TIMES_SLOWER * least, least + _LATENCY_S)
    slow = {
        frozenset((link.source, link.target))
        for link in known
        if 0 < link.bandwidth < best / _TIMES_SLOWER or link.latency_s > limit
    }
    return tuple(sorted(slow, key=sorted))


def stragglers(links: Iterable[LinkFacts], called: Callable[[str], str]) -> tuple[str, ...]:
    """One sentence for each node all of whose links are slow, and for each other slow link.

    In a cluster of two nodes no link is slow: there is none to compare it with. ``called`` gives a
    node's name for people.
    """
    known = tuple(links)
    slow = slow_links(known)
    pairs = {frozenset((link.source, link.target)) for link in known}
    nodes = sorted({node for pair in slow for node in pair})
    behind = [n for n in nodes if all(pair in slow for pair in pairs if n in pair)]
    alone = [pair for pair in slow if not pair & set(behind)]
    return (
        *(f"{called(node)}: {_worst(known, node)}" for node in behind),
        *(
            f"{' and '.join(sorted(map(called, pair)))}: {_worst(known, *sorted(pair))}"
            for pair in alone
        ),
    )


def _worst(links: tuple[LinkFacts, ...], *nodes: str) -> str:
    """The figures of the links that touch all ``nodes``, beside the best of the cluster."""
    mine = [link for link in links if all(node in (link.source, link.target) for node in nodes)]
    rates = [link.bandwidth for link in links if link.bandwidth]
    my_rates = [link.bandwidth for link in mine if link.bandwidth]
    delays = [link.latency_s for link in links if link.latency_s]
    my_delays = [link.latency_s for link in mine if link.latency_s]
    parts = []
    if my_rates and min(my_rates) < max(rates) / _TIMES_SLOWER:
        parts.append(f"{_mbit(min(my_rates))} Mbit/s (best link: {_mbit(max(rates))})")
    if my_delays and max(my_delays) > max(_TIMES_SLOWER * min(delays), min(delays) + _LATENCY_S):
        parts.append(f"{1e3 * max(my_delays):.3g} ms (best link: {1e3 * min(delays):.2g})")
    return ", ".join(parts)


def _mbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.3g}" if bytes_per_s < 125e6 else f"{8 * bytes_per_s / 1e6:.0f}"
