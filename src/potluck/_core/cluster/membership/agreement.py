"""``ViewAgreement``: the view that a node uses, and its part in deciding the next view by Paxos.

It knows no time-outs and no heartbeats: ``protocol.py`` decides when to propose, and which view.
The model check (``tests/unit/cluster/membership/test_model.py``) drives this class through all
orders of events.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection

import msgspec

from potluck._core.cluster.membership.claims import digest_of
from potluck._core.cluster.membership.events import Action, Install, Leave, Note, Send
from potluck._core.cluster.membership.outbox import Outbox, StableStorage
from potluck._core.cluster.membership.paxos import Build, Effects, PaxosInstance
from potluck._core.cluster.membership.view import describe
from potluck._core.wire import nodes as wire
from potluck._core.wire.nodes import HistoryRecord, Proposal, View, ViewMember


class Backoff:
    """The delays of one node, ``me``."""

    def __init__(self, me: str, now: float) -> None:
        self.num_failures = 0
        self.retry_at = now
        self._me = me
        self._reason = ""

    def reset(self, now: float) -> None:
        """There is a new view: nothing has failed in it yet."""
        self.num_failures, self.retry_at, self._reason = 0, now, ""

    def failed(self, reason: str, number: int, now: float) -> bool:
        """The attempt of ballot ``number`` failed. True if ``reason`` is not that of the last."""
        self.num_failures += 1
        # Proposers that outbid each other must not keep step: part of the delay differs by node.
        jitter = zlib.crc32(f"{self._me} {number}".encode()) % 100 / 500
        self.retry_at = now + min(0.1 * self.num_failures, 1.0) + jitter
        is_new, self._reason = reason != self._reason, reason
        return is_new


HoldsLease = Callable[[ViewMember, float], bool]
"""``holds_lease(member, now)``: whether the member may hold a lease from this node, which is the
promise not to accept a view without it."""
Hears = Callable[[ViewMember, float], bool]
"""``hears(member, now)``: whether the member was heard just now, in this incarnation."""


class ViewAgreement:
    """The view of ``me`` in this ``incarnation`` of its agent.

    ``subtracted`` are members whose end is certain and hides no decision. ``wants`` is the history
    that a node without a view asks to join. ``resigned``: in each history the epoch up to which
    this node has announced that it uses no membership, with what it had accepted, so it must
    not act on that membership afterwards. ``barred`` are the nodes that may be in no view.
    ``awaited`` are the members without whose record this node could decide nothing when it tried.
    """

    def __init__(
        self,
        me: str,
        incarnation: int,
        storage: StableStorage,
        outbox: Outbox,
        now: float,
        *,
        holds_lease: HoldsLease,
        hears: Hears = lambda member, now: True,
        on_installed: Callable[[View, float], tuple[Action, ...]] = lambda view, now: (),
        on_left: Callable[[float], None] = lambda now: None,
    ) -> None:
        """``on_installed`` may add actions that wait for the disk like the view itself."""
        self.me = me
        self.incarnation = incarnation
        self.view: View | None = None
        self.paxos: PaxosInstance | None = None
        self.subtracted: set[ViewMember] = set()
        self.resigned: dict[str, int] = {}
        self.wants = ""
        self.barred: frozenset[str] = frozenset()
        self.awaited: frozenset[str] = frozenset()
        self.backoff = Backoff(me, now)
        self._storage = storage
        self._outbox = outbox
        self._holds_lease = holds_lease
        self._hears = hears
        self._on_installed = on_installed
        self._on_left = on_left

    def subtracted_nodes(self) -> Collection[str]:
        """The nodes of ``subtracted``."""
        return {member.node for member in self.subtracted}

    def given_up(self, history: str) -> int:
        """The highest epoch that this node ever used, or that it can't use in ``history`` any more:
        to join, it needs a higher one."""
        return max(self._storage.record.installed, self.resigned.get(history, 0))

    def subtract(self, node: str, incarnation: int) -> None:
        """This ``incarnation`` of ``node`` ended while its lease for this node was good."""
        member = None if self.view is None else self.view.member(node)
        if member is not None and member.incarnation == incarnation:
            self._subtract(member)

    def _subtract(self, member: ViewMember) -> None:
        assert self.paxos is not None
        self.subtracted.add(member)
        self.paxos.proposer.lost(member.node)

    # Paxos.

    def tell_acceptance(self) -> None:
        """Tell the members what this node accepted, once that is on disk: they believe no proposer
        that a view is decided before all that stay have reported it."""
        view, paxos = self.view, self.paxos
        accepted = None if paxos is None else paxos.acceptor.accepted
        if view is None or accepted is None or self._storage.is_waiting(accepted):
            return
        vote = wire.Accepted(accepted.ballot, digest_of(accepted.view))
        for node in accepted.view.nodes:
            if node not in (self.me, accepted.ballot[1]) and view.member(node) is not None:
                self._outbox.send(node, vote)

    def propose(
        self,
        asked: Collection[str],
        build: Build,
        now: float,
        *,
        floor: int,
        ended: Collection[str],
        ends_at: float,
    ) -> None:
        """Propose the view that ``build(epoch)`` makes; see ``PaxosInstance``."""
        assert self.paxos is not None
        subtracted = self.subtracted_nodes()
        effects = self.paxos.propose(
            asked,
            build,
            floor=max(floor, self._storage.record.installed),
            subtracted=subtracted,
            ended=ended,
            ends_at=ends_at,
        )
        self._take(effects, now)

    def expire(self, now: float) -> None:
        """Give an attempt up that took too long."""
        if self.paxos is not None:
            self._take(self.paxos.proposer.expire(now), now)

    def heard(
        self,
        node: str,
        incarnation: int,
        message: wire.Prepare | wire.Promise | wire.Propose | wire.Accepted | wire.Rejected,
        now: float,
    ) -> None:
        """A message of Paxos. One from outside the view, or about another view, has no effect."""
        view, paxos = self.view, self.paxos
        if view is None or paxos is None:
            return
        member = view.member(node)
        if member is None or member.incarnation != incarnation:
            if isinstance(message, wire.Prepare) and message.history == view.history:
                self._outbox.send(node, wire.Decided(view))
            return
        subtracted = self.subtracted_nodes()
        match message:
            case wire.Prepare(history, parent, _):
                if history != view.history:
                    return
                if parent < view.epoch:
                    self._outbox.send(node, wire.Decided(view))
                elif parent == view.epoch:
                    self._take(paxos.prepare(node, message), now)
            case wire.Promise():
                self._take(paxos.promised_by(node, message, subtracted), now)
            case wire.Propose(proposal):
                if proposal.view.history == view.history and proposal.parent == view.epoch:
                    objection = self._objection(proposal, view, paxos, now)
                    self._take(paxos.proposed(node, proposal, objection), now)
            case wire.Accepted(ballot):
                self._take(paxos.accepted_by(node, ballot, subtracted), now)
            case wire.Rejected():
                self._take(paxos.rejected_by(node, message), now)

    def _objection(self, proposal: Proposal, view: View, paxos: PaxosInstance, now: float) -> str:
        """Why this node does not accept ``proposal``; empty if it does."""
        if view.member(self.me) not in proposal.view.members:
            return "I am not in it"
        accepted = paxos.acceptor.accepted
        if accepted is not None and accepted.view == proposal.view:
            return ""  # it has accepted this view before, which may be decided: too late to object
        for member in proposal.view.members:
            if member.node in self.barred:
                return f"{member.node} is banned"
        for member in view.members:
            if member in proposal.view.members:
                continue
            if member.node in proposal.ended and not self._hears(member, now):
                continue  # the proposer's word counts for a member that has fallen silent here, too
            if self._holds_lease(member, now):
                return f"I hear {member.node}"
        for member in proposal.view.members if proposal.fresh else ():
            if member not in view.members and not self._hears(member, now):
                return f"I do not hear {member.node}"
        return ""

    def _take(self, effects: Effects, now: float) -> None:
        """Carry out what a step of Paxos came to."""
        paxos = self.paxos
        assert paxos is not None
        self._outbox.act(*effects.actions)
        if effects.failed:
            self.awaited = effects.awaited
        if effects.failed and self.backoff.failed(effects.failed, paxos.proposer.highest, now):
            self._outbox.act(Note(f"no new view yet: {effects.failed}"))
        if effects.accept is not None and paxos.acceptor.accept(effects.accept):
            accepted = HistoryRecord(paxos.view, effects.accept)
            self._storage.save(self._storage.with_history(accepted), effects.accept)
        if effects.decided is not None:
            if effects.decided.member(self.me) is not None:
                self.install(effects.decided, now, is_known=False)
                return
            # The decision of another proposer, completed by this one: it is without this node.
            for node in sorted({*paxos.view.nodes, *effects.decided.nodes} - {self.me}):
                self._outbox.send(node, wire.Decided(effects.decided))
            self.learn(effects.decided, now, self.me)

    def written(self, number: int, now: float) -> None:
        """Save ``number`` and all before it are on disk: do what waited for that."""
        for then in self._storage.written(number):
            if isinstance(then, tuple):
                self._outbox.act(*(action for action in then if not self._is_barred(action)))
            elif (
                self.view is not None
                and self.paxos is not None
                and self.view.history == then.view.history
                and self.view.epoch == then.parent
            ):
                self._take(self.paxos.saved(then, self.subtracted_nodes()), now)

    def _is_barred(self, action: Action) -> bool:
        """A view with a node that was banned meanwhile is not used; the next one will be."""
        return isinstance(action, Install) and not self.barred.isdisjoint(action.view.nodes)

    # Decided views.

    def install(self, view: View, now: float, *, is_known: bool) -> None:
        """Use ``view`` from now on. No node and no worker hears of it before it is on disk.
        ``is_known``: it came from another node, which sends it to the other nodes as well."""
        before = self.view
        self.view, self.paxos = view, PaxosInstance(self.me, view)
        self.subtracted &= set(view.members)
        self.wants, self.awaited = "", frozenset()
        self.backoff.reset(now)
        then: list[Action] = []
        if not is_known:
            others = {*view.nodes, *(before.nodes if before is not None else ())} - {self.me}
            then += [Send(node, wire.Decided(view)) for node in sorted(others)]
        then.append(Install(view, f"{describe(view)}: {view.reason}"))
        then += self._on_installed(view, now)
        record = self._storage.with_history(HistoryRecord(view))
        self._storage.save(msgspec.structs.replace(record, installed=view.epoch), tuple(then))

    def learn(self, view: View, now: float, node: str) -> None:
        """``view`` was decided, by a message of ``node``."""
        storage = self._storage
        mine = view.member(self.me)
        resigned = self.resigned.get(view.history, -1)
        # Of this incarnation, and of a membership that a recovery report has not given up. Views
        # come late and doubled: epochs only rise.
        is_in = (
            mine is not None
            and mine.incarnation == self.incarnation
            and mine.joined > resigned
            and view.epoch > storage.record.installed
        )
        if self.view is None:
            if is_in and self.wants == view.history:
                self.install(view, now, is_known=True)
                return
            # The others still count on a membership that this node has given up: tell them so.
            if mine is not None and mine.joined <= resigned:
                report = wire.RecoveryReport(view.history, resigned, storage.history(view.history))
                self._outbox.send(node, report)
        elif self.view.history == view.history:
            if view.epoch <= self.view.epoch:
                return
            if is_in:
                self.install(view, now, is_known=True)
                return
            self.leave(now, f"{describe(view)} is without this node: {view.reason}")
            self.wants = view.history
        # Kept although this node is not in it: a node that comes back can get it.
        known = storage.history(view.history)
        if known is not None and known.view.epoch < view.epoch:
            storage.save(storage.with_history(HistoryRecord(view)))

    def bring_up_to_date(self, node: str, beat: wire.Heartbeat) -> None:
        """Send ``node`` the newest view of a history that it has missed."""
        view = self.view
        if view is not None and view.history == (beat.history or beat.wants):
            known = view
        else:
            recorded = self._storage.history(beat.history or beat.wants)
            if recorded is None:
                return
            known = recorded.view
        if beat.history:
            if beat.epoch < known.epoch:
                self._outbox.send(node, wire.Decided(known))
        elif known.member(node) is not None and beat.installed < known.epoch:
            self._outbox.send(node, wire.Decided(known))

    def leave(self, now: float, reason: str, *, resync: bool | None = None) -> None:
        """Be in no view from now on. ``resync``: workers must drop their state; if it is not given,
        workers of a fork must."""
        if self.view is None:
            return
        must_resync = bool(self.view.fork_of) if resync is None else resync
        self._outbox.act(Leave(reason, must_resync))
        self.view, self.paxos = None, None
        self.subtracted.clear()
        self._on_left(now)

    # Recovery: members that ended, and what they had accepted.

    def ask_for_report(self, node: str, incarnation: int, beat: wire.Heartbeat) -> None:
        """``node`` sent ``beat``: ask for its recovery report, if the report is missing here."""
        view = self.view
        member = None if view is None else view.member(node)
        paxos = self.paxos
        if view is None or paxos is None or member is None or beat.history == view.history:
            return
        # A member of my view uses another history, or none. What it had accepted here may be
        # needed: ask for its recovery report. Not if that would tell nothing new: its end hides no
        # decision and there is no proposal to recover, or the report has come.
        if member in self.subtracted and (
            paxos.acceptor.accepted is None or node in paxos.proposer.reports
        ):
            return
        # A new member that has not installed the view yet: Decided is on its way.
        is_coming = beat.wants == view.history and beat.installed < view.epoch
        if incarnation != member.incarnation or not is_coming:
            self._outbox.send(node, wire.RecoveryRequest(view.history, view.epoch))

    def asked_for_report(self, node: str, request: wire.RecoveryRequest) -> None:
        """``node`` counts this node as a member of its view. Answer with a newer view if there is
        one; else with a recovery report: this node is no member any more, and what it had
        accepted."""
        history, epoch = request.history, request.epoch
        if self.view is not None and self.view.history == history:
            if self.view.epoch > epoch:
                self._outbox.send(node, wire.Decided(self.view))
            return
        # From here on the report has to stay true: no membership that old is ever used again.
        self.resigned[history] = max(epoch, self.resigned.get(history, -1))
        report = wire.RecoveryReport(history, epoch, self._storage.history(history))
        self._outbox.send(node, report)

    def reported(
        self, node: str, incarnation: int, report: wire.RecoveryReport, now: float
    ) -> None:
        """``node`` is no member any more, and reports what it had accepted: subtract it."""
        view, paxos = self.view, self.paxos
        if view is None or paxos is None or report.history != view.history:
            return
        member = view.member(node)
        if member is None or member.joined > report.epoch or incarnation < member.incarnation:
            return  # a report of an earlier membership has no meaning for this one
        found = report.found
        if found is not None and found.view.epoch > view.epoch:
            self.learn(found.view, now, node)
            return
        is_same = found is not None and found.view.epoch == view.epoch
        paxos.proposer.reports[node] = found.accepted if found is not None and is_same else None
        self._subtract(member)
