"""Deciding the view that follows the present one: one ``PaxosInstance`` for each view.

Two rounds among its members, as in single-decree Paxos, with two rules of our own: all members that
stay must accept, and a death counts only if it can't hide a decision. ``docs/membership.md``
says why no view gets two successors. Pure: messages in, actions out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from potluck.cluster.membership.election import explain_minority, has_majority
from potluck.cluster.membership.events import Action, Send
from potluck.wire.nodes import (
    Accepted,
    Ballot,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Rejected,
    View,
)

Build = Callable[[int], View]
"""Makes the view that a proposer wants, with the epoch it is given."""


@dataclass(slots=True)
class Round:
    """An attempt of mine. ``asked`` is who has to answer, and stays; ``ended`` who is known to have
    ended; ``since`` to whom each has promised since it accepted; ``value`` the view on offer once
    all have promised."""

    ballot: Ballot
    asked: frozenset[str]
    ended: frozenset[str]
    build: Build
    ends_at: float
    reports: dict[str, Proposal | None] = field(default_factory=dict)
    since: dict[str, frozenset[str]] = field(default_factory=dict)
    value: Proposal | None = None
    accepted: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Effects:
    """What one step of the instance brought: messages to send; a proposal to accept, with the
    ``Accepted`` that may leave once it is on disk; a decided view; a failed attempt and why."""

    actions: tuple[Action, ...] = ()
    accept: Proposal | None = None
    decided: View | None = None
    failed: str = ""


NO_EFFECTS = Effects()


class PaxosInstance:
    """What one member knows of the successor of ``view``."""

    def __init__(self, me: str, view: View, accepted: Proposal | None = None) -> None:
        self.me = me
        self.view = view
        self.accepted = accepted
        self.promised: Ballot = accepted.ballot if accepted is not None else (view.epoch, "")
        self.promised_to: frozenset[str] = frozenset()
        self.highest = view.epoch
        self.round: Round | None = None
        self.recovery_reports: dict[str, Proposal | None] = {}

    # The proposer.

    def propose(
        self,
        asked: Collection[str],
        build: Build,
        *,
        floor: int,
        subtracted: Collection[str],
        ended: Collection[str],
        ends_at: float,
    ) -> Effects:
        """Begin an attempt to have the view agreed on that ``build(epoch)`` makes, with an epoch
        above ``floor``. ``asked`` are all present members that stay, me among them. ``ended``
        are the members whose agents are known to have ended, ``subtracted`` those of them that
        may be subtracted from the majority."""
        number = max(self.highest, self.promised[0], floor) + 1
        ballot = (number, self.me)
        self.highest = number
        self.round = Round(ballot, frozenset(asked), frozenset(ended), build, ends_at)
        prepare = Prepare(self.view.history, self.view.epoch, ballot)
        self.promised = ballot
        self.promised_to |= {self.me}
        self.round.reports[self.me], self.round.since[self.me] = self.accepted, self.promised_to
        sends = tuple(Send(node, prepare) for node in sorted(asked) if node != self.me)
        following = self._offer(subtracted)
        return Effects(sends, following.accept, following.decided, following.failed)

    def promised_by(self, node: str, message: Promise, subtracted: Collection[str]) -> Effects:
        """``node`` promised."""
        attempt = self.round
        if attempt is None or message.ballot != attempt.ballot or node not in attempt.asked:
            return NO_EFFECTS
        attempt.reports[node] = message.accepted
        attempt.since[node] = frozenset(message.since)
        return self._offer(subtracted)

    def accepted_by(self, node: str, ballot: Ballot, subtracted: Collection[str]) -> Effects:
        """``node`` accepted, and has it on disk."""
        attempt = self.round
        if attempt is None or ballot != attempt.ballot or attempt.value is None:
            return NO_EFFECTS
        attempt.accepted.add(node)
        value = attempt.value
        if not self._quorum(value.view, subtracted) <= attempt.accepted:
            return NO_EFFECTS
        if not has_majority(self.view.members, attempt.accepted, subtracted):
            self.round = None
            return Effects(failed=explain_minority(self.view.members, attempt.accepted, subtracted))
        self.round = None
        return Effects(decided=value.view)

    def rejected_by(self, node: str, message: Rejected) -> Effects:
        """``node`` refused."""
        self.highest = max(self.highest, message.promised[0])
        if self.round is None or message.ballot != self.round.ballot:
            return NO_EFFECTS
        self.round = None
        return Effects(failed=f"{node} refused: {message.reason}")

    def expire(self, now: float) -> Effects:
        """Give an attempt up that took too long."""
        if self.round is None or now < self.round.ends_at:
            return NO_EFFECTS
        heard = self.round.reports.keys() if self.round.value is None else self.round.accepted
        missing = sorted(self.round.asked - heard)
        self.round = None
        return Effects(failed=f"no answer from {', '.join(missing)}")

    def _quorum(self, view: View, subtracted: Collection[str]) -> set[str]:
        """The present members in ``view`` that have to accept it."""
        return {s.node for s in self.view.members if s in view.members and s.node not in subtracted}

    def _offer(self, subtracted: Collection[str]) -> Effects:
        """When all have promised: offer the view that may have been decided before, or mine."""
        attempt = self.round
        assert attempt is not None
        if attempt.value is not None or not attempt.asked <= attempt.reports.keys():
            return NO_EFFECTS
        if not has_majority(self.view.members, attempt.asked, subtracted):
            self.round = None
            return Effects(failed=explain_minority(self.view.members, attempt.asked, subtracted))
        reports = self.recovery_reports | attempt.reports
        past = [proposal for proposal in reports.values() if proposal is not None]
        newest = max(past, key=lambda proposal: proposal.ballot, default=None)
        view, is_fresh = None, False
        if (
            newest is not None
            and not self._is_void(newest, attempt)
            and self._may_be_decided(newest, attempt.reports, subtracted)
        ):
            told = {n for n in self.view.nodes if reports.get(n) == newest} | {newest.ballot[1]}
            if self._was_decided(newest.view, told, set(subtracted) - told):
                self.round = None
                return Effects(decided=newest.view)
            quorum = self._quorum(newest.view, subtracted)
            if not quorum <= attempt.asked:
                self.round = None
                missing = ", ".join(sorted(quorum - attempt.asked))
                return Effects(failed=f"only {missing} knows whether a view was agreed on")
            if not has_majority(self.view.members, quorum, subtracted):
                self.round = None  # offered again by a newer ballot, it could never be recognised
                missing = ", ".join(sorted(self._quorum(newest.view, ()) - quorum))
                return Effects(failed=f"only {missing} knew whether a view was agreed on")
            view = newest.view
        if view is None:
            view, is_fresh = attempt.build(attempt.ballot[0]), True
        ended = tuple(sorted(attempt.ended & set(self.view.nodes)))
        attempt.value = Proposal(attempt.ballot, self.view.epoch, view, ended, is_fresh)
        return Effects(accept=attempt.value)

    def _is_void(self, past: Proposal, attempt: Round) -> bool:
        """Not decided, and never will be, whoever else accepted it. Its proposer, who made it up,
        is here and did not come to it. Who else finds that all had accepted has a newer promise of
        each: there is one of them that has promised only to those who are here, and they did not.
        """
        here = attempt.since.keys()
        return (
            past.fresh
            and past.ballot[1] in here
            and any(
                node != past.ballot[1] and attempt.reports[node] == past and since <= here
                for node, since in attempt.since.items()
            )
        )

    def _was_decided(
        self, view: View, accepted: Collection[str], subtracted: Collection[str]
    ) -> bool:
        """Whether ``accepted`` suffice for ``view`` if ``subtracted`` are."""
        quorum = self._quorum(view, subtracted)
        return quorum <= set(accepted) and has_majority(self.view.members, quorum, subtracted)

    def _may_be_decided(
        self, past: Proposal, promises: dict[str, Proposal | None], subtracted: Collection[str]
    ) -> bool:
        """Not if a member of that view is there and has not accepted it: it promised not to. That
        one which has ended had not accepted says nothing: it may have been subtracted.

        Nor if it is known of every member whether it accepted, and those that did are no majority
        even of all but the ended: it would be offered in vain for ever.
        """
        quorum = self._quorum(past.view, ())
        for node in quorum:
            if node in promises:
                told = promises[node]
                if told is None or told.view != past.view:
                    return False
        reports = self.recovery_reports | promises
        if self.me not in past.view.nodes:
            # Its lease, which was good when it died, says that it accepted no view without me.
            reports = dict.fromkeys(subtracted) | reports
        members = set(self.view.nodes)
        if not members <= reports.keys():
            return True
        accepted = {n for n in quorum if (told := reports[n]) and told.view == past.view}
        return has_majority(self.view.members, accepted, members - promises.keys() - accepted)

    # The acceptor.

    def prepare(self, node: str, message: Prepare) -> Effects:
        """``node`` asks for a promise."""
        self.highest = max(self.highest, message.ballot[0])
        if message.ballot <= self.promised:
            refusal = Rejected(message.ballot, self.promised, "I promised a newer one")
            return Effects((Send(node, refusal),))
        self.promised = message.ballot
        self.round = None
        self.promised_to |= {node}
        promise = Promise(message.ballot, self.accepted, tuple(sorted(self.promised_to)))
        return Effects((Send(node, promise),))

    def proposed(self, node: str, proposal: Proposal, objection: str) -> Effects:
        """``node`` proposes; ``objection`` is why I would rather not, empty if I agree."""
        self.highest = max(self.highest, proposal.ballot[0])
        if proposal.ballot < self.promised:
            objection = "I promised a newer one"
        if objection:
            return Effects((Send(node, Rejected(proposal.ballot, self.promised, objection)),))
        self.promised = proposal.ballot
        return Effects(accept=proposal)

    def accept(self, proposal: Proposal) -> bool:
        """Take ``proposal`` as accepted, if nothing newer came up; it has to be written to disk
        before anybody hears of it."""
        if proposal.ballot < self.promised:
            return False
        self.accepted = proposal
        self.promised_to = frozenset()
        return True

    def saved(self, proposal: Proposal, subtracted: Collection[str]) -> Effects:
        """What I accepted is on disk: tell its proposer, or, if that is me, the others. My own
        comes first, so that whoever has accepted it knows that I have."""
        proposer = proposal.ballot[1]
        if proposer != self.me:
            return Effects((Send(proposer, Accepted(proposal.ballot)),))
        if self.round is None or self.round.ballot != proposal.ballot:
            return NO_EFFECTS
        quorum = self._quorum(proposal.view, subtracted) - {self.me}
        sends = tuple(Send(node, Propose(proposal)) for node in sorted(quorum))
        following = self.accepted_by(self.me, proposal.ballot, subtracted)
        return Effects(sends, decided=following.decided, failed=following.failed)
