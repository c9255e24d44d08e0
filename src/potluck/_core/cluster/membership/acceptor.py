"""The acceptor of single-decree Paxos: what one member has promised and accepted.

One for each view, about the view that follows it. Lamport, "Paxos Made Simple" (2001), section 2.2.
"""

from __future__ import annotations

from potluck._core.wire.nodes import Ballot, Promise, Proposal, Rejected, View


class PaxosAcceptor:
    """A member's answers to the proposers of the successor of ``view``.

    ``promised`` is the newest ballot that it answered: older ones are refused. It needs no disk,
    because an agent that starts again is another incarnation, which is no member of ``view`` and
    never answers for the one before. ``accepted`` does: proposers must find out about it.
    ``promised_to`` are the proposers that have got a promise since ``accepted`` changed.
    """

    def __init__(self, view: View) -> None:
        self.promised: Ballot = (view.epoch, "")
        self.accepted: Proposal | None = None
        self.promised_to: frozenset[str] = frozenset()

    def promise(self, proposer: str, ballot: Ballot) -> Promise | Rejected:
        """Phase 1: refuse everything older than ``ballot`` from now on, unless it is old itself."""
        if ballot <= self.promised:
            return Rejected(ballot, self.promised, "I promised a newer one")
        self.promised = ballot
        self.promised_to |= {proposer}
        return Promise(ballot, self.accepted, tuple(sorted(self.promised_to)))

    def refusal(self, proposal: Proposal, objection: str) -> Rejected | None:
        """Phase 2: why ``proposal`` is refused, None if it may be accepted. ``objection`` is why
        this member does not want that view; empty if it does."""
        if proposal.ballot < self.promised:
            objection = "I promised a newer one"
        if objection:
            return Rejected(proposal.ballot, self.promised, objection)
        self.promised = proposal.ballot
        return None

    def accept(self, proposal: Proposal) -> bool:
        """Accept ``proposal``, unless a newer ballot was promised meanwhile. The vote may be sent
        only after it is on disk."""
        if proposal.ballot < self.promised:
            return False
        self.accepted = proposal
        self.promised_to = frozenset()
        return True
