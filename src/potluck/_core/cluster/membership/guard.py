"""The guard: which messages of other nodes reach the membership protocol. Pure.

``SENDERS`` is the table of who may send what; the class adds what each message may claim. A message
that does not pass is dropped, which is to the protocol as if the network had lost it: so the guard
can't break an agreement, and an honest node repeats what it has to say.

Where nodes that are no members must be heard, their words count as follows. A newcomer or another
cluster makes itself known by heartbeats, which say only things about their sender. A node that
comes back after a cut, and finds that its view is out of use, takes the word of a node that it
knows from that view; alone, of any node that uses its history.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from potluck._core.cluster.membership import claims
from potluck._core.cluster.membership.agreement import ViewAgreement
from potluck._core.cluster.membership.failure_detector import FailureDetector, Status
from potluck._core.cluster.membership.outbox import StableStorage
from potluck._core.cluster.membership.paxos import quorum
from potluck._core.cluster.membership.view import by_seniority
from potluck._core.wire import nodes as wire

MAX_STEP = 1 << 20
"""How far the epochs of nodes that meet may be apart: two years of a view each minute."""
EPOCHS_PER_S = 1 << 10
"""How fast the members of a view may use up epochs. An honest proposer tries ten times a second."""
MAX_RESIGNED = 256
_KEPT_VOTES = 8
"""Of each member. An honest member accepts another view only after an attempt has failed."""


class Sender(StrEnum):
    """What the sender of a message is to this node."""

    MEMBER = "a member of this node's view"
    FORMER = "a node of this node's view, in another incarnation"
    OUTSIDER = "a node outside of this node's view"


_MEMBERS = frozenset({Sender.MEMBER})
_NODES = frozenset({Sender.MEMBER, Sender.FORMER})
_ALL = frozenset(Sender)

SENDERS: dict[type, frozenset[Sender]] = {
    wire.Heartbeat: _ALL,
    wire.IndirectProbe: _MEMBERS,
    wire.Ping: _NODES,
    wire.Pong: _NODES,
    wire.Reached: _MEMBERS,
    wire.Prepare: _MEMBERS,
    wire.Promise: _MEMBERS,
    wire.Propose: _MEMBERS,
    wire.Accepted: _MEMBERS,
    wire.Rejected: _MEMBERS,
    wire.Decided: _ALL,
    wire.RecoveryRequest: _ALL,
    wire.RecoveryReport: _NODES,
}
"""Who may send each message. A node without a view has outsiders only."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message was dropped. ``is_false``: no honest node can have sent it."""

    reason: str
    is_false: bool = False


