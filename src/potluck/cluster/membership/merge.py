"""What happens when nodes of different histories meet: which history a node without a view asks to
join, which node founds one, which of two clusters merges into the other. Pure; the facts are the
peers' last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from potluck.cluster.membership.failure_detector import PeerHealth, Status
from potluck.wire.nodes import View


@dataclass(frozen=True, slots=True)
class ObservedCluster:
    """A history as observed here. ``whole``: all its members have a link with this node."""

    history: str
    fork_of: str
    busy: bool
    size: int
    nodes: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return len(self.nodes) >= self.size

    def outranks(self, other: ObservedCluster) -> bool:
        """Whether this cluster stays when it meets ``other``. In this order: it is no fork; it has
        jobs; it is larger; its history has the lesser name."""
        mine = (not self.fork_of, self.busy, self.size)
        theirs = (not other.fork_of, other.busy, other.size)
        return mine > theirs or (mine == theirs and self.history < other.history)


def own_cluster(view: View) -> ObservedCluster:
    """The cluster of this node, which uses ``view``."""
    return ObservedCluster(
        view.history, view.fork_of, bool(view.groups), len(view.members), view.nodes
    )


def observe(peers: Iterable[PeerHealth]) -> list[ObservedCluster]:
    """The histories of peers with a working link, except those that are paused."""
    newest: dict[str, list[PeerHealth]] = {}
    for peer in peers:
        beat = peer.last
        if peer.status is not Status.UP or beat is None or not beat.history or beat.paused:
            continue
        rivals = newest.setdefault(beat.history, [])
        if rivals and rivals[0].last is not None and rivals[0].last.epoch != beat.epoch:
            if rivals[0].last.epoch > beat.epoch:
                continue
            rivals.clear()
        rivals.append(peer)
    observed = []
    for history, members in newest.items():
        last = members[0].last
        assert last is not None
        nodes = tuple(peer.node for peer in members)
        observed.append(ObservedCluster(history, last.fork_of, last.busy, last.size, nodes))
    return observed


def history_to_join(observed: Iterable[ObservedCluster]) -> str:
    """The history that a node without a view asks to join; empty if there is none."""
    best: ObservedCluster | None = None
    for cluster in observed:
        if cluster.whole and (best is None or cluster.outranks(best)):
            best = cluster
    return "" if best is None else best.history


def may_found(me: str, peers: Iterable[PeerHealth], observed: Iterable[ObservedCluster]) -> bool:
    """Whether node ``me`` is to found a history: no history is observed, and of the nodes that are
    linked with it and ask to join none, it has the least id."""
    if any(True for _ in observed):
        return False
    rivals = [p.last for p in peers if p.status is Status.UP and p.node < me]
    return not any(beat is not None and not beat.history and not beat.wants for beat in rivals)


def cluster_to_join(
    view: View, paused: bool, peers: dict[str, PeerHealth], observed: Iterable[ObservedCluster]
) -> ObservedCluster | None:
    """The cluster that this node's cluster should merge into, None if it stays. All present members
    of this one must be linked with all members of the other."""
    mine = own_cluster(view)
    for cluster in observed:
        if cluster.history == view.history or not cluster.whole:
            continue
        if paused:
            if cluster.fork_of != view.history:
                continue
        elif not cluster.outranks(mine):
            continue
        rows = []
        for node in view.nodes:
            peer = peers.get(node)
            if peer is not None and peer.status is Status.UP and peer.last is not None:
                rows.append(peer.last.links)
        if all(node in row for row in rows for node in cluster.nodes):
            return cluster
    return None
