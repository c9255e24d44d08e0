"""The failure detector: heartbeats in, findings out. No socket, no clock; times are seconds of one
monotonic clock, of which only differences count.

A link works when both directions work: the peer is heard, and it echoes recent heartbeats of this
node. The peer of a link that has not worked for an adaptive time is suspected, and other peers are
asked to reach it before its status changes. What a peer's echo proves (a *lease*) is in
``docs/membership.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from potluck._core.wire.nodes import Heartbeat


class Status(StrEnum):
    """What this node knows about a peer."""

    NEW = "new"
    """not heard in both directions yet"""
    UP = "up"
    """the link works"""
    SUSPECT = "suspect"
    """the link stopped working; other peers are being asked to reach it"""
    CUT = "cut"
    """others reach it, this node does not"""
    SILENT = "silent"
    """no node reaches it"""
    DEAD = "dead"
    """its agent has ended"""


@dataclass(frozen=True, slots=True)
class Timing:
    """The control plane's times in seconds. ``grant_s`` must exceed ``lease_s`` by more than two
    clocks drift apart in that time."""

    beat_s: float = 0.2
    min_suspicion_s: float = 1.5
    max_suspicion_s: float = 3.0
    probe_s: float = 0.4
    num_probes: int = 3
    late_s: float = 0.3
    lease_s: float = 1.2
    grant_s: float = 1.5
    cut_patience_s: float = 5.0
    """Longer than both ends may take to suspect each other, and then to talk by way of a third."""
    round_s: float = 0.6
    settle_s: float = 1.0
    fresh_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Changed:
    """The status of ``node`` changed, for ``reason``."""

    node: str
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeIndirectly:
    """Have ``via`` try to reach ``target``."""

    target: str
    via: tuple[str, ...]
    reason: str


Finding = Changed | ProbeIndirectly


@dataclass(slots=True)
class PeerHealth:
    """One other node, in its present incarnation. ``latency_s`` (one way) and its ``deviation_s``
    are exponential means; so are ``gap_s``, the time between heartbeats, and
    ``gap_deviation_s``."""

    node: str
    incarnation: int
    status: Status = Status.NEW
    number: int = 0
    heard_at: float = -1e9
    confirmed: int = 0
    confirmed_at: float = -1e9
    leased_at: float = -1e9
    granted_at: float = -1e9
    lease_withheld: bool = False
    latency_s: float = 0.0
    deviation_s: float = 0.0
    gap_s: float = 0.0
    gap_deviation_s: float = 0.0
    asked_at: float = 0.0
    asked: tuple[str, ...] = ()
    reached: bool = False
    leased_death: bool = False
    last: Heartbeat | None = None

    @property
    def works_since(self) -> float:
        """When the link was last known to work in both directions."""
        return min(self.heard_at, self.confirmed_at)


_GAIN = 0.125
_DEVIATION_GAIN = 0.25
_KEPT_BEATS = 64
MAX_PEERS = 2048


class FailureDetector:
    """All peers of one node."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.peers: dict[str, PeerHealth] = {}
        self.number = 0
        self.members: frozenset[str] = frozenset()
        """The nodes of this node's view: asked to reach each other, and never forgotten."""
        self._sent: dict[int, float] = {}
        self._excused_until = -1e9

    def status(self, node: str) -> Status:
        """The status of ``node``; NEW if it was never heard of."""
        peer = self.peers.get(node)
        return Status.NEW if peer is None else peer.status

    def up(self) -> tuple[str, ...]:
        """The peers with a working link, in order of their names."""
        return tuple(sorted(name for name, peer in self.peers.items() if peer.status is Status.UP))

    def has_lease(self, node: str, now: float) -> bool:
        """Whether ``node`` has certainly not accepted a view without this node so far."""
        peer = self.peers.get(node)
        return peer is not None and now - peer.leased_at <= self.timing.lease_s

    def has_granted(self, node: str, now: float) -> bool:
        """Whether ``node`` may still hold a lease from this node."""
        peer = self.peers.get(node)
        return peer is not None and now - peer.granted_at < self.timing.grant_s

    def meet(self, node: str, incarnation: int) -> None:
        """There is a link to this incarnation of ``node``: send it heartbeats from now on."""
        peer = self.peers.get(node)
        if peer is None or incarnation > peer.incarnation:
            self._know(node, incarnation)

    def _know(self, node: str, incarnation: int) -> PeerHealth:
        """A new incarnation of ``node``. At most ``MAX_PEERS`` are known: beyond that the peer
        heard longest ago is forgotten, of all non-members without a working link."""
        if node not in self.peers and len(self.peers) >= MAX_PEERS:
            idle = [
                peer
                for name, peer in self.peers.items()
                if peer.status is not Status.UP and name not in self.members
            ]
            if idle:
                del self.peers[min(idle, key=lambda peer: peer.heard_at).node]
        peer = self.peers[node] = PeerHealth(node, incarnation)
        return peer

    # What is sent.

    def next_beat(self, now: float) -> int:
        """The number of the heartbeat that leaves now."""
        self.number += 1
        self._sent[self.number] = now
        self._sent.pop(self.number - _KEPT_BEATS, None)
        return self.number

    def echo(self, node: str, now: float) -> tuple[int, float, bool]:
        """The echo in the next heartbeat to ``node``: the number of its newest heartbeat, the
        seconds since that came, and whether the echo grants a lease."""
        peer = self.peers[node]
        if not peer.number:
            return 0, 0.0, False
        if not peer.lease_withheld:
            peer.granted_at = peer.heard_at
        return peer.number, now - peer.heard_at, not peer.lease_withheld

    def withhold_leases(self, nodes: Iterable[str]) -> None:
        """Grant leases to all peers except ``nodes``."""
        chosen = set(nodes)
        for name, peer in self.peers.items():
            peer.lease_withheld = name in chosen

    # What happens.

    def heard(
        self, node: str, incarnation: int, beat: Heartbeat, now: float, *, same_view: bool = True
    ) -> list[Finding]:
        """A heartbeat came in. An old or doubled one, or one of an ended incarnation, has no
        effect.

        ``same_view``: the sender uses no newer view than this node. If it does, the heartbeat
        grants no lease: that view may be without this node.
        """
        peer = self.peers.get(node)
        if peer is None or incarnation > peer.incarnation:
            peer = self._know(node, incarnation)
        if (
            incarnation < peer.incarnation
            or beat.number <= peer.number
            or peer.status is Status.DEAD
        ):
            return []
        if peer.number:
            self._measure_gap(peer, min(now - peer.heard_at, self.timing.max_suspicion_s))
        peer.number, peer.heard_at, peer.last = beat.number, now, beat
        if beat.echo > peer.confirmed and beat.echo in self._sent:
            peer.confirmed, peer.confirmed_at = beat.echo, self._sent[beat.echo]
            if beat.lease and same_view:
                peer.leased_at = peer.confirmed_at
            self._measure(peer, max(0.0, (now - peer.confirmed_at - beat.held_s) / 2))
        if peer.status is Status.UP or now - peer.works_since > self._patience(peer):
            return []
        return self._set_status(peer, Status.UP, f"{node} is heard, and hears me")

    def refused(self, node: str, incarnation: int, now: float) -> list[Finding]:
        """The host of ``node`` refused a connection to its agent: that incarnation has ended."""
        peer = self.peers.get(node)
        if peer is None or peer.incarnation != incarnation or peer.status is Status.DEAD:
            return []
        peer.leased_death = self.has_lease(node, now)
        return self._set_status(peer, Status.DEAD, f"the agent of {node} has ended")

    def reached(self, target: str, via: str, now: float) -> list[Finding]:
        """``via``, asked by this node, reached ``target``."""
        peer = self.peers.get(target)
        if peer is None or peer.status not in (Status.SUSPECT, Status.CUT, Status.SILENT):
            return []
        if via not in peer.asked:
            return []
        peer.reached = True
        if peer.status is Status.CUT:
            return []
        return self._set_status(peer, Status.CUT, f"{target} is reached by others, not from here")

    def tick(self, now: float, late_s: float) -> list[Finding]:
        """Time has passed; ``late_s`` is by how much this call came later than it was due."""
        if late_s > self.timing.late_s:
            # This node was too busy: the peers' heartbeats of that time are still unread.
            excuse = now + min(late_s, self.timing.min_suspicion_s)
            self._excused_until = max(self._excused_until, excuse)
        findings: list[Finding] = []
        for peer in self.peers.values():
            if peer.status is Status.UP:
                patience = self._patience(peer)
                if now - peer.works_since > patience and now >= self._excused_until:
                    findings += self._suspect(peer, now, patience)
            elif peer.status in (Status.SUSPECT, Status.CUT):
                findings += self._after_asking(peer, now)
        return findings

    def _suspect(self, peer: PeerHealth, now: float, patience: float) -> list[Finding]:
        direction = "heard" if peer.heard_at <= peer.confirmed_at else "hearing me"
        reason = f"{peer.node} is not {direction} for {patience:.1f} s"
        return [*self._set_status(peer, Status.SUSPECT, reason), *self._ask(peer, now, reason)]

    def _ask(self, peer: PeerHealth, now: float, reason: str) -> list[Finding]:
        via = self._helpers()[: self.timing.num_probes]
        peer.asked_at, peer.asked, peer.reached = now, via, False
        return [ProbeIndirectly(peer.node, via, reason)] if via else []

    def _after_asking(self, peer: PeerHealth, now: float) -> list[Finding]:
        waited = now - peer.asked_at
        if peer.status is Status.CUT and peer.reached:
            again = waited >= self.timing.min_suspicion_s
            return self._ask(peer, now, f"{peer.node} is still cut off from here") if again else []
        if waited < self.timing.probe_s and self._helpers():
            return []
        return self._set_status(peer, Status.SILENT, f"{peer.node} is silent, to others as well")

    def _helpers(self) -> tuple[str, ...]:
        return tuple(node for node in self.up() if node in self.members)

    def _set_status(self, peer: PeerHealth, status: Status, reason: str) -> list[Finding]:
        peer.status = status
        return [Changed(peer.node, status, reason)]

    def _patience(self, peer: PeerHealth) -> float:
        """How long a link may not work before its peer is suspected, adapted to its past gaps."""
        timing = self.timing
        extra = max(0.0, peer.gap_s - timing.beat_s) + 4 * peer.gap_deviation_s
        wanted = timing.min_suspicion_s + extra + 2 * peer.latency_s + 4 * peer.deviation_s
        return min(wanted, timing.max_suspicion_s)

    def _measure(self, peer: PeerHealth, latency_s: float) -> None:
        if not peer.latency_s:
            peer.latency_s, peer.deviation_s = latency_s, latency_s / 2
            return
        error = latency_s - peer.latency_s
        peer.latency_s += _GAIN * error
        peer.deviation_s += _DEVIATION_GAIN * (abs(error) - peer.deviation_s)

    def _measure_gap(self, peer: PeerHealth, gap_s: float) -> None:
        if not peer.gap_s:
            peer.gap_s = gap_s
            return
        error = gap_s - peer.gap_s
        peer.gap_s += _GAIN * error
        peer.gap_deviation_s += _DEVIATION_GAIN * (abs(error) - peer.gap_deviation_s)
