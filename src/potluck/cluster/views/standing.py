"""How the members of a view stand, as one of them sees it: who is here, who is out, which links
between them are broken and for how long. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from potluck.cluster.views.election import Pair, has_majority, keep
from potluck.cluster.views.health import Health, Status
from potluck.wire.nodes import Seat, View


@dataclass(frozen=True, slots=True)
class Standing:
    """``kept`` are the seats that can all reach each other, me among them if I can. ``out``: why
    each of the others is not kept. ``undecided``: who is being asked about. ``broken``: links that
    don't work between members that are here; they count once they have ``lasted``."""

    kept: tuple[Seat, ...]
    out: dict[str, str]
    ended: frozenset[str]
    undecided: tuple[str, ...]
    broken: frozenset[Pair]
    lasted: frozenset[Pair]
    majority: bool


class Observer:
    """Remembers since when links are broken."""

    def __init__(self, me: str, health: Health) -> None:
        self.me = me
        self.health = health
        self._since: dict[Pair, float] = {}

    def look(
        self,
        view: View,
        *,
        gone: Collection[Seat],
        banned: Collection[str],
        installed_at: float,
        now: float,
    ) -> Standing:
        """How the members of ``view`` stand. ``gone`` are seats whose end hides no decision."""
        health, me = self.health, self.me
        here: list[Seat] = []
        out: dict[str, str] = {}
        ended: set[str] = set()
        undecided: list[str] = []
        unheard: set[str] = set()
        listed: set[str] = set()
        for seat in view.seats:
            peer = health.peers.get(seat.node)
            if peer is not None and peer.status is Status.UP and peer.last is not None:
                listed.update(peer.last.links)
        for seat in view.seats:
            node = seat.node
            peer = health.peers.get(node)
            if node == me:
                here.append(seat)
            elif seat in gone or (peer is not None and peer.life > seat.life):
                out[node] = f"{node} has ended, or left"
                ended.add(node)
            elif node in banned:
                out[node] = f"{node} is banned"
            elif peer is None or peer.status is Status.NEW or peer.life < seat.life:
                if now - installed_at < health.timing.max_suspicion_s:
                    undecided.append(node)
                else:
                    out[node] = f"{node} was never heard"
            elif peer.status is Status.DEAD:
                out[node] = f"the agent of {node} has ended"
                ended.add(node)
            elif peer.status is Status.UP:
                here.append(seat)
            elif peer.status is Status.SUSPECT:
                undecided.append(node)
                here.append(seat)
            elif peer.status is Status.CUT or node in listed:
                here.append(seat)
                unheard.add(node)
            else:
                out[node] = f"{node} is silent"
        broken = self._broken(here, unheard)
        self._since = {pair: self._since.get(pair, now) for pair in broken}
        patience = health.timing.cut_patience_s
        lasted = frozenset(pair for pair in broken if now - self._since[pair] >= patience)
        kept = keep(here, lasted)
        names = {seat.node for seat in kept}
        for seat in here:
            if seat.node not in names:
                out[seat.node] = f"{seat.node} has no working link with some of the others"
        reached = names - set(undecided) - unheard
        dead = {seat.node for seat in gone}
        return Standing(
            kept,
            out,
            frozenset(ended),
            tuple(undecided),
            broken,
            lasted,
            me in names and has_majority(view.seats, reached, dead),
        )

    def _broken(self, here: list[Seat], unheard: set[str]) -> frozenset[Pair]:
        """Links between members that are here, of which an end says that they don't work."""
        rows: dict[str, Collection[str]] = {}
        for seat in here:
            peer = self.health.peers.get(seat.node)
            if peer is not None and peer.status is Status.UP and peer.last is not None:
                rows[seat.node] = peer.last.links
        broken = {frozenset((self.me, node)) for node in unheard}
        names = list(rows)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                if b not in rows[a] or a not in rows[b]:
                    broken.add(frozenset((a, b)))
        for node in unheard:  # their own heartbeats don't arrive: the others' word counts
            for a in names:
                if node not in rows[a]:
                    broken.add(frozenset((a, node)))
        return frozenset(broken)
