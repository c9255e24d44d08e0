"""Single-decree Paxos about one view's successor: acceptor, proposer, and both in one member.

Lamport, "Paxos Made Simple" (2001), section 2.2. The rules that differ from the paper, and why no
view gets two successors, are explained in ``docs/membership.md``;
``tests/unit/cluster/membership/test_model.py`` checks them exhaustively. Pure: messages in,
``Effects`` out.

Recovery. A proposer's first phase collects promises, and with them the proposals that members
accepted under older ballots. Plain Paxos proposes the newest of these again. That is always safe,
but here it may block for ever: the value needs the members that it keeps, and those may be gone. So
a value is proposed again only if it *may* have been decided; ``recover`` has the rules that say
when it certainly was not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from potluck._core.cluster.membership.events import Action, Send
from potluck._core.cluster.membership.view import explain_minority, has_majority
from potluck._core.wire import nodes as wire


class PaxosAcceptor:
    """A member's answers to the proposers of the successor of ``view``.

    ``promised`` is the newest ballot that it answered: older ones are refused. It needs no disk,
    because an agent that starts again is another incarnation, which is no member of ``view`` and
    never answers for the earlier incarnation. ``accepted`` does: proposers must find out about it.
    ``promised_to`` are the proposers that have got a promise since ``accepted`` changed.
    """

    def __init__(self, view: wire.View) -> None:
        self.promised: wire.Ballot = (view.epoch, "")
        self.accepted: wire.Proposal | None = None
        self.promised_to: frozenset[str] = frozenset()

    def promise(self, proposer: str, ballot: wire.Ballot) -> wire.Promise | wire.Rejected:
        """Phase 1: refuse everything older than ``ballot`` from now on, unless it is old itself."""
        if ballot <= self.promised:
            return wire.Rejected(ballot, self.promised, "I promised a newer one")
        self.promised = ballot
        self.promised_to |= {proposer}
        return wire.Promise(ballot, self.accepted, tuple(sorted(self.promised_to)))

    def refusal(self, proposal: wire.Proposal, objection: str) -> wire.Rejected | None:
        """Phase 2: why ``proposal`` is refused, None if it may be accepted. ``objection`` is why
        this member does not want that view; empty if it does."""
        if proposal.ballot < self.promised:
            objection = "I promised a newer one"
        if objection:
            return wire.Rejected(proposal.ballot, self.promised, objection)
        self.promised = proposal.ballot
        return None

    def accept(self, proposal: wire.Proposal) -> bool:
        """Accept ``proposal``, unless a newer ballot was promised meanwhile. The vote may be sent
        only after it is on disk."""
        if proposal.ballot < self.promised:
            return False
        self.accepted = proposal
        self.promised_to = frozenset()
        return True


@dataclass(slots=True)
class Evidence:
    """What a proposer, ``me``, knows of older ballots about the successor of ``view``.

    ``promises``: the newest proposal that each member which promised has accepted, if any.
    ``promised_to``: which proposers each of them has promised to since it accepted that.
    ``reports``: the same as ``promises``, of members that ended: it was found on their disks.
    """

    me: str
    view: wire.View
    promises: dict[str, wire.Proposal | None] = field(default_factory=dict)
    promised_to: dict[str, frozenset[str]] = field(default_factory=dict)
    reports: Mapping[str, wire.Proposal | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What follows from the evidence. ``value``: the view that must be proposed again, None if the
    proposer is free; ``is_decided``: it was decided already; ``blocked``: why neither is known, and
    ``awaited``: the members that know."""

    value: wire.View | None = None
    is_decided: bool = False
    blocked: str = ""
    awaited: frozenset[str] = frozenset()


FREE = Recovered()


def quorum(parent: wire.View, view: wire.View, subtracted: Collection[str]) -> set[str]:
    """The members of ``parent`` that have to accept ``view`` as its successor: all that stay, less
    the certainly dead ones. They must be a majority of ``parent`` as well."""
    return {m.node for m in parent.members if m in view.members and m.node not in subtracted}


