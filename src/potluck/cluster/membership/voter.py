"""One member's part in deciding views: it votes, takes what was decided, remembers on disk.

``MembershipProtocol`` (``protocol.py``) builds on it: it says when to propose, and what.
``docs/membership.md``.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection

import msgspec

from potluck.cluster.membership.events import (
    Action,
    Install,
    Leave,
    Note,
    Resume,
    Save,
    Send,
    WantGroup,
)
from potluck.cluster.membership.failure_detector import FailureDetector, Status, Timing
from potluck.cluster.membership.paxos import Effects, PaxosInstance
from potluck.cluster.membership.view import describe
from potluck.wire import nodes as wire
from potluck.wire.nodes import HistoryRecord, Proposal, StableRecord, View, ViewMember

MAX_HISTORIES = 8


class Voter:
    """A node's view, its votes, and its record on disk."""

    def __init__(
        self, me: str, incarnation: int, record: StableRecord, now: float, timing: Timing
    ) -> None:
        self.me = me
        self.incarnation = incarnation
        self.record = record
        self.timing = timing
        self.detector = FailureDetector(timing)
        self.view: View | None = None
        self.paused = ""
        self.wants = ""
        self._paxos: PaxosInstance | None = None
        self._subtracted: set[ViewMember] = set()
        self._resigned: dict[str, int] = {}
        self._wanted: dict[str, WantGroup] = {}
        self._over: set[str] = set()
        self._alone_since = now
        self._installed_at = now
        self._retry_at = now
        self._num_failures = 0
        self._failure = ""
        self._num_saves = 0
        self._after: dict[int, list[Action] | Proposal] = {}
        self._actions: list[Action] = []

    @property
    def banned(self) -> frozenset[str]:
        """The nodes that this one knows to be banned."""
        return frozenset(self.record.banned)

    def _act(self, action: Action) -> None:
        self._actions.append(action)

    def _send(self, node: str, message: wire.NodeMessage) -> None:
        self._actions.append(Send(node, message))

    def _subtracted_nodes(self) -> Collection[str]:
        """The members to be subtracted: their end hides no decision."""
        return {member.node for member in self._subtracted}

    # Votes.

    def _vote(
        self,
        node: str,
        incarnation: int,
        message: wire.Prepare | wire.Promise | wire.Propose | wire.Accepted | wire.Rejected,
        now: float,
    ) -> None:
        view, paxos = self.view, self._paxos
        if view is None or paxos is None:
            return
        member = view.member(node)
        if member is None or member.incarnation != incarnation:
            if isinstance(message, wire.Prepare) and message.history == view.history:
                self._send(node, wire.Decided(view))
            return
        subtracted = self._subtracted_nodes()
        match message:
            case wire.Prepare(history, parent, _):
                if history != view.history:
                    return
                if parent < view.epoch:
                    self._send(node, wire.Decided(view))
                elif parent == view.epoch:
                    self._take(paxos.prepare(node, message), now)
            case wire.Promise():
                self._take(paxos.promised_by(node, message, subtracted), now)
            case wire.Propose(proposal):
                if proposal.view.history == view.history and proposal.parent == view.epoch:
                    self._take(paxos.proposed(node, proposal, self._object(proposal, now)), now)
            case wire.Accepted(ballot):
                self._take(paxos.accepted_by(node, ballot, subtracted), now)
            case wire.Rejected():
                self._take(paxos.rejected_by(node, message), now)

    def _object(self, proposal: Proposal, now: float) -> str:
        """Why I don't agree to a proposal; empty if I do."""
        assert self.view is not None
        mine = self.view.member(self.me)
        if mine not in proposal.view.members:
            return "I am not in it"
        accepted = self._paxos.accepted if self._paxos is not None else None
        if accepted is not None and accepted.view == proposal.view:
            return ""
        for member in proposal.view.members:
            if member.node in self.record.banned:
                return f"{member.node} is banned"
        for member in self.view.members:
            if member in proposal.view.members or member.node in proposal.ended:
                continue
            if self._holds_lease(member, now):
                return f"I hear {member.node}"
        return ""

    def _holds_lease(self, member: ViewMember, now: float) -> bool:
        """Whether I may have granted ``member`` that I agree to no view without it."""
        peer = self.detector.peers.get(member.node)
        if peer is None or member in self._subtracted or peer.status is Status.DEAD:
            return False
        return peer.incarnation == member.incarnation and self.detector.has_granted(
            member.node, now
        )

    # What was decided.

    def _take(self, effects: Effects, now: float) -> None:
        """Carry out what a step of Paxos came to."""
        paxos = self._paxos
        assert paxos is not None
        self._actions += effects.actions
        if effects.failed:
            self._num_failures += 1
            # Two that go on proposing against each other must not keep step.
            jitter = zlib.crc32(f"{self.me} {paxos.highest}".encode()) % 100 / 500
            self._retry_at = now + min(0.1 * self._num_failures, 1.0) + jitter
            if effects.failed != self._failure:
                self._failure = effects.failed
                self._act(Note(f"no new view yet: {effects.failed}"))
        if effects.accept is not None and paxos.accept(effects.accept):
            past = HistoryRecord(paxos.view, effects.accept)
            self._save(self._with_history(past), effects.accept)
        if effects.decided is not None:
            if effects.decided.member(self.me) is not None:
                self._install(effects.decided, now, told=False)
                return
            for node in sorted({*paxos.view.nodes, *effects.decided.nodes} - {self.me}):
                self._send(node, wire.Decided(effects.decided))
            self._learn(effects.decided, now, self.me)

    def _install(self, view: View, now: float, *, told: bool) -> None:
        """Use ``view`` from now on. Nobody hears of it before it is on disk."""
        before = self.view
        self.view = view
        self._paxos = PaxosInstance(self.me, view)
        self._subtracted = {member for member in self._subtracted if member in view.members}
        self._installed_at, self._retry_at, self._num_failures = now, now, 0
        self._failure, self.wants = "", ""
        after: list[Action] = []
        if not told:
            others = {*view.nodes, *(before.nodes if before is not None else ())} - {self.me}
            after += [Send(node, wire.Decided(view)) for node in sorted(others)]
        after.append(Install(view, f"{describe(view)}: {view.reason}"))
        if self.paused:
            after.append(Resume(f"this node is in {describe(view)}"))
            self.paused = ""
        self._wanted = {
            job: want
            for job, want in self._wanted.items()
            if (group := view.group(job)) is None or group.members != want.members
        }
        self._over = {job for job in self._over if view.group(job) is not None}
        record = self._with_history(HistoryRecord(view))
        self._save(msgspec.structs.replace(record, installed=view.epoch), after)

    def _learn(self, view: View, now: float, node: str) -> None:
        """``view`` was decided; ``node`` says so."""
        mine = view.member(self.me)
        is_in = (
            mine is not None
            and mine.incarnation == self.incarnation
            and mine.joined > self._resigned.get(view.history, -1)
            and view.epoch > self.record.installed
        )
        if self.view is None:
            if is_in and self.wants == view.history:
                self._install(view, now, told=True)
                return
            resigned = self._resigned.get(view.history, -1)
            if mine is not None and mine.joined <= resigned:
                self._send(
                    node,
                    wire.RecoveryReport(view.history, resigned, self._history_record(view.history)),
                )
        elif self.view.history == view.history:
            if view.epoch <= self.view.epoch:
                return
            if is_in:
                self._install(view, now, told=True)
                return
            self._leave(now, f"{describe(view)} is without this node: {view.reason}")
            self.wants = view.history
        past = self._history_record(view.history)
        if past is not None and past.view.epoch < view.epoch:
            self._save(self._with_history(HistoryRecord(view)), [])

    def _report_for_recovery(self, node: str, history: str, epoch: int) -> None:
        if self.view is not None and self.view.history == history:
            if self.view.epoch > epoch:
                self._send(node, wire.Decided(self.view))
            return
        self._resigned[history] = max(epoch, self._resigned.get(history, -1))
        self._send(node, wire.RecoveryReport(history, epoch, self._history_record(history)))

    def _recovery_reported(
        self, node: str, incarnation: int, told: wire.RecoveryReport, now: float
    ) -> None:
        view, paxos = self.view, self._paxos
        if view is None or paxos is None or told.history != view.history:
            return
        member = view.member(node)
        if member is None or member.joined > told.epoch or incarnation < member.incarnation:
            return
        past = told.past
        if past is not None and past.view.epoch > view.epoch:
            self._learn(past.view, now, node)
            return
        accepted = None
        if past is not None and past.view.epoch == view.epoch:
            accepted = past.accepted
        paxos.recovery_reports[node] = accepted
        self._subtracted.add(member)

    def _subtract(self, node: str, incarnation: int) -> None:
        """The end of ``incarnation`` of ``node`` is known and hides no decision."""
        member = None if self.view is None else self.view.member(node)
        if member is not None and member.incarnation == incarnation:
            self._subtracted.add(member)

    def _leave(self, now: float, reason: str) -> None:
        """Be in no view from now on."""
        if self.view is None:
            return
        self._act(Leave(reason, resync=bool(self.view.fork_of)))
        self.view, self._paxos, self.paused = None, None, ""
        self._subtracted.clear()
        self._wanted.clear()
        self._over.clear()
        self._alone_since = now

    # The disk.

    def _history_record(self, history: str) -> HistoryRecord | None:
        for past in self.record.histories:
            if past.view.history == history:
                return past
        return None

    def _with_history(self, past: HistoryRecord) -> StableRecord:
        others = [p for p in self.record.histories if p.view.history != past.view.history]
        return msgspec.structs.replace(self.record, histories=(*others, past)[-MAX_HISTORIES:])

    def _save(self, record: StableRecord, after: list[Action] | Proposal) -> None:
        self.record = record
        self._num_saves += 1
        self._after[self._num_saves] = after
        self._act(Save(self._num_saves, record))

    def _is_barred(self, action: Action) -> bool:
        """A view with a node that was banned meanwhile is not used; the next one will be."""
        return isinstance(action, Install) and bool(self.banned & set(action.view.nodes))

    def _written(self, number: int, now: float) -> None:
        for each in sorted(n for n in self._after if n <= number):
            after = self._after.pop(each)
            if isinstance(after, list):
                self._actions += [action for action in after if not self._is_barred(action)]
            elif (
                self.view is not None
                and self._paxos is not None
                and self.view.history == after.view.history
                and self.view.epoch == after.parent
            ):
                self._take(self._paxos.saved(after, self._subtracted_nodes()), now)
