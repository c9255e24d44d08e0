"""Deciding the view that follows the present one: one ``Succession`` for each view.

Two rounds among its members, as in single-decree Paxos, with two rules of our own: all members that
stay must accept, and a death counts only if it can't hide a decision. ``docs/membership.md``
says why no view gets two successors. Pure: messages in, actions out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from potluck.cluster.views.election import explain_minority, has_majority
from potluck.cluster.views.events import Action, Send
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
class Outcome:
    """What one step of a succession brought: messages to send; a proposal to accept, with the
    ``Accepted`` that may leave once it is on disk; a decided view; a failed attempt and why."""

    actions: tuple[Action, ...] = ()
    accept: Proposal | None = None
    decided: View | None = None
    failed: str = ""


NOTHING = Outcome()


class Succession:
    """What one member knows of the successor of ``view``."""

    def __init__(self, me: str, view: View, accepted: Proposal | None = None) -> None:
        self.me = me
        self.view = view
        self.accepted = accepted
        self.promised: Ballot = accepted.ballot if accepted is not None else (view.epoch, "")
        self.pledged: frozenset[str] = frozenset()
        self.highest = view.epoch
        self.round: Round | None = None
        self.testimony: dict[str, Proposal | None] = {}

    # The proposer.

    def propose(
        self,
        asked: Collection[str],
        build: Build,
        *,
        floor: int,
        dead: Collection[str],
        ended: Collection[str],
        ends_at: float,
    ) -> Outcome:
        """Begin an attempt to have the view agreed on that ``build(epoch)`` makes, with an epoch
        above ``floor``. ``asked`` are all present members that stay, me among them. ``ended``
        are the seats whose agents are known to have ended, ``dead`` those of them that may be
        subtracted from the majority."""
        number = max(self.highest, self.promised[0], floor) + 1
        ballot = (number, self.me)
        self.highest = number
        self.round = Round(ballot, frozenset(asked), frozenset(ended), build, ends_at)
        prepare = Prepare(self.view.lineage, self.view.epoch, ballot)
        self.promised = ballot
        self.pledged |= {self.me}
        self.round.reports[self.me], self.round.since[self.me] = self.accepted, self.pledged
        sends = tuple(Send(node, prepare) for node in sorted(asked) if node != self.me)
        following = self._offer(dead)
        return Outcome(sends, following.accept, following.decided, following.failed)

    def promised_by(self, node: str, message: Promise, dead: Collection[str]) -> Outcome:
        """``node`` promised."""
        attempt = self.round
        if attempt is None or message.ballot != attempt.ballot or node not in attempt.asked:
            return NOTHING
        attempt.reports[node] = message.accepted
        attempt.since[node] = frozenset(message.since)
        return self._offer(dead)

    def accepted_by(self, node: str, ballot: Ballot, dead: Collection[str]) -> Outcome:
        """``node`` accepted, and has it on disk."""
        attempt = self.round
        if attempt is None or ballot != attempt.ballot or attempt.value is None:
            return NOTHING
        attempt.accepted.add(node)
        value = attempt.value
        if not self._electors(value.view, dead) <= attempt.accepted:
            return NOTHING
        if not has_majority(self.view.seats, attempt.accepted, dead):
            self.round = None
            return Outcome(failed=explain_minority(self.view.seats, attempt.accepted, dead))
        self.round = None
        return Outcome(decided=value.view)

    def rejected_by(self, node: str, message: Rejected) -> Outcome:
        """``node`` refused."""
        self.highest = max(self.highest, message.promised[0])
        if self.round is None or message.ballot != self.round.ballot:
            return NOTHING
        self.round = None
        return Outcome(failed=f"{node} refused: {message.reason}")

    def expire(self, now: float) -> Outcome:
        """Give an attempt up that took too long."""
        if self.round is None or now < self.round.ends_at:
            return NOTHING
        heard = self.round.reports.keys() if self.round.value is None else self.round.accepted
        missing = sorted(self.round.asked - heard)
        self.round = None
        return Outcome(failed=f"no answer from {', '.join(missing)}")

    def _electors(self, view: View, dead: Collection[str]) -> set[str]:
        """The present members in ``view`` that have to accept it."""
        return {s.node for s in self.view.seats if s in view.seats and s.node not in dead}

    def _offer(self, dead: Collection[str]) -> Outcome:
        """When all have promised: offer the view that may have been decided before, or mine."""
        attempt = self.round
        assert attempt is not None
        if attempt.value is not None or not attempt.asked <= attempt.reports.keys():
            return NOTHING
        if not has_majority(self.view.seats, attempt.asked, dead):
            self.round = None
            return Outcome(failed=explain_minority(self.view.seats, attempt.asked, dead))
        reports = self.testimony | attempt.reports
        past = [proposal for proposal in reports.values() if proposal is not None]
        newest = max(past, key=lambda proposal: proposal.ballot, default=None)
        view, is_fresh = None, False
        if (
            newest is not None
            and not self._is_void(newest, attempt)
            and self._may_be_decided(newest, attempt.reports, dead)
        ):
            told = {n for n in self.view.nodes if reports.get(n) == newest} | {newest.ballot[1]}
            if self._was_decided(newest.view, told, set(dead) - told):
                self.round = None
                return Outcome(decided=newest.view)
            electors = self._electors(newest.view, dead)
            if not electors <= attempt.asked:
                self.round = None
                missing = ", ".join(sorted(electors - attempt.asked))
                return Outcome(failed=f"only {missing} knows whether a view was agreed on")
            if not has_majority(self.view.seats, electors, dead):
                self.round = None  # offered again by a newer ballot, it could never be recognised
                missing = ", ".join(sorted(self._electors(newest.view, ()) - electors))
                return Outcome(failed=f"only {missing} knew whether a view was agreed on")
            view = newest.view
        if view is None:
            view, is_fresh = attempt.build(attempt.ballot[0]), True
        ended = tuple(sorted(attempt.ended & set(self.view.nodes)))
        attempt.value = Proposal(attempt.ballot, self.view.epoch, view, ended, is_fresh)
        return Outcome(accept=attempt.value)

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

    def _was_decided(self, view: View, accepted: Collection[str], dead: Collection[str]) -> bool:
        """Whether ``accepted`` suffice for ``view`` if ``dead`` are subtracted."""
        electors = self._electors(view, dead)
        return electors <= set(accepted) and has_majority(self.view.seats, electors, dead)

    def _may_be_decided(
        self, past: Proposal, promises: dict[str, Proposal | None], dead: Collection[str]
    ) -> bool:
        """Not if a member of that view is there and has not accepted it: it promised not to. That
        one which has ended had not accepted says nothing: it may have been subtracted.

        Nor if it is known of every seat whether it accepted, and those that did are no majority
        even of all but the ended: it would be offered in vain for ever.
        """
        electors = self._electors(past.view, ())
        for node in electors:
            if node in promises:
                told = promises[node]
                if told is None or told.view != past.view:
                    return False
        reports = self.testimony | promises
        if self.me not in past.view.nodes:
            # Its lease, which was good when it died, says that it accepted no view without me.
            reports = dict.fromkeys(dead) | reports
        seats = set(self.view.nodes)
        if not seats <= reports.keys():
            return True
        accepted = {n for n in electors if (told := reports[n]) and told.view == past.view}
        return has_majority(self.view.seats, accepted, seats - promises.keys() - accepted)

    # The acceptor.

    def prepare(self, node: str, message: Prepare) -> Outcome:
        """``node`` asks for a promise."""
        self.highest = max(self.highest, message.ballot[0])
        if message.ballot <= self.promised:
            refusal = Rejected(message.ballot, self.promised, "I promised a newer one")
            return Outcome((Send(node, refusal),))
        self.promised = message.ballot
        self.round = None
        self.pledged |= {node}
        promise = Promise(message.ballot, self.accepted, tuple(sorted(self.pledged)))
        return Outcome((Send(node, promise),))

    def proposed(self, node: str, proposal: Proposal, objection: str) -> Outcome:
        """``node`` proposes; ``objection`` is why I would rather not, empty if I agree."""
        self.highest = max(self.highest, proposal.ballot[0])
        if proposal.ballot < self.promised:
            objection = "I promised a newer one"
        if objection:
            return Outcome((Send(node, Rejected(proposal.ballot, self.promised, objection)),))
        self.promised = proposal.ballot
        return Outcome(accept=proposal)

    def accept(self, proposal: Proposal) -> bool:
        """Take ``proposal`` as accepted, if nothing newer came up; it has to be written to disk
        before anybody hears of it."""
        if proposal.ballot < self.promised:
            return False
        self.accepted = proposal
        self.pledged = frozenset()
        return True

    def saved(self, proposal: Proposal, dead: Collection[str]) -> Outcome:
        """What I accepted is on disk: tell its proposer, or, if that is me, the others. My own
        comes first, so that whoever has accepted it knows that I have."""
        proposer = proposal.ballot[1]
        if proposer != self.me:
            return Outcome((Send(proposer, Accepted(proposal.ballot)),))
        if self.round is None or self.round.ballot != proposal.ballot:
            return NOTHING
        electors = self._electors(proposal.view, dead) - {self.me}
        sends = tuple(Send(node, Propose(proposal)) for node in sorted(electors))
        following = self.accepted_by(self.me, proposal.ballot, dead)
        return Outcome(sends, decided=following.decided, failed=following.failed)
