"""Reachability: which members of a view can reach each other, as one member sees it. Pure.

It decides which members are kept, which are out and why, which links between members are broken and
for how long.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from potluck._core.cluster.membership.failure_detector import FailureDetector, Status
from potluck._core.cluster.membership.view import Pair, has_majority, keep
from potluck._core.wire.nodes import View, ViewMember


@dataclass(frozen=True, slots=True)
class Reachability:
    """``kept`` are the members that can all reach each other; this node is one of them if it can
    reach the others. ``out`` is why each other member is not kept. ``ended`` are those whose
    agents have ended. ``undecided`` are suspected members that others are being asked to reach.
    ``broken`` are links between present members that don't work; they count once they have
    ``lasted``. ``majority``: whether the reached members may decide."""

    kept: tuple[ViewMember, ...]
    out: dict[str, str]
    ended: frozenset[str]
    undecided: tuple[str, ...]
    broken: frozenset[Pair]
    lasted: frozenset[Pair]
    majority: bool


class ReachabilityTracker:
    """Assesses the reachability of ``me``, and remembers since when each link has been broken."""

    def __init__(self, me: str, detector: FailureDetector) -> None:
        self.me = me
        self.detector = detector
        self._since: dict[Pair, float] = {}

    def assess(
        self,
        view: View,
        *,
        subtracted: Collection[ViewMember],
        banned: Collection[str],
        installed_at: float,
        now: float,
    ) -> Reachability:
        """The reachability of the members of ``view``. ``subtracted`` are members whose end hides
        no decision."""
        detector, me = self.detector, self.me
        here: list[ViewMember] = []
        out: dict[str, str] = {}
        ended: set[str] = set()
        undecided: list[str] = []
        unheard: set[str] = set()
        listed: set[str] = set()
        for member in view.members:
            peer = detector.peers.get(member.node)
            if peer is not None and peer.status is Status.UP and peer.last is not None:
                listed.update(peer.last.links)
        for member in view.members:
            node = member.node
            peer = detector.peers.get(node)
            if node == me:
                here.append(member)
            elif member in subtracted or (
                peer is not None and peer.incarnation > member.incarnation
            ):
                out[node] = f"{node} has ended, or left"
                ended.add(node)
            elif node in banned:
                out[node] = f"{node} is banned"
            elif peer is None or peer.status is Status.NEW or peer.incarnation < member.incarnation:
                if now - installed_at < detector.timing.max_suspicion_s:
                    undecided.append(node)
                else:
                    out[node] = f"{node} was never heard"
            elif peer.status is Status.DEAD:
                out[node] = f"the agent of {node} has ended"
                ended.add(node)
            elif peer.status is Status.UP:
                here.append(member)
            elif peer.status is Status.SUSPECT:
                undecided.append(node)
                here.append(member)
            elif peer.status is Status.CUT or node in listed:
                here.append(member)
                unheard.add(node)
            else:
                out[node] = f"{node} is silent"
        broken = self._broken(here, unheard)
        self._since = {pair: self._since.get(pair, now) for pair in broken}
        patience = detector.timing.cut_patience_s
        lasted = frozenset(pair for pair in broken if now - self._since[pair] >= patience)
        kept = keep(here, lasted)
        names = {member.node for member in kept}
        for member in here:
            if member.node not in names:
                out[member.node] = f"{member.node} has no working link with some of the others"
        reached = names - set(undecided) - unheard
        gone = {each.node for each in subtracted}
        return Reachability(
            kept,
            out,
            frozenset(ended),
            tuple(undecided),
            broken,
            lasted,
            me in names and has_majority(view.members, reached, gone),
        )

    def _broken(self, here: list[ViewMember], unheard: set[str]) -> frozenset[Pair]:
        """The links between present members that one end reports as not working."""
        rows: dict[str, Collection[str]] = {}
        for member in here:
            peer = self.detector.peers.get(member.node)
            if peer is not None and peer.status is Status.UP and peer.last is not None:
                rows[member.node] = peer.last.links
        broken = {frozenset((self.me, node)) for node in unheard}
        names = list(rows)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                if b not in rows[a] or a not in rows[b]:
                    broken.add(frozenset((a, b)))
        for node in unheard:  # its own heartbeats don't arrive here: what the others report counts
            for a in names:
                if node not in rows[a]:
                    broken.add(frozenset((a, node)))
        return frozenset(broken)
