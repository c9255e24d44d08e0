"""One member's part in deciding views: it votes, takes what was decided, remembers on disk.

``Node`` (``node.py``) builds on it: it says when to propose, and what. ``docs/membership.md``.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection

import msgspec

from potluck.cluster.views.events import Action, Install, Leave, Note, Resume, Save, Send, WantGroup
from potluck.cluster.views.health import Health, Status, Timing
from potluck.cluster.views.succession import Outcome, Succession
from potluck.cluster.views.view import describe
from potluck.wire import nodes as wire
from potluck.wire.nodes import Past, Proposal, Record, Seat, View

MAX_PASTS = 8


class Voter:
    """A node's view, its votes, and its record on disk."""

    def __init__(self, me: str, life: int, record: Record, now: float, timing: Timing) -> None:
        self.me = me
        self.life = life
        self.record = record
        self.timing = timing
        self.health = Health(timing)
        self.view: View | None = None
        self.paused = ""
        self.wants = ""
        self._succession: Succession | None = None
        self._gone: set[Seat] = set()
        self._vows: dict[str, int] = {}
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

    def _dead(self) -> Collection[str]:
        """The members to be subtracted: their end hides no decision."""
        return {seat.node for seat in self._gone}

    # Votes.

    def _vote(
        self,
        node: str,
        life: int,
        message: wire.Prepare | wire.Promise | wire.Propose | wire.Accepted | wire.Rejected,
        now: float,
    ) -> None:
        view, succession = self.view, self._succession
        if view is None or succession is None:
            return
        seat = view.seat(node)
        if seat is None or seat.life != life:
            if isinstance(message, wire.Prepare) and message.lineage == view.lineage:
                self._send(node, wire.Decided(view))
            return
        dead = self._dead()
        match message:
            case wire.Prepare(lineage, parent, _):
                if lineage != view.lineage:
                    return
                if parent < view.epoch:
                    self._send(node, wire.Decided(view))
                elif parent == view.epoch:
                    self._take(succession.prepare(node, message), now)
            case wire.Promise():
                self._take(succession.promised_by(node, message, dead), now)
            case wire.Propose(proposal):
                if proposal.view.lineage == view.lineage and proposal.parent == view.epoch:
                    self._take(
                        succession.proposed(node, proposal, self._object(proposal, now)), now
                    )
            case wire.Accepted(ballot):
                self._take(succession.accepted_by(node, ballot, dead), now)
            case wire.Rejected():
                self._take(succession.rejected_by(node, message), now)

    def _object(self, proposal: Proposal, now: float) -> str:
        """Why I don't agree to a proposal; empty if I do."""
        assert self.view is not None
        mine = self.view.seat(self.me)
        if mine not in proposal.view.seats:
            return "I am not in it"
        accepted = self._succession.accepted if self._succession is not None else None
        if accepted is not None and accepted.view == proposal.view:
            return ""
        for seat in proposal.view.seats:
            if seat.node in self.record.banned:
                return f"{seat.node} is banned"
        for seat in self.view.seats:
            if seat in proposal.view.seats or seat.node in proposal.dead:
                continue
            if self._holds_lease(seat, now):
                return f"I hear {seat.node}"
        return ""

    def _holds_lease(self, seat: Seat, now: float) -> bool:
        """Whether I may have granted ``seat`` that I agree to no view without it."""
        peer = self.health.peers.get(seat.node)
        if peer is None or seat in self._gone or peer.status is Status.DEAD:
            return False
        return peer.life == seat.life and self.health.has_granted(seat.node, now)

    # What was decided.

    def _take(self, outcome: Outcome, now: float) -> None:
        """Carry out what a succession came to."""
        succession = self._succession
        assert succession is not None
        self._actions += outcome.actions
        if outcome.failed:
            self._num_failures += 1
            # Two that go on proposing against each other must not keep step.
            jitter = zlib.crc32(f"{self.me} {succession.highest}".encode()) % 100 / 500
            self._retry_at = now + min(0.1 * self._num_failures, 1.0) + jitter
            if outcome.failed != self._failure:
                self._failure = outcome.failed
                self._act(Note(f"no new view yet: {outcome.failed}"))
        if outcome.accept is not None and succession.accept(outcome.accept):
            past = Past(succession.view, outcome.accept)
            self._save(self._with_past(past), outcome.accept)
        if outcome.decided is not None:
            if outcome.decided.seat(self.me) is not None:
                self._install(outcome.decided, now, told=False)
                return
            for node in sorted({*succession.view.nodes, *outcome.decided.nodes} - {self.me}):
                self._send(node, wire.Decided(outcome.decided))
            self._learn(outcome.decided, now, self.me)

    def _install(self, view: View, now: float, *, told: bool) -> None:
        """Use ``view`` from now on. Nobody hears of it before it is on disk."""
        before = self.view
        self.view = view
        self._succession = Succession(self.me, view)
        self._gone = {seat for seat in self._gone if seat in view.seats}
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
        record = self._with_past(Past(view))
        self._save(msgspec.structs.replace(record, installed=view.epoch), after)

    def _learn(self, view: View, now: float, node: str) -> None:
        """``view`` was decided; ``node`` says so."""
        mine = view.seat(self.me)
        is_in = (
            mine is not None
            and mine.life == self.life
            and mine.joined > self._vows.get(view.lineage, -1)
            and view.epoch > self.record.installed
        )
        if self.view is None:
            if is_in and self.wants == view.lineage:
                self._install(view, now, told=True)
                return
            vow = self._vows.get(view.lineage, -1)
            if mine is not None and mine.joined <= vow:
                self._send(node, wire.Testimony(view.lineage, vow, self._past(view.lineage)))
        elif self.view.lineage == view.lineage:
            if view.epoch <= self.view.epoch:
                return
            if is_in:
                self._install(view, now, told=True)
                return
            self._leave(now, f"{describe(view)} is without this node: {view.reason}")
            self.wants = view.lineage
        past = self._past(view.lineage)
        if past is not None and past.view.epoch < view.epoch:
            self._save(self._with_past(Past(view)), [])

    def _testify(self, node: str, lineage: str, epoch: int) -> None:
        if self.view is not None and self.view.lineage == lineage:
            if self.view.epoch > epoch:
                self._send(node, wire.Decided(self.view))
            return
        self._vows[lineage] = max(epoch, self._vows.get(lineage, -1))
        self._send(node, wire.Testimony(lineage, epoch, self._past(lineage)))

    def _hear_testimony(self, node: str, life: int, told: wire.Testimony, now: float) -> None:
        view, succession = self.view, self._succession
        if view is None or succession is None or told.lineage != view.lineage:
            return
        seat = view.seat(node)
        if seat is None or seat.joined > told.epoch or life < seat.life:
            return
        past = told.past
        if past is not None and past.view.epoch > view.epoch:
            self._learn(past.view, now, node)
            return
        accepted = None
        if past is not None and past.view.epoch == view.epoch:
            accepted = past.accepted
        succession.testimony[node] = accepted
        self._gone.add(seat)

    def _bury(self, node: str, life: int) -> None:
        """The end of ``life`` of ``node`` is known and hides no decision."""
        seat = None if self.view is None else self.view.seat(node)
        if seat is not None and seat.life == life:
            self._gone.add(seat)

    def _leave(self, now: float, reason: str) -> None:
        """Be in no view from now on."""
        if self.view is None:
            return
        self._act(Leave(reason, resync=bool(self.view.fork_of)))
        self.view, self._succession, self.paused = None, None, ""
        self._gone.clear()
        self._wanted.clear()
        self._over.clear()
        self._alone_since = now

    # The disk.

    def _past(self, lineage: str) -> Past | None:
        for past in self.record.pasts:
            if past.view.lineage == lineage:
                return past
        return None

    def _with_past(self, past: Past) -> Record:
        others = [p for p in self.record.pasts if p.view.lineage != past.view.lineage]
        return msgspec.structs.replace(self.record, pasts=(*others, past)[-MAX_PASTS:])

    def _save(self, record: Record, after: list[Action] | Proposal) -> None:
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
                and self._succession is not None
                and self.view.lineage == after.view.lineage
                and self.view.epoch == after.parent
            ):
                self._take(self._succession.saved(after, self._dead()), now)