class Guard:
    """The guard of one node. ``_floor`` is the highest epoch that a node outside of the view ever
    used, as far as that is plausible: if it joins, the next view has to be above it."""

    def __init__(
        self, detector: FailureDetector, agreement: ViewAgreement, storage: StableStorage
    ) -> None:
        self._detector = detector
        self._agreement = agreement
        self._storage = storage
        self._floor = 0
        self._since = 0.0
        self._accepted: dict[str, bytes] = {}
        # What each member lately reported to have accepted, and this node accepted: ballot, digest.
        self._votes: dict[str, deque[tuple[wire.Ballot, bytes]]] = {}
        self._own: wire.Proposal | None = None

    def view_installed(self, now: float) -> None:
        """This node uses another view."""
        self._floor, self._since = 0, now
        self._accepted.clear()
        self._votes.clear()

    def refusal(
        self, node: str, incarnation: int, message: wire.NodeMessage, now: float
    ) -> Refusal | None:
        """Why ``message`` of ``node`` is dropped; None if the protocol is to see it."""
        sender = self._sender(node, incarnation)
        if sender not in SENDERS[type(message)]:
            return Refusal(f"{type(message).__name__} from {sender}")
        self._note_own_vote()
        match message:
            case wire.Heartbeat():
                return self._heartbeat(message, sender)
            case wire.Prepare(_, _, ballot):
                return self._ballot(ballot, node, now)
            case wire.Propose(proposal):
                return self._ballot(proposal.ballot, node, now) or _false(
                    self._proposal(proposal, now)
                )
            case wire.Promise(_, accepted) if accepted is not None:
                view = self._agreement.view
                assert view is not None, "a member sent it"
                if not _follows(accepted, view):  # it may be of an earlier view, and late
                    return Refusal("a promise about another view")
                return _false(self._proposal(accepted, now))
            case wire.Accepted(ballot, digest):
                self._accepted[node] = digest
                if digest:  # the answer to this node's own proposal has none
                    self._voted(node, ballot, digest)
            case wire.Rejected(_, promised):
                return _false(self._number(promised[0], now))
            case wire.Decided(view):
                return self._decided(view, sender, node)
            case wire.RecoveryRequest(history, epoch):
                return self._recovery_request(history, epoch)
            case wire.RecoveryReport(history, _, found):
                return None if found is None else self._report(history, found, sender, node, now)
        return None

    def _sender(self, node: str, incarnation: int) -> Sender:
        view = self._agreement.view
        member = None if view is None else view.member(node)
        if member is None:
            return Sender.OUTSIDER
        return Sender.MEMBER if member.incarnation == incarnation else Sender.FORMER

    def _used(self) -> int:
        """The highest epoch that this node ever used."""
        return max(0, self._storage.record.installed)

    # Heartbeats.

    def _heartbeat(self, beat: wire.Heartbeat, sender: Sender) -> Refusal | None:
        used, mine = max(beat.installed, beat.epoch), self._used()
        if used > mine + MAX_STEP:
            return Refusal(
                f"it claims epoch {used}, while this node is at {mine}: it is not heard", True
            )
        if sender is not Sender.MEMBER:
            self._floor = max(self._floor, used)
        return None

    # Votes about the next view.

    def _number(self, number: int, now: float) -> str:
        """Why no ballot can have this number; empty if one can."""
        view = self._agreement.view
        assert view is not None, "a member sent it"
        base = max(view.epoch, min(self._floor, view.epoch + MAX_STEP))
        if number <= base + EPOCHS_PER_S * (1 + max(0.0, now - self._since)):
            return ""
        return f"ballot {number} is far above epoch {view.epoch}"

    def _ballot(self, ballot: wire.Ballot, node: str, now: float) -> Refusal | None:
        if ballot[1] != node:
            return Refusal("its ballot has the name of another node", True)
        return _false(self._number(ballot[0], now))

    def _proposal(self, proposal: wire.Proposal, now: float) -> str:
        """Why ``proposal`` can't follow this node's view; empty if it can, or is about another."""
        view = self._agreement.view
        assert view is not None, "a member sent it"
        if not _follows(proposal, view):
            return ""
        return self._number(proposal.view.epoch, now) or objection_to_successor(view, proposal.view)

    def _note_own_vote(self) -> None:
        paxos = self._agreement.paxos
        accepted = None if paxos is None else paxos.acceptor.accepted
        if accepted is not None and accepted is not self._own:
            self._own = accepted
            self._voted(self._agreement.me, accepted.ballot, claims.digest_of(accepted.view))

    def _voted(self, node: str, ballot: wire.Ballot, digest: bytes) -> None:
        votes = self._votes.setdefault(node, deque(maxlen=_KEPT_VOTES))
        if (ballot, digest) not in votes:
            votes.append((ballot, digest))

    def _is_chosen(self, view: wire.View, new: wire.View) -> bool:
        """Whether all members that stay, this node among them, have reported that they accepted
        ``new`` in one and the same ballot: then no honest member proposes anything else after
        it."""
        digest = claims.digest_of(new)
        voters = quorum(view, new, self._agreement.subtracted_nodes())
        ballots = [
            {ballot for ballot, voted in self._votes.get(node, ()) if voted == digest}
            for node in voters | {self._agreement.me}
        ]
        return bool(set.intersection(*ballots))

    # Views that other nodes report as decided.

    def _decided(self, new: wire.View, sender: Sender, node: str) -> Refusal | None:
        malformed = objection_to_form(new)
        if malformed:
            return Refusal(f"a view that can't be: {malformed}", True)
        peers, agreement = self._detector.peers, self._agreement
        view, paxos = agreement.view, agreement.paxos
        if view is None or paxos is None or view.history != new.history:
            if new.epoch > self._used() + MAX_STEP:
                return Refusal(f"a view of epoch {new.epoch}, far above this node's", True)
            if not claims.is_confirmed(peers, new):
                return Refusal("a view that most peers of its history do not use")
            known, me = self._storage.history(new.history), new.member(agreement.me)
            is_in = me is not None and me.incarnation == agreement.incarnation
            if not is_in and (known is None or known.view.member(node) is None):
                return Refusal("news of a history, from a node that was not in it")
            return None
        if new.epoch <= view.epoch:
            return None
        is_in = view.member(agreement.me) in new.members
        accepted = paxos.acceptor.accepted
        if is_in and accepted is not None and accepted.view == new:
            # All members that stay had to accept it, and each of them has reported it.
            missing = self._have_not_accepted(view, accepted)
            if missing and claims.is_still_used(peers, view, agreement.me, agreement.subtracted):
                return Refusal(f"a view that {', '.join(missing)} did not accept")
            return Refusal("a decision") if sender is Sender.OUTSIDER else None
        if is_in and self._is_chosen(view, new):
            # It was chosen, then this node accepted what a liar proposed.
            if sender is Sender.OUTSIDER:
                return Refusal("a decision")
            return _false(objection_to_successor(view, new))
        if claims.is_still_used(peers, view, agreement.me, agreement.subtracted):
            return Refusal("another view, while a majority uses the one before")
        if is_in:
            # Rare: it was accepted, then a newer ballot that came to nothing.
            if sender is Sender.OUTSIDER or not claims.is_confirmed(peers, new):
                return Refusal("a view with this node that it did not accept")
            return _false(objection_to_successor(view, new))
        if sender is Sender.OUTSIDER and (new.member(node) is None or self._hears_a_member(view)):
            return Refusal("a view without this node, from a node outside of its view")
        return None

    def _have_not_accepted(self, view: wire.View, proposal: wire.Proposal) -> list[str]:
        """The members whose acceptance of ``proposal`` this node has not heard of."""
        agreement, peers = self._agreement, self._detector.peers
        digest = claims.digest_of(proposal.view)
        voters = quorum(view, proposal.view, agreement.subtracted_nodes())
        missing = []
        for node in sorted(voters - {agreement.me, proposal.ballot[1]} - agreement.barred):
            peer = peers.get(node)
            beat = None if peer is None else peer.last
            uses = beat is not None and beat.digest == digest
            if self._accepted.get(node) != digest and not uses:
                missing.append(node)
        return missing

    def _hears_a_member(self, view: wire.View) -> bool:
        """Whether another member is there, or may be: it is not known to be silent or ended."""
        others = (node for node in view.nodes if node != self._agreement.me)
        gone = (Status.SILENT, Status.DEAD)
        return any(self._detector.status(node) not in gone for node in others)

    # Recovery.

    def _recovery_request(self, history: str, epoch: int) -> Refusal | None:
        agreement = self._agreement
        if agreement.view is not None and agreement.view.history == history:
            return None
        known = self._storage.history(history)
        is_known = known is not None and epoch <= known.view.epoch
        if not is_known and epoch > claims.confirmed_epoch(
            self._detector.peers, history, self._used()
        ):
            return Refusal("a request about an epoch that others of its history do not know")
        if history not in agreement.resigned and len(agreement.resigned) >= MAX_RESIGNED:
            return Refusal("a request about one history more than this node keeps in mind")
        return None

    def _report(
        self, history: str, found: wire.HistoryRecord, sender: Sender, node: str, now: float
    ) -> Refusal | None:
        view = self._agreement.view
        if view is None or history != view.history:
            return None
        if found.view.history != history:
            return Refusal("a report of another history than it says", True)
        if found.view.epoch > view.epoch:
            return self._decided(found.view, sender, node)
        if found.accepted is None:
            return None
        if not _follows(found.accepted, found.view):
            return Refusal("a report of a proposal that does not follow the view on record", True)
        return _false(self._proposal(found.accepted, now))


