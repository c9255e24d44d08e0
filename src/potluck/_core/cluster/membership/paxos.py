"""Single-decree Paxos about one view's successor: a member's acceptor and proposer side by side.

The rules that differ from the paper, and why no view gets two successors, are told in
``docs/membership.md``; ``tests/unit/cluster/membership/test_model.py`` checks them exhaustively.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from potluck._core.cluster.membership.acceptor import PaxosAcceptor
from potluck._core.cluster.membership.events import Send
from potluck._core.cluster.membership.proposer import NO_EFFECTS, Build, Effects, Proposer
from potluck._core.cluster.membership.recovery import quorum
from potluck._core.wire.nodes import (
    Accepted,
    Ballot,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Rejected,
    View,
)


class PaxosInstance:
    """One member's part in deciding the successor of ``view``."""

    def __init__(self, me: str, view: View) -> None:
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
        assert isinstance(mine, Promise), "the ballot is the newest I know"
        effects = self.proposer.promised(self.me, mine, subtracted)
        return replace(effects, actions=sends)

    def prepare(self, node: str, message: Prepare) -> Effects:
        """``node`` asks for a promise. A promise ends my own attempt, which is older."""
        self._saw(message.ballot)
        answer = self.acceptor.promise(node, message.ballot)
        if isinstance(answer, Promise):
            self.proposer.round = None
        return Effects((Send(node, answer),))

    def promised_by(self, node: str, message: Promise, subtracted: Collection[str]) -> Effects:
        """``node`` promised."""
        return self.proposer.promised(node, message, subtracted)

    def proposed(self, node: str, proposal: Proposal, objection: str) -> Effects:
        """``node`` proposes; ``objection`` is why I would rather not, empty if I agree."""
        self._saw(proposal.ballot)
        refusal = self.acceptor.refusal(proposal, objection)
        return Effects(accept=proposal) if refusal is None else Effects((Send(node, refusal),))

    def saved(self, proposal: Proposal, subtracted: Collection[str]) -> Effects:
        """What I accepted is on disk: tell its proposer or, if I am the proposer, ask the others.
        My own acceptance comes first: others that accepted can be sure that I have as well."""
        proposer = proposal.ballot[1]
        if proposer != self.me:
            return Effects((Send(proposer, Accepted(proposal.ballot)),))
        round_ = self.proposer.round
        if round_ is None or round_.ballot != proposal.ballot:
            return NO_EFFECTS
        voters = quorum(self.view, proposal.view, subtracted) - {self.me}
        sends = tuple(Send(node, Propose(proposal)) for node in sorted(voters))
        effects = self.accepted_by(self.me, proposal.ballot, subtracted)
        return replace(effects, actions=sends)

    def accepted_by(self, node: str, ballot: Ballot, subtracted: Collection[str]) -> Effects:
        """``node`` accepted, and has it on disk."""
        return self.proposer.accepted(node, ballot, subtracted)

    def rejected_by(self, node: str, message: Rejected) -> Effects:
        """``node`` refused."""
        return self.proposer.rejected(node, message)

    def _saw(self, ballot: Ballot) -> None:
        self.proposer.highest = max(self.proposer.highest, ballot[0])
