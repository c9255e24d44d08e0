"""The facts that one node knows about all nodes and links, and which link it measures next. Pure.

Each node sends its row to all others: the facts about its machine and its own links (``Facts``). So
all nodes hold the same graph, one row for each node. Of two nodes the one with the lesser id
measures the link between them, soon after the link was made and then every ``AGAIN_S``; the other
measures only if that did not happen. No link is measured while a job has workers at either end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from potluck._core.cluster.topology.graph import Topology, rank_addresses
from potluck._core.wire.facts import Address, Facts, LinkFacts, NodeFacts

AGAIN_S = 600.0
MAX_CANDIDATES = 4

_NEWS = ("target", "bandwidth", "interface", "via")
_FIRST_S = 1.5
_OTHER_S = 6.0
_RETRY_S = 2.0
_MAX_RETRY_S = 120.0


@dataclass(slots=True)
class Pair:
    """This node's link to one other node. ``outward`` and ``inward`` are bytes per second, 0 until
    measured."""

    host: str
    port: int
    due: float
    is_linked: bool = True
    via: str = ""
    outward: float = 0.0
    inward: float = 0.0
    num_failures: int = 0


class Survey:
    """The rows of all nodes, and when each link of this node is measured."""

    def __init__(self, me: NodeFacts) -> None:
        self.mine = me
        self.rows: dict[str, Facts] = {}
        self._pairs: dict[str, Pair] = {}

    # The links of this node.

    def linked(self, node: str, host: str, port: int, now: float, via: str = "") -> None:
        """There is a link to ``node``, to its address ``host``; its agent listens on ``port``. A
        link that ``via`` relays has no address, and is not measured."""
        first = now + (_FIRST_S if self.mine.node < node else _OTHER_S)
        pair = self._pairs.get(node)
        if pair is None:
            self._pairs[node] = Pair(host, port, first, via=via)
            return
        pair.via = via
        if pair.host != host or pair.port != port or not pair.outward:
            pair.due = min(pair.due, first)
        pair.host, pair.port, pair.is_linked = host, port, True

    def lost(self, node: str) -> None:
        """The link to ``node`` ended; what was measured of it stays."""
        pair = self._pairs.get(node)
        if pair is not None:
            pair.is_linked = False

    def forget(self, known: Collection[str]) -> None:
        """Forget nodes that are neither linked nor in ``known``."""
        kept = {*known, *(node for node, pair in self._pairs.items() if pair.is_linked)}
        self._pairs = {node: pair for node, pair in self._pairs.items() if node in kept}
        self.rows = {node: row for node, row in self.rows.items() if node in kept}

    def due(self, now: float, busy: Collection[str]) -> str:
        """The node to measure the path to now; empty if none. ``busy`` nodes have workers."""
        if self.mine.node in busy:
            return ""
        ready = [
            (pair.due, node)
            for node, pair in self._pairs.items()
            if pair.is_linked and not pair.via and pair.due <= now and node not in busy
        ]
        return min(ready)[1] if ready else ""

    def places(self, node: str) -> list[tuple[str, int]]:
        """The addresses of ``node`` to measure: that of the present link, then the likeliest."""
        pair = self._pairs[node]
        row = self.rows.get(node)
        theirs = () if row is None else row.node.addresses
        others = rank_addresses(theirs, self.mine.addresses, pair.host)
        hosts = dict.fromkeys([pair.host, *(each.host for each in others)])
        return [(host, pair.port) for host in list(hosts)[:MAX_CANDIDATES]]

    def measured(self, node: str, outward: float, inward: float, now: float) -> None:
        """Bytes per second to and from ``node``, by the path that is used from now on."""
        pair = self._pairs.get(node)
        if pair is not None:
            pair.outward, pair.inward, pair.num_failures = outward, inward, 0
            pair.due = now + (AGAIN_S if self.mine.node < node else 1.5 * AGAIN_S)

    def failed(self, node: str, now: float) -> None:
        """A measurement failed: ``node`` was busy, or can't be called."""
        pair = self._pairs.get(node)
        if pair is not None:
            pair.due = now + min(_RETRY_S * 2.0**pair.num_failures, _MAX_RETRY_S)
            pair.num_failures += 1

    # The rows of all nodes.

    def heard(self, node: str, row: Facts) -> None:
        """``node`` sent its row. A row with facts about other nodes' links is ignored."""
        if row.node.node == node and all(link.source == node for link in row.links):
            self.rows[node] = row

    def row(
        self, latencies: Mapping[str, tuple[float, float]], locals_: Mapping[str, str]
    ) -> Facts:
        """This node's row. By node, ``latencies`` are seconds one way and their deviation,
        ``locals_`` this node's address on the link."""
        interfaces = {each.host: each.interface for each in self.mine.addresses}
        links = []
        for node, pair in sorted(self._pairs.items()):
            if not (pair.is_linked or pair.via):  # what is cut is so without a relay, too
                continue
            latency_s, deviation_s = latencies.get(node, (0.0, 0.0))
            local = locals_.get(node, "")
            host, _, scope = local.partition("%")
            links.append(
                LinkFacts(
                    self.mine.node,
                    node,
                    latency_s,
                    pair.outward,
                    deviation_s,
                    interfaces.get(host, scope)[:256],
                    local[:256],
                    pair.via,
                )
            )
        return Facts(self.mine, tuple(links))

    def relayed(self, mine: Facts, nodes: Collection[str]) -> frozenset[tuple[str, str]]:
        """The pairs of ``nodes`` whose link a third node relays, or did until it ended and no other
        was made; each in rising order."""
        rows = {**self.rows, self.mine.node: mine}
        return frozenset(
            (min(node, link.target), max(node, link.target))
            for node, row in rows.items()
            for link in row.links
            if link.via and node in nodes and link.target in nodes
        )

    def topology(self, mine: Facts, nodes: Collection[str]) -> Topology:
        """The graph of ``nodes``, with the links that were measured."""
        rows = [row for node, row in {**self.rows, self.mine.node: mine}.items() if node in nodes]
        known = {row.node.node for row in rows}
        facts = [row.node for row in rows] + [NodeFacts(node) for node in set(nodes) - known]
        links = [link for row in rows for link in row.links if link.target in nodes]
        return Topology(facts, [link for link in links if link.bandwidth])


def is_news(row: Facts, sent: Facts | None) -> bool:
    """Whether ``row`` differs from the row that was ``sent`` last by more than noise."""
    if sent is None or row.node != sent.node or len(row.links) != len(sent.links):
        return True
    for new, old in zip(row.links, sent.links, strict=True):
        if any(getattr(new, name) != getattr(old, name) for name in _NEWS):
            return True
        if abs(new.latency_s - old.latency_s) > max(0.25 * old.latency_s, 50e-6):
            return True
    return False


def shares_interfaces(
    host: str, local: str, seen: Collection[tuple[str, str]], facts: tuple[NodeFacts, NodeFacts]
) -> tuple[str, str] | None:
    """The two interfaces of a path, this node's and the other's; None if ``seen`` has the pair."""
    mine, theirs = facts
    ends = (_interface(local, mine.addresses), _interface(host, theirs.addresses))
    return None if ends in seen else ends


def _interface(host: str, addresses: tuple[Address, ...]) -> str:
    plain = host.partition("%")[0]
    return next((each.interface for each in addresses if each.host == plain), host)