def objection_to_form(view: wire.View) -> str:
    """Why ``view`` is no view that an honest node makes; empty if it may be one."""
    if len(set(view.nodes)) < len(view.members):
        return "a node is in it twice"
    if by_seniority(view.members) != view.members:
        return "its members are not in order of seniority"
    if view.epoch > wire.MAX_EPOCH or any(member.joined > view.epoch for member in view.members):
        return "its epochs are out of order"
    if len({group.job for group in view.groups}) < len(view.groups):
        return "a job is in it twice"
    if any(max(group.epoch, group.origin) > view.epoch for group in view.groups):
        return "a group is newer than it"
    if any(len({m.worker for m in g.members}) < len(g.members) for g in view.groups):
        return "a worker is in a group twice"
    size = len(msgspec.msgpack.encode(view))
    if size > wire.MAX_VIEW_BYTES:
        return f"it has {size} bytes; at most {wire.MAX_VIEW_BYTES} are allowed"
    return ""


def objection_to_successor(view: wire.View, new: wire.View) -> str:
    """Why ``new`` can't follow ``view``; empty if it can. Members keep their seniority, newcomers
    have the least: else a proposer could make itself the leader."""
    if new.epoch <= view.epoch or new.fork_of != view.fork_of:
        return "it does not follow the present view"
    for member in new.members:
        if member not in view.members and member.joined != new.epoch:
            return f"{member.node} has a seniority that it does not have now"
    return objection_to_form(new)


def _follows(proposal: wire.Proposal, view: wire.View) -> bool:
    """Whether ``proposal`` is about the successor of ``view``."""
    return proposal.view.history == view.history and proposal.parent == view.epoch


def _false(reason: str) -> Refusal | None:
    return Refusal(reason, True) if reason else None
