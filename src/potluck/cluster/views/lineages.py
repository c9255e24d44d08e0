"""When nodes meet that do not share a lineage: whom a newcomer asks to be let in, who founds one,
which of two gives way. Pure; the facts are the peers' last heartbeats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from potluck.cluster.views.health import Peer, Status
from potluck.wire.nodes import View


@dataclass(frozen=True, slots=True)
class Sight:
    """A lineage as seen from here. ``whole``: all its members have a link with me."""

    lineage: str
    fork_of: str
    busy: bool
    size: int
    nodes: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return len(self.nodes) >= self.size

    def outranks(self, other: Sight) -> bool:
        """Who stays when two meet: no fork, one with jobs, the larger, the lesser name."""
        mine = (not self.fork_of, self.busy, self.size)
        theirs = (not other.fork_of, other.busy, other.size)
        return mine > theirs or (mine == theirs and self.lineage < other.lineage)


def of_view(view: View) -> Sight:
    """My own."""
    return Sight(view.lineage, view.fork_of, bool(view.groups), len(view.seats), view.nodes)


def seen(peers: Iterable[Peer]) -> list[Sight]:
    """The lineages that peers with a working link use and that can decide."""
    newest: dict[str, list[Peer]] = {}
    for peer in peers:
        beat = peer.last
        if peer.status is not Status.UP or beat is None or not beat.lineage or beat.paused:
            continue
        rivals = newest.setdefault(beat.lineage, [])
        if rivals and rivals[0].last is not None and rivals[0].last.epoch != beat.epoch:
            if rivals[0].last.epoch > beat.epoch:
                continue
            rivals.clear()
        rivals.append(peer)
    sights = []
    for lineage, members in newest.items():
        last = members[0].last
        assert last is not None
        nodes = tuple(peer.node for peer in members)
        sights.append(Sight(lineage, last.fork_of, last.busy, last.size, nodes))
    return sights


def to_join(sights: Iterable[Sight]) -> str:
    """The lineage a node without one asks to be let in to; empty if there is none."""
    best: Sight | None = None
    for sight in sights:
        if sight.whole and (best is None or sight.outranks(best)):
            best = sight
    return "" if best is None else best.lineage


def may_found(me: str, peers: Iterable[Peer], sights: Iterable[Sight]) -> bool:
    """Whether it is on me to found a lineage: nobody here has one, and of those who have a link
    with me and want none either I have the least name."""
    if any(True for _ in sights):
        return False
    rivals = [p.last for p in peers if p.status is Status.UP and p.node < me]
    return not any(beat is not None and not beat.lineage and not beat.wants for beat in rivals)


def gives_way_to(
    view: View, paused: bool, peers: dict[str, Peer], sights: Iterable[Sight]
) -> Sight | None:
    """The lineage that mine should join as a whole, None if it stays. All of mine that are here
    must have a link with all of the other."""
    mine = of_view(view)
    for sight in sights:
        if sight.lineage == view.lineage or not sight.whole:
            continue
        if paused:
            if sight.fork_of != view.lineage:
                continue
        elif not sight.outranks(mine):
            continue
        rows = []
        for node in view.nodes:
            peer = peers.get(node)
            if peer is not None and peer.status is Status.UP and peer.last is not None:
                rows.append(peer.last.links)
        if all(node in row for row in rows for node in sight.nodes):
            return sight
    return None
