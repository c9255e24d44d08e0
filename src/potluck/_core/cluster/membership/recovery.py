"""Recovery: which view a new proposer has to propose, from what older ballots left behind.

Plain Paxos: take the value of the newest accepted proposal that any promise tells of. That is
always safe, but here it may block for ever: that value needs the members that it keeps, and those
may be gone. So a value is taken over only if it *may* have been decided; the rules below say when
it certainly was not. ``docs/membership.md`` has them with a worked example. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from potluck._core.cluster.membership.election import has_majority
from potluck._core.wire.nodes import Proposal, View


@dataclass(slots=True)
class Evidence:
    """What a proposer, ``me``, knows of older ballots about the successor of ``view``.

    ``promises``: the newest proposal that each member which promised has accepted, if any.
    ``promised_to``: which proposers each of them has promised to since it accepted that.
    ``reports``: the same as ``promises``, of members that ended: it was found on their disks.
    """

    me: str
    view: View
    promises: dict[str, Proposal | None] = field(default_factory=dict)
    promised_to: dict[str, frozenset[str]] = field(default_factory=dict)
    reports: Mapping[str, Proposal | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What follows from the evidence. ``value``: the view that must be proposed again, None if the
    proposer is free; ``is_decided``: it was decided already; ``blocked``: why neither is known, and
    ``awaited``: the members that know."""

    value: View | None = None
    is_decided: bool = False
    blocked: str = ""
    awaited: frozenset[str] = frozenset()


FREE = Recovered()


def quorum(parent: View, view: View, subtracted: Collection[str]) -> set[str]:
    """The members of ``parent`` that have to accept ``view`` as its successor: all that stay, less
    those that are certainly dead. They must be a majority of ``parent`` as well."""
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


def _is_void(proposal: Proposal, evidence: Evidence) -> bool:
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


def _may_be_decided(proposal: Proposal, evidence: Evidence, subtracted: Collection[str]) -> bool:
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