def recover(evidence: Evidence, subtracted: Collection[str]) -> Recovered:
    """Whether a proposer that has its promises is free, or bound to an older proposal."""
    view, promises = evidence.view, evidence.promises
    known = {**evidence.reports, **promises}
    accepted = [proposal for proposal in known.values() if proposal is not None]
    newest = max(accepted, key=lambda proposal: proposal.ballot, default=None)
    # Only the newest counts, as in Paxos: its proposer had looked at those before it.
    if (
        newest is None
        or _is_void(newest, evidence)
        or not _may_be_decided(newest, evidence, subtracted)
    ):
        return FREE
    # A proposer accepts its own proposal before it asks others to: it is one of the acceptors.
    acceptors = {n for n in view.nodes if known.get(n) == newest} | {newest.ballot[1]}
    # Votes accepted by nodes that have died count: a decision outlives its voters.
    voters = quorum(view, newest.view, set(subtracted) - acceptors)
    if voters <= acceptors and has_majority(view.members, voters, set(subtracted) - acceptors):
        return Recovered(newest.view, is_decided=True)
    voters = quorum(view, newest.view, subtracted)
    if not voters <= promises.keys():
        return _blocked(voters - promises.keys(), "knows")
    if not has_majority(view.members, voters, subtracted):
        # Proposed again it could never be decided: it needs the votes of members that are dead.
        return _blocked(quorum(view, newest.view, ()) - voters, "knew")
    return Recovered(newest.view)


def _blocked(awaited: set[str], verb: str) -> Recovered:
    reason = f"only {', '.join(sorted(awaited))} {verb} whether a view was agreed on"
    return Recovered(blocked=reason, awaited=frozenset(awaited))


def _is_void(proposal: wire.Proposal, evidence: Evidence) -> bool:
    """Whether ``proposal`` was not decided and never will be, whichever nodes have accepted it.

    Two kinds of nodes can find out that all of its quorum accepted it:

    - its own proposer. It has promised to this ballot, so it counts no more votes for an older one,
      and it did not decide before, or it would not be in this view any more;
    - a later proposer, out of the promises of the whole quorum. Take a member ``m`` that accepted
      the proposal: every later proposer that got so far has a promise of ``m`` which is newer than
      its acceptance. ``m`` tells to whom it has promised since. If all of those have promised to
      this ballot as well, none of them found a decision, and none can any more.

    Only a ``fresh`` proposal: a value taken over from an older ballot has other proposers, too.
    """
    here = evidence.promised_to.keys()
    proposer = proposal.ballot[1]
    return (
        proposal.fresh
        and proposer in here
        and any(
            node != proposer and evidence.promises[node] == proposal and promised_to <= here
            for node, promised_to in evidence.promised_to.items()
        )
    )


def _may_be_decided(
    proposal: wire.Proposal, evidence: Evidence, subtracted: Collection[str]
) -> bool:
    """Whether a quorum may have accepted ``proposal``, now or before."""
    promises = evidence.promises
    voters = quorum(evidence.view, proposal.view, ())
    for node in voters & promises.keys():
        # A living voter that has not accepted it never will: it has promised to this ballot.
        # (The same of a dead one proves nothing: the proposer may have subtracted it.)
        told = promises[node]
        if told is None or told.view != proposal.view:
            return False
    known = {**evidence.reports, **promises}
    if evidence.me not in proposal.view.nodes:
        # A member is subtracted while its lease for me is good, unless its disk was read. The lease
        # says that it accepted no view without me.
        known = {**dict.fromkeys(subtracted), **known}
    members = set(evidence.view.nodes)
    if not members <= known.keys():
        return True
    # All is known. Subtract as much as any proposer could have: every member that ended without
    # having accepted. If its votes are no majority even then, they never were.
    acceptors = {n for n in voters if (told := known[n]) and told.view == proposal.view}
    return has_majority(evidence.view.members, acceptors, members - promises.keys() - acceptors)


Build = Callable[[int], wire.View]
"""Makes the view that a proposer wants, with the epoch it is given."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What one step came to: messages to send; a proposal that this node is to accept itself; a
    decided view; why an attempt failed, and the members without whose record it can't succeed."""

    actions: tuple[Action, ...] = ()
    accept: wire.Proposal | None = None
    decided: wire.View | None = None
    failed: str = ""
    awaited: frozenset[str] = frozenset()


NO_EFFECTS = Effects()


@dataclass(slots=True)
class Round:
    """One attempt. ``asked`` are the members that stay, which all have to answer; ``ended`` those
    known to have ended; ``proposal`` is what is offered once all ``asked`` have promised."""

    ballot: wire.Ballot
    asked: frozenset[str]
    ended: frozenset[str]
    build: Build
    ends_at: float
    evidence: Evidence
    proposal: wire.Proposal | None = None
    accepted: set[str] = field(default_factory=set)


