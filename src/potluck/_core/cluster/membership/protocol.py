"""The decisions of one node of a cluster: the members, the next view, and when the node pauses.

``MembershipProtocol.handle(event, now) -> actions`` puts the smaller cores together
(``failure_detector``, ``reachability``, ``paxos``, ``merge``). It sees no socket, clock or disk;
``now`` is this node's monotonic clock in seconds. The protocol and why it is safe:
``docs/membership.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from potluck._core.cluster.membership import events, merge
from potluck._core.cluster.membership.agreement import ViewAgreement
from potluck._core.cluster.membership.claims import digest_of
from potluck._core.cluster.membership.failure_detector import (
    MAX_PEERS,
    Changed,
    FailureDetector,
    Finding,
    ProbeIndirectly,
    Status,
    Timing,
)
from potluck._core.cluster.membership.guard import Guard
from potluck._core.cluster.membership.merge import forked, left_by_ban
from potluck._core.cluster.membership.outbox import Outbox, StableStorage
from potluck._core.cluster.membership.paxos import PaxosInstance
from potluck._core.cluster.membership.pending import PendingChanges
from potluck._core.cluster.membership.reachability import Reachability, ReachabilityTracker
from potluck._core.cluster.membership.view import describe, explain_minority, first_view
from potluck._core.wire import nodes as wire
from potluck._core.wire.nodes import StableRecord, View, ViewMember

_BANNED = (
    "this node is banned from the cluster: `potluck unban` on an admin takes that back, `potluck "
    "join --replace` here enters another cluster"
)


class MembershipProtocol:
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
        self.me = me
        self.timing = timing or Timing()
        self.detector = FailureDetector(self.timing)
        self.paused = ""
        self._outbox = Outbox()
        self._storage = StableStorage(record, self._outbox)
        self._agreement = ViewAgreement(
            me,
            incarnation,
            self._storage,
            self._outbox,
            now,
            holds_lease=self._holds_lease,
            hears=self._hears,
            on_installed=self._installed,
            on_left=self._left,
        )
        self._guard = Guard(self.detector, self._agreement, self._storage)
        self._reachability = ReachabilityTracker(me, self.detector)
        self._pending = PendingChanges(self._outbox)
        self._alone_since = now
        self._installed_at = now
        self._due = now
        self._num_founded = 0
        self._digest = b""
        self._history, self._history_since = "", now
        self._named: set[str] = set()

    @property
    def view(self) -> View | None:
        """The view that this node uses."""
        return self._agreement.view

    @property
    def wants(self) -> str:
        """The history that this node asks to join, while it has no view."""
        return self._agreement.wants

    @property
    def record(self) -> StableRecord:
        """What is on disk, or on its way there."""
        return self._storage.record

    @property
    def banned(self) -> frozenset[str]:
        """The nodes that may not take part."""
        return self._agreement.barred

    def next_wakeup(self) -> float:
        """When a Tick is due."""
        return self._due

    def handle(self, event: events.Event, now: float) -> list[events.Action]:
        """What is to be done about ``event``, in this order. Never raises for one that comes late,
        twice, or from a node that is out."""
        match event:
            case events.Tick():
                self._tick(now)
            case events.Received(node, incarnation, message):
                self._received(node, incarnation, message, now)
            case events.Linked(node, incarnation):
                self.detector.meet(node, incarnation)
            case events.ConnectionRefused(node, incarnation):
                self._findings(self.detector.refused(node, incarnation, now), now)
            case events.Saved(number):
                self._agreement.written(number, now)
                self._agreement.tell_acceptance()
                self._renew(now)
            case events.WantGroup():
                self._want(event, now)
            case events.JobOver(job):
                self._pending.end(job)
                self._renew(now)
            case events.Barred(nodes):
                self._bar(nodes, now)
            case events.ContinueAlone():
                self._continue_alone(now)
            case events.FoundHistory():
                if self.view is None:
                    self._found(now, "ordered")
            case _:
                assert_never(event)
        return self._outbox.take()

    # Time.

    def _tick(self, now: float) -> None:
        late = now - self._due
        self._due = now + self.timing.beat_s
        self._findings(self.detector.tick(now, late), now, renew=False)
        self._beat(now)
        self._agreement.expire(now)
        if self.view is None:
            self._seek(now)
        else:
            self._renew(now)
            self._agreement.tell_acceptance()
            self._meet(now)
            self._part(now)

    def _beat(self, now: float) -> None:
        view = self.view
        number = self.detector.next_beat(now)
        links = self.detector.up()
        for node, peer in self.detector.peers.items():
            if peer.status is Status.DEAD or node in self.banned:
                continue
            echo, held_s, lease = self.detector.echo(node, now)
            self._outbox.send(
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
                    installed=self._agreement.given_up(self.wants),
                    digest=self._digest,
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
        if node in self.banned:
            return
        refusal = self._guard.refusal(node, incarnation, message, now)
        if refusal is not None:
            if refusal.is_false and node not in self._named and len(self._named) < MAX_PEERS:
                self._named.add(node)
                what = f"a message ({type(message).__name__}) of {node} is ignored"
                self._outbox.act(events.Note(f"{what}: {refusal.reason}"))
            return
        match message:
            case wire.Heartbeat():
                self._heard(node, incarnation, message, now)
            case wire.IndirectProbe(target):
                self._outbox.send(target, wire.Ping(node))
            case wire.Ping(origin):
                self._outbox.send(node, wire.Pong(origin))
            case wire.Pong(origin):
                self._outbox.send(origin, wire.Reached(node))
            case wire.Reached(target):
                self._findings(self.detector.reached(target, node, now), now)
            case wire.Decided(view):
                self._agreement.learn(view, now, node)
            case wire.RecoveryRequest():
                self._agreement.asked_for_report(node, message)
            case wire.RecoveryReport():
                self._agreement.reported(node, incarnation, message, now)
                self._renew(now)
            case wire.Prepare() | wire.Promise() | wire.Propose():
                self._agreement.heard(node, incarnation, message, now)
            case wire.Accepted() | wire.Rejected():
                self._agreement.heard(node, incarnation, message, now)
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
            # The incarnation before this one ended while its lease was good: it had accepted no
            # view without me, so its end hides no decision.
            self._agreement.subtract(node, before.incarnation)
        mine = self.view
        same_view = mine is not None and beat.history == mine.history and beat.epoch <= mine.epoch
        findings = self.detector.heard(node, incarnation, beat, now, same_view=same_view)
        self._findings(findings, now)
        peer = self.detector.peers[node]
        if peer.last is not beat:
            return
        self._agreement.bring_up_to_date(node, beat)
        self._agreement.ask_for_report(node, incarnation, beat)

    # Requests and results of the agreement.

    def _holds_lease(self, member: ViewMember, now: float) -> bool:
        """Whether ``member`` may hold a lease from this node: a word that no view without it is
        agreed to. The certainly dead hold none."""
        peer = self.detector.peers.get(member.node)
        if peer is None or member in self._agreement.subtracted or peer.status is Status.DEAD:
            return False
        has_granted = self.detector.has_granted(member.node, now)
        return peer.incarnation == member.incarnation and has_granted

    def _is_up(self, member: ViewMember) -> bool:
        """Whether the link with ``member``, in this incarnation, works."""
        peer = self.detector.peers.get(member.node)
        is_same = peer is not None and peer.incarnation == member.incarnation
        return is_same and self.detector.status(member.node) is Status.UP

    def _hears(self, member: ViewMember, now: float) -> bool:
        """Whether ``member`` was heard in the time of the last two heartbeats."""
        if not self._is_up(member):
            return False
        return now - self.detector.peers[member.node].heard_at <= 2.5 * self.timing.beat_s

    def _installed(self, view: View, now: float) -> tuple[events.Action, ...]:
        self._installed_at = now
        if view.history != self._history:
            self._history, self._history_since = view.history, now
        self._digest = digest_of(view)
        self.detector.members = frozenset(view.nodes)
        self._guard.view_installed(now)
        self._pending.installed(view)
        if not self.paused:
            return ()
        self.paused = ""
        return (events.Resume(f"this node is in {describe(view)}"),)

    def _left(self, now: float) -> None:
        self.paused = ""
        self._digest = b""
        self.detector.members = frozenset()
        self._pending.clear()
        self._alone_since = now

    # The next view.

    def _renew(self, now: float) -> None:
        """Pause or resume; propose, if a new view is due and it is on me."""
        view, paxos = self.view, self._agreement.paxos
        if view is None or paxos is None:
            return
        reachability = self._reachability.assess(
            view,
            subtracted=self._agreement.subtracted,
            banned=self.banned,
            installed_at=self._installed_at,
            now=now,
        )
        self._withhold_leases(view, paxos, reachability)
        if not reachability.undecided:
            self._set_pause(view, reachability)
        kept = [member.node for member in reachability.kept]
        if paxos.proposer.round is not None:
            if paxos.proposer.round.asked <= set(kept):
                return
            # All that were asked must accept, and one of them is out: this round can't succeed.
            paxos.proposer.round = None
        # Only the most senior of the kept members proposes, so that proposers seldom meet.
        if not kept or kept[0] != self.me or reachability.undecided or self.paused:
            return
        others_are_up = all(self.detector.status(node) is Status.UP for node in kept[1:])
        if now < self._agreement.backoff.retry_at or not others_are_up:
            return
        # A member that may hold a lease from me counts on being in the next view: leave it out only
        # when the lease has run out, or its agent has certainly ended.
        out = [member for member in view.members if member.node not in kept]
        if any(s.node not in reachability.ended and self._holds_lease(s, now) for s in out):
            return
        draft = self._pending.draft(self.me, view, reachability, self.detector, self.banned)
        if draft is not None:
            # Slow links need longer rounds: each failure adds one more, up to four.
            attempts = 1 + min(self._agreement.backoff.num_failures, 3)
            self._agreement.propose(
                kept,
                draft.build,
                now,
                floor=draft.floor,
                ended=reachability.ended,
                ends_at=now + self.timing.round_s * attempts,
            )

    # Pauses, bans, the end of members.

    def _set_pause(self, view: View, reachability: Reachability) -> None:
        if reachability.majority:
            if self.paused:
                self.paused = ""
                self._outbox.act(events.Resume("a majority can be reached again"))
            return
        names = [member.node for member in reachability.kept]
        reached = [n for n in names if n == self.me or self.detector.status(n) is Status.UP]
        reason = explain_minority(view.members, reached, self._agreement.subtracted_nodes())
        if not self.paused:
            self._outbox.act(
                events.Pause(f"paused: {reason}; {'; '.join(reachability.out.values())}")
            )
        self.paused = reason

    def _withhold_leases(
        self, view: View, paxos: PaxosInstance, reachability: Reachability
    ) -> None:
        """Grant no leases to members that are to be left out although they are heard, nor to those
        that a view which this node accepted leaves out."""
        out = set(self.banned & set(view.nodes))
        if reachability.majority:
            out |= reachability.out.keys()
        if paxos.acceptor.accepted is not None:
            out |= set(view.nodes) - set(paxos.acceptor.accepted.view.nodes)
        self.detector.withhold_leases(out)

    def _bar(self, nodes: frozenset[str], now: float) -> None:
        new = nodes - self.banned
        self._agreement.barred = nodes
        if new:
            self._outbox.act(events.Note(f"banned: {', '.join(sorted(new))}"))
        if self.me in new:
            self._agreement.leave(now, _BANNED)
            return
        self._renew(now)

    def _findings(self, findings: Iterable[Finding], now: float, *, renew: bool = True) -> None:
        for finding in findings:
            match finding:
                case ProbeIndirectly(target, via, _):
                    for node in via:
                        self._outbox.send(node, wire.IndirectProbe(target))
                case Changed(node, status, reason):
                    self._outbox.act(events.Note(reason))
                    peer = self.detector.peers[node]
                    if status is Status.DEAD and peer.leased_death:
                        self._agreement.subtract(node, peer.incarnation)
        if renew and findings:
            self._renew(now)

    # Histories.

    def _seek(self, now: float) -> None:
        """In no view: ask to be let in somewhere, or found a history."""
        if self.me in self.banned:
            return
        peers = self.detector.peers.values()
        observed = merge.observe(peers)
        self._agreement.wants = merge.history_to_join(observed) or self.wants
        if any(cluster.history == self.wants for cluster in observed):
            return
        self._agreement.wants = ""
        has_waited = now - self._alone_since >= self.timing.settle_s
        if has_waited and merge.may_found(self.me, peers, observed):
            self._found(now, "no other cluster is heard")

    def _found(self, now: float, why: str) -> None:
        view = self._first_view(f"{self.me} founds a cluster: {why}")
        self._agreement.install(view, now, is_known=False)

    def _first_view(self, reason: str) -> View:
        self._num_founded += 1
        history = f"{self.me}-{self._agreement.incarnation}-{self._num_founded}"
        return first_view(
            history, self.me, self._agreement.incarnation, self.record.installed + 1, reason
        )

    def _meet(self, now: float) -> None:
        """Give way to another history as a whole."""
        if (
            self.view is None
            or self._agreement.paxos is None
            or self._agreement.paxos.proposer.round is not None
        ):
            return
        peers = self.detector.peers
        observed = merge.observe(peers.values())
        origin = self._storage.history(self.view.fork_of)
        forked_from = () if origin is None else origin.view.nodes
        other = merge.cluster_to_join(
            self.view,
            bool(self.paused),
            peers,
            observed,
            forked_from,
            is_fresh=now - self._history_since <= self.timing.fresh_s,
        )
        if other is not None:
            reason = f"this node's cluster joins {', '.join(other.nodes)}"
            # A paused node's workers trained nothing that a fork of its history does not have. All
            # others trained on a side that ends here, and states of two sides are never mixed.
            resync = bool(self.view.fork_of) or not self.paused
            self._agreement.leave(now, reason, resync=resync)
            self._agreement.wants = other.history

    def _part(self, now: float) -> None:
        """Go on as a fork if banned members keep all others, which are here, from a decision: the
        others are no majority, or a round failed for want of a banned member's record."""
        view, subtracted = self.view, self._agreement.subtracted
        if view is None:
            return
        left = left_by_ban(view, subtracted, self.banned)
        is_here = all(member.node == self.me or self._is_up(member) for member in left)
        is_first = bool(left) and left[0].node == self.me
        is_blocked = not self._agreement.awaited.isdisjoint(self.banned)
        if is_here and ((self.paused and is_first) or is_blocked):
            banned = ", ".join(sorted(self.banned & set(view.nodes)))
            self._fork(view, now, f"{self.me} goes on without {banned}, banned: a fork")

    def _continue_alone(self, now: float) -> None:
        view = self.view
        if view is None or not self.paused:
            self._outbox.act(events.Note("this node is not paused: there is nothing to override"))
            return
        self._fork(view, now, f"the operator ordered {self.me} to continue alone: a fork")

    def _fork(self, view: View, now: float, reason: str) -> None:
        fork = forked(view, self._first_view(reason))
        self._agreement.leave(now, reason, resync=False)
        self._agreement.install(fork, now, is_known=False)

    def _want(self, want: events.WantGroup, now: float) -> None:
        view = self.view
        if view is None or view.leader != self.me:
            floor = self.record.installed
            self._outbox.act(
                events.GroupRefused(want.job, floor, "this node does not lead the cluster")
            )
            return
        self._pending.want(want)
        self._renew(now)
