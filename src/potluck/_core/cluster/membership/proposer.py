"""The proposer of single-decree Paxos: one member's attempts to have a view decided.

Phase 1 collects promises, and with them what older ballots left behind (``recovery.py``). Phase 2
offers one view to all members that stay. Pure: messages in, ``Effects`` out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from potluck._core.cluster.membership.election import explain_minority, has_majority
from potluck._core.cluster.membership.events import Action
from potluck._core.cluster.membership.recovery import Evidence, quorum, recover
from potluck._core.wire.nodes import Ballot, Prepare, Promise, Proposal, Rejected, View

Build = Callable[[int], View]
"""Makes the view that a proposer wants, with the epoch it is given."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What one step came to: messages to send; a proposal that this node is to accept itself; a
    decided view; why an attempt failed, and the members without whose record it can't succeed."""

    actions: tuple[Action, ...] = ()
    accept: Proposal | None = None
    decided: View | None = None
    failed: str = ""
    awaited: frozenset[str] = frozenset()


NO_EFFECTS = Effects()


@dataclass(slots=True)
class Round:
    """One attempt. ``asked`` are the members that stay, which all have to answer; ``ended`` those
    known to have ended; ``proposal`` is what is offered once all ``asked`` have promised."""

    ballot: Ballot
    asked: frozenset[str]
    ended: frozenset[str]
    build: Build
    ends_at: float
    evidence: Evidence
    proposal: Proposal | None = None
    accepted: set[str] = field(default_factory=set)


class Proposer:
    """Attempts of ``me`` to decide the successor of ``view``. ``highest`` is the newest number that
    any ballot was seen to have; ``reports`` what was found on the disks of members that ended."""

    def __init__(self, me: str, view: View) -> None:
        self.me = me
        self.view = view
        self.highest = view.epoch
        self.round: Round | None = None
        self.reports: dict[str, Proposal | None] = {}

    def begin(
        self,
        asked: Collection[str],
        build: Build,
        *,
        floor: int,
        ended: Collection[str],
        ends_at: float,
    ) -> Prepare:
        """Start a round whose number is above ``floor`` and all numbers seen."""
        self.highest = max(self.highest, floor) + 1
        ballot = (self.highest, self.me)
        evidence = Evidence(self.me, self.view, reports=self.reports)
        self.round = Round(ballot, frozenset(asked), frozenset(ended), build, ends_at, evidence)
        return Prepare(self.view.history, self.view.epoch, ballot)

    def promised(self, node: str, message: Promise, subtracted: Collection[str]) -> Effects:
        """``node`` promised. When all have: offer the view that may have been decided, or mine."""
        round_ = self._current(message.ballot)
        if round_ is None or node not in round_.asked:
            return NO_EFFECTS
        round_.evidence.promises[node] = message.accepted
        round_.evidence.promised_to[node] = frozenset(message.promised_to)
        if round_.proposal is not None or not round_.asked <= round_.evidence.promises.keys():
            return NO_EFFECTS
        if not has_majority(self.view.members, round_.asked, subtracted):
            return self._fail(explain_minority(self.view.members, round_.asked, subtracted))
        recovered = recover(round_.evidence, subtracted)
        if recovered.blocked:
            return self._fail(recovered.blocked, recovered.awaited)
        if recovered.is_decided:
            self.round = None
            return Effects(decided=recovered.value)
        view = recovered.value or round_.build(round_.ballot[0])
        ended = tuple(sorted(round_.ended & set(self.view.nodes)))
        is_fresh = recovered.value is None
        round_.proposal = Proposal(round_.ballot, self.view.epoch, view, ended, is_fresh)
        return Effects(accept=round_.proposal)

    def accepted(self, node: str, ballot: Ballot, subtracted: Collection[str]) -> Effects:
        """``node`` accepted, and has it on disk. When all that stay have: it is decided."""
        round_ = self._current(ballot)
        if round_ is None or round_.proposal is None:
            return NO_EFFECTS
        round_.accepted.add(node)
        view = round_.proposal.view
        if not quorum(self.view, view, subtracted) <= round_.accepted:
            return NO_EFFECTS
        if not has_majority(self.view.members, round_.accepted, subtracted):
            return self._fail(explain_minority(self.view.members, round_.accepted, subtracted))
        self.round = None
        return Effects(decided=view)

    def rejected(self, node: str, message: Rejected) -> Effects:
        """``node`` refused."""
        self.highest = max(self.highest, message.promised[0])
        if self._current(message.ballot) is None:
            return NO_EFFECTS
        return self._fail(f"{node} refused: {message.reason}")

    def lost(self, node: str) -> None:
        """``node`` ended. A round that waits for it is over: were its vote subtracted in the middle
        of the round, nothing would be left of what it accepted after it had promised."""
        if self.round is not None and node in self.round.asked:
            self.round = None

    def expire(self, now: float) -> Effects:
        """Give a round up that took too long."""
        round_ = self.round
        if round_ is None or now < round_.ends_at:
            return NO_EFFECTS
        answered = round_.accepted if round_.proposal else round_.evidence.promises.keys()
        return self._fail(f"no answer from {', '.join(sorted(round_.asked - answered))}")

    def _current(self, ballot: Ballot) -> Round | None:
        """The round that an answer to ``ballot`` belongs to, None if it is over."""
        return self.round if self.round is not None and self.round.ballot == ballot else None

    def _fail(self, reason: str, awaited: frozenset[str] = frozenset()) -> Effects:
        self.round = None
        return Effects(failed=reason, awaited=awaited)