class Proposer:
    """Attempts of ``me`` to decide the successor of ``view``. ``highest`` is the newest number that
    any ballot was seen to have; ``reports`` what was found on the disks of members that ended."""

    def __init__(self, me: str, view: wire.View) -> None:
        self.me = me
        self.view = view
        self.highest = view.epoch
        self.round: Round | None = None
        self.reports: dict[str, wire.Proposal | None] = {}

    def begin(
        self,
        asked: Collection[str],
        build: Build,
        *,
        floor: int,
        ended: Collection[str],
        ends_at: float,
    ) -> wire.Prepare:
        """Start a round whose number is above ``floor`` and all numbers seen."""
        self.highest = max(self.highest, floor) + 1
        ballot = (self.highest, self.me)
        evidence = Evidence(self.me, self.view, reports=self.reports)
        self.round = Round(ballot, frozenset(asked), frozenset(ended), build, ends_at, evidence)
        return wire.Prepare(self.view.history, self.view.epoch, ballot)

    def promised(self, node: str, message: wire.Promise, subtracted: Collection[str]) -> Effects:
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
        round_.proposal = wire.Proposal(round_.ballot, self.view.epoch, view, ended, is_fresh)
        return Effects(accept=round_.proposal)

    def accepted(self, node: str, ballot: wire.Ballot, subtracted: Collection[str]) -> Effects:
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

    def rejected(self, node: str, message: wire.Rejected) -> Effects:
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

    def _current(self, ballot: wire.Ballot) -> Round | None:
        """The round that an answer to ``ballot`` belongs to, None if it is over."""
        return self.round if self.round is not None and self.round.ballot == ballot else None

    def _fail(self, reason: str, awaited: frozenset[str] = frozenset()) -> Effects:
        self.round = None
        return Effects(failed=reason, awaited=awaited)


class PaxosInstance:
    """One member's part in deciding the successor of ``view``."""

    def __init__(self, me: str, view: wire.View) -> None:
        self.me = me
        self.view = view
        self.acceptor = PaxosAcceptor(view)
        self.proposer = Proposer(me, view)

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
        """Try to have the view decided that ``build(epoch)`` makes, with an epoch above ``floor``.
        ``asked`` are all present members that stay, me among them. ``ended`` are the members whose
        agents are known to have ended, ``subtracted`` those whose end hides no decision."""
        floor = max(floor, self.acceptor.promised[0])
        prepare = self.proposer.begin(asked, build, floor=floor, ended=ended, ends_at=ends_at)
        sends = tuple(Send(node, prepare) for node in sorted(asked) if node != self.me)
        mine = self.acceptor.promise(self.me, prepare.ballot)
        assert isinstance(mine, wire.Promise), "the ballot is the newest I know"
        effects = self.proposer.promised(self.me, mine, subtracted)
        return replace(effects, actions=sends)

    def prepare(self, node: str, message: wire.Prepare) -> Effects:
        """``node`` asks for a promise. A promise ends my own attempt, which is older."""
        self._saw(message.ballot)
        answer = self.acceptor.promise(node, message.ballot)
        if isinstance(answer, wire.Promise):
            self.proposer.round = None
        return Effects((Send(node, answer),))

    def promised_by(self, node: str, message: wire.Promise, subtracted: Collection[str]) -> Effects:
        """``node`` promised."""
        return self.proposer.promised(node, message, subtracted)

    def proposed(self, node: str, proposal: wire.Proposal, objection: str) -> Effects:
        """``node`` proposes; ``objection`` is why I would rather not, empty if I agree."""
        self._saw(proposal.ballot)
        refusal = self.acceptor.refusal(proposal, objection)
        return Effects(accept=proposal) if refusal is None else Effects((Send(node, refusal),))

    def saved(self, proposal: wire.Proposal, subtracted: Collection[str]) -> Effects:
        """What I accepted is on disk: tell its proposer or, if I am the proposer, ask the others.
        My own acceptance comes first: others that accepted can be sure that I have as well."""
        proposer = proposal.ballot[1]
        if proposer != self.me:
            return Effects((Send(proposer, wire.Accepted(proposal.ballot)),))
        round_ = self.proposer.round
        if round_ is None or round_.ballot != proposal.ballot:
            return NO_EFFECTS
        voters = quorum(self.view, proposal.view, subtracted) - {self.me}
        sends = tuple(Send(node, wire.Propose(proposal)) for node in sorted(voters))
        effects = self.accepted_by(self.me, proposal.ballot, subtracted)
        return replace(effects, actions=sends)

    def accepted_by(self, node: str, ballot: wire.Ballot, subtracted: Collection[str]) -> Effects:
        """``node`` accepted, and has it on disk."""
        return self.proposer.accepted(node, ballot, subtracted)

    def rejected_by(self, node: str, message: wire.Rejected) -> Effects:
        """``node`` refused."""
        return self.proposer.rejected(node, message)

    def _saw(self, ballot: wire.Ballot) -> None:
        self.proposer.highest = max(self.proposer.highest, ballot[0])
