"""What one node of a cluster decides: who is there, which view follows, when it pauses.

``MembershipProtocol.handle(event, now) -> actions`` puts the smaller cores together
(``failure_detector``, ``reachability``, ``paxos``, ``merge``). It sees no socket, clock or disk;
``now`` is this node's monotonic clock in seconds. The protocol and why it is safe:
``docs/membership.md``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import assert_never

import msgspec

from potluck.cluster.membership import merge
from potluck.cluster.membership.election import explain_minority, newcomers
from potluck.cluster.membership.events import (
    Action,
    Ban,
    ContinueAlone,
    Event,
    Found,
    GroupRefused,
    JobOver,
    Linked,
    Note,
    Pause,
    Received,
    Refused,
    Resume,
    Saved,
    Tick,
    WantGroup,
)
from potluck.cluster.membership.failure_detector import (
    Changed,
    Finding,
    ProbeIndirectly,
    Status,
    Timing,
)
from potluck.cluster.membership.paxos import PaxosInstance
from potluck.cluster.membership.reachability import Reachability, ReachabilityTracker
from potluck.cluster.membership.view import first_view, following, objection_to
from potluck.cluster.membership.voter import Voter
from potluck.wire import nodes as wire
from potluck.wire.nodes import StableRecord, View


class MembershipProtocol(Voter):
    """The control plane's decisions on one node, in one incarnation of its agent.

    ``record`` is what was on disk; ``incarnation`` must be higher than in any run before.
    """

    def __init__(
        self,
        me: str,
        incarnation: int,
        record: StableRecord,
        now: float,
        timing: Timing | None = None,
    ) -> None:
        super().__init__(me, incarnation, record, now, timing or Timing())
        self._reachability = ReachabilityTracker(me, self.detector)
        self._due = now
        self._num_founded = 0

    def next_wakeup(self) -> float:
        """When a Tick is due."""
        return self._due

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done about ``event``, in this order. Never raises for one that comes late,
        twice, or from a node that is out."""
        self._actions = []
        match event:
            case Tick():
                self._tick(now)
            case Received(node, incarnation, message):
                self._received(node, incarnation, message, now)
            case Linked(node, incarnation):
                self.detector.meet(node, incarnation)
            case Refused(node, incarnation):
                self._findings(self.detector.refused(node, incarnation, now), now)
            case Saved(number):
                self._written(number, now)
                self._renew(now)
            case WantGroup():
                self._want(event, now)
            case JobOver(job):
                self._wanted.pop(job, None)
                self._over.add(job)
                self._renew(now)
            case Ban(node):
                self._learn_bans((node,), now)
            case ContinueAlone():
                self._continue_alone(now)
            case Found():
                if self.view is None:
                    self._found(now, "ordered")
            case _:
                assert_never(event)
        return self._actions

    # Time.

    def _tick(self, now: float) -> None:
        late = now - self._due
        self._due = now + self.timing.beat_s
        self._findings(self.detector.tick(now, late), now, renew=False)
        self._beat(now)
        if self._paxos is not None:
            self._take(self._paxos.expire(now), now)
        if self.view is None:
            self._seek(now)
        else:
            self._renew(now)
            self._meet(now)

    def _beat(self, now: float) -> None:
        view = self.view
        number, bans = self.detector.next_beat(now), checksum(self.record.banned)
        links = self.detector.up()
        for node, peer in self.detector.peers.items():
            if peer.status is Status.DEAD:
                continue
            if node in self.record.banned:
                if view is not None and view.member(node) is not None:
                    self._send(node, wire.Bans(self.record.banned))
                    self._send(node, wire.RecoveryRequest(view.history, view.epoch))
                continue
            echo, held_s, lease = self.detector.echo(node, now)
            self._send(
                node,
                wire.Heartbeat(
                    number,
                    echo,
                    held_s,
                    lease,
                    links,
                    history="" if view is None else view.history,
                    epoch=0 if view is None else view.epoch,
                    size=0 if view is None else len(view.members),
                    busy=view is not None and bool(view.groups),
                    paused=bool(self.paused),
                    fork_of="" if view is None else view.fork_of,
                    wants=self.wants,
                    installed=self.record.installed,
                    bans=bans,
                ),
            )

    # Messages.

    def _received(self, node: str, incarnation: int, message: wire.NodeMessage, now: float) -> None:
        peer = self.detector.peers.get(node)
        if peer is not None and (
            incarnation < peer.incarnation
            or (incarnation == peer.incarnation and self._has_ended(node))
        ):
            return
        if node in self.record.banned and not isinstance(message, wire.RecoveryReport):
            return
        match message:
            case wire.Heartbeat():
                self._heard(node, incarnation, message, now)
            case wire.Probe(target):
                self._send(target, wire.Ping(node))
            case wire.Ping(origin):
                self._send(node, wire.Pong(origin))
            case wire.Pong(origin):
                self._send(origin, wire.Reached(node))
            case wire.Reached(target):
                self._findings(self.detector.reached(target, now), now)
            case wire.Decided(view):
                self._learn(view, now, node)
            case wire.RecoveryRequest(history, epoch):
                self._report_for_recovery(node, history, epoch)
            case wire.RecoveryReport():
                self._recovery_reported(node, incarnation, message, now)
                self._renew(now)
            case wire.Bans(banned):
                self._learn_bans(banned, now)
            case wire.Prepare() | wire.Promise() | wire.Propose():
                self._vote(node, incarnation, message, now)
            case wire.Accepted() | wire.Rejected():
                self._vote(node, incarnation, message, now)
            case _:
                assert_never(message)

    def _has_ended(self, node: str) -> bool:
        return self.detector.status(node) is Status.DEAD

    def _heard(self, node: str, incarnation: int, beat: wire.Heartbeat, now: float) -> None:
        before = self.detector.peers.get(node)
        if (
            before is not None
            and incarnation > before.incarnation
            and self.detector.has_lease(node, now)
        ):
            self._subtract(node, before.incarnation)  # it ended while it could not have left me out
        mine = self.view
        same_view = mine is not None and beat.history == mine.history and beat.epoch <= mine.epoch
        findings = self.detector.heard(node, incarnation, beat, now, same_view=same_view)
        self._findings(findings, now)
        peer = self.detector.peers[node]
        if peer.last is not beat:
            return
        if beat.bans != checksum(self.record.banned) and self.record.banned:
            self._send(node, wire.Bans(self.record.banned))
        self._bring_up_to_date(node, beat)
        view = self.view
        member = None if view is None else view.member(node)
        paxos = self._paxos
        if view is None or paxos is None or member is None or beat.history == view.history:
            return
        if member in self._subtracted and (
            paxos.accepted is None or node in paxos.recovery_reports
        ):
            return
        is_coming = beat.wants == view.history and beat.installed < view.epoch
        if incarnation != member.incarnation or not is_coming:
            self._send(node, wire.RecoveryRequest(view.history, view.epoch))

    def _bring_up_to_date(self, node: str, beat: wire.Heartbeat) -> None:
        """Send ``node`` the newest view of a history that it has missed."""
        view = self.view
        if view is not None and view.history == (beat.history or beat.wants):
            known = view
        else:
            past = self._history_record(beat.history or beat.wants)
            if past is None:
                return
            known = past.view
        if beat.history:
            if beat.epoch < known.epoch:
                self._send(node, wire.Decided(known))
        elif known.member(node) is not None and beat.installed < known.epoch:
            self._send(node, wire.Decided(known))

    # The next view.

    def _renew(self, now: float) -> None:
        """Pause or resume; propose, if a new view is due and it is on me."""
        view, paxos = self.view, self._paxos
        if view is None or paxos is None:
            return
        reachability = self._reachability.assess(
            view,
            subtracted=self._subtracted,
            banned=self.record.banned,
            installed_at=self._installed_at,
            now=now,
        )
        self._withhold_leases(view, paxos, reachability)
        if not reachability.undecided:
            self._set_pause(view, reachability)
        kept = [member.node for member in reachability.kept]
        if paxos.round is not None:
            if paxos.round.asked <= set(kept):
                return
            paxos.round = None
        if not kept or kept[0] != self.me or reachability.undecided or self.paused:
            return
        if now < self._retry_at or any(self.detector.status(n) is not Status.UP for n in kept[1:]):
            return
        out = [member for member in view.members if member.node not in kept]
        if any(s.node not in reachability.ended and self._holds_lease(s, now) for s in out):
            return
        self._propose(view, paxos, reachability, kept, now)

    def _propose(
        self,
        view: View,
        paxos: PaxosInstance,
        reachability: Reachability,
        kept: list[str],
        now: float,
    ) -> None:
        joining: tuple[str, ...] = ()
        if not reachability.out and not reachability.broken:
            joining = self._who_may_join(view)
        wanted = self._wanted_in(view)
        over = {job for job in self._over if view.group(job) is not None}
        if not (reachability.out or joining or wanted or over):
            return
        reasons = [*reachability.out.values(), *(f"{node} joins" for node in joining)]
        reasons += [want.reason for want in wanted]
        reasons += [f"job {job} is over" for job in sorted(over)]
        peers = self.detector.peers
        incarnations = [(node, peers[node].incarnation) for node in joining]
        floors = [beat.installed for node in joining if (beat := peers[node].last) is not None]

        def build(epoch: int) -> View:
            return following(
                view,
                epoch,
                kept=kept,
                joining=incarnations,
                wanted=wanted,
                over=over,
                reason="; ".join(reasons)[:4096],
            )

        self._take(
            paxos.propose(
                kept,
                build,
                floor=max([self.record.installed, *floors]),
                subtracted=self._subtracted_nodes(),
                ended=reachability.ended,
                ends_at=now + self.timing.round_s * (1 + min(self._num_failures, 3)),
            ),
            now,
        )

    def _wanted_in(self, view: View) -> list[WantGroup]:
        for job, want in list(self._wanted.items()):
            objection = objection_to(want, view)
            if objection:
                del self._wanted[job]
                self._act(GroupRefused(job, view.epoch, f"{want.reason}: {objection}"))
        return list(self._wanted.values())

    def _who_may_join(self, view: View) -> tuple[str, ...]:
        links: dict[str, Iterable[str]] = {self.me: self.detector.up()}
        candidates = []
        for node in self.detector.up():
            beat = self.detector.peers[node].last
            assert beat is not None
            links[node] = beat.links
            is_free = not beat.history and beat.wants == view.history
            if is_free and node not in view.nodes and node not in self.record.banned:
                candidates.append(node)
        if not candidates:
            return ()
        return newcomers({node: set(row) for node, row in links.items()}, view.nodes, candidates)

    # Pauses, bans, the end of members.

    def _set_pause(self, view: View, reachability: Reachability) -> None:
        if reachability.majority:
            if self.paused:
                self.paused = ""
                self._act(Resume("a majority can be reached again"))
            return
        names = [member.node for member in reachability.kept]
        reached = [n for n in names if n == self.me or self.detector.status(n) is Status.UP]
        reason = explain_minority(view.members, reached, self._subtracted_nodes())
        if not self.paused:
            self._act(Pause(f"paused: {reason}; {'; '.join(reachability.out.values())}"))
        self.paused = reason

    def _withhold_leases(
        self, view: View, paxos: PaxosInstance, reachability: Reachability
    ) -> None:
        """Grant no leases to those who are to be left out though I hear them, and to those whom I
        accepted to leave out."""
        out = set(self.banned & set(view.nodes))
        if reachability.majority:
            out |= reachability.out.keys()
        if paxos.accepted is not None:
            out |= set(view.nodes) - set(paxos.accepted.view.nodes)
        self.detector.withhold_leases(out)

    def _learn_bans(self, nodes: Iterable[str], now: float) -> None:
        new = sorted(set(nodes) - self.banned)
        if not new:
            return
        known = tuple(sorted({*self.record.banned, *new}))
        self._save(msgspec.structs.replace(self.record, banned=known), [])
        self._act(Note(f"banned: {', '.join(new)}"))
        if self.me in new:
            self._leave(now, "this node is banned from the cluster")
            return
        for node in self.detector.up():
            self._send(node, wire.Bans(known))
        self._renew(now)

    def _findings(self, findings: Iterable[Finding], now: float, *, renew: bool = True) -> None:
        for finding in findings:
            match finding:
                case ProbeIndirectly(target, via, _):
                    for node in via:
                        self._send(node, wire.Probe(target))
                case Changed(node, status, reason):
                    self._act(Note(reason))
                    peer = self.detector.peers[node]
                    if status is Status.DEAD and peer.leased_death:
                        self._subtract(node, peer.incarnation)
        if renew and findings:
            self._renew(now)

    # Histories.

    def _seek(self, now: float) -> None:
        """In no view: ask to be let in somewhere, or found a history."""
        if self.me in self.record.banned:
            return
        peers = self.detector.peers.values()
        observed = merge.observe(peers)
        self.wants = merge.history_to_join(observed) or self.wants
        if any(cluster.history == self.wants for cluster in observed):
            return
        self.wants = ""
        has_waited = now - self._alone_since >= self.timing.settle_s
        if has_waited and merge.may_found(self.me, peers, observed):
            self._found(now, "no other cluster is heard")

    def _found(self, now: float, why: str) -> None:
        view = self._first_view(f"{self.me} founds a cluster: {why}")
        self._install(view, now, told=False)

    def _first_view(self, reason: str) -> View:
        self._num_founded += 1
        history = f"{self.me}-{self.incarnation}-{self._num_founded}"
        return first_view(history, self.me, self.incarnation, self.record.installed + 1, reason)

    def _meet(self, now: float) -> None:
        """Give way to another history as a whole."""
        if self.view is None or self._paxos is None or self._paxos.round is not None:
            return
        peers = self.detector.peers
        observed = merge.observe(peers.values())
        other = merge.cluster_to_join(self.view, bool(self.paused), peers, observed)
        if other is not None:
            self._leave(now, f"this node's cluster joins {', '.join(other.nodes)}")
            self.wants = other.history

    def _continue_alone(self, now: float) -> None:
        view = self.view
        if view is None or not self.paused:
            self._act(Note("this node is not paused: there is nothing to override"))
            return
        fork = self._first_view(f"the operator ordered {self.me} to continue alone: a fork")
        groups = []
        for group in view.groups:
            members = tuple(member for member in group.members if member.node == self.me)
            if members:
                groups.append(
                    wire.JobGroup(group.job, fork.epoch, members, fork.epoch, world=group.world)
                )
        self._leave(now, "the operator ordered a fork")
        fork = msgspec.structs.replace(fork, groups=tuple(groups), fork_of=view.history)
        self._install(fork, now, told=False)

    def _want(self, want: WantGroup, now: float) -> None:
        view = self.view
        if view is None or view.leader != self.me:
            floor = self.record.installed
            self._act(GroupRefused(want.job, floor, "this node does not lead the cluster"))
            return
        self._wanted[want.job] = want
        self._over.discard(want.job)
        self._renew(now)


def checksum(banned: Iterable[str]) -> int:
    """What two nodes compare to see whether they know of the same bans; 0 for none."""
    return zlib.crc32("\n".join(banned).encode()) if banned else 0
