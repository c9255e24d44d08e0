"""What a node makes of lies: messages that an honest node would not send, or that are not for the
sender to say. The attacks of a security review are here by name."""

from __future__ import annotations

import typing

import msgspec
import pytest

from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.claims import digest_of
from potluck._core.cluster.membership.failure_detector import (
    MAX_PEERS,
    FailureDetector,
    Status,
    Timing,
)
from potluck._core.cluster.membership.guard import (
    MAX_RESIGNED,
    MAX_STEP,
    SENDERS,
    objection_to_form,
    objection_to_successor,
)
from potluck._core.cluster.membership.view import objection_to
from potluck._core.types import Member
from potluck._core.wire import nodes as wire
from potluck._core.wire import peers
from potluck._core.wire.nodes import JobGroup, NodeMessage, View, ViewMember
from potluck.errors import ProtocolError
from support.membership_story import Member3, Story, view, without_b


def test_the_table_has_every_message() -> None:
    assert set(SENDERS) == set(typing.get_args(NodeMessage))


# ---------------------------------------------------------------- what is malformed for every node

NO_HEARTBEATS = {
    "an epoch that frames can't carry": {"installed": 2**33},
    "the end of all integers": {"installed": 2**64 - 1},
    "a negative epoch": {"epoch": -1},
    "an echo held for minus infinity": {"held_s": float("-inf")},
    "an echo held for no number": {"held_s": float("nan")},
    "more members than a view has": {"size": 2**20},
}


@pytest.mark.parametrize("changes", NO_HEARTBEATS.values(), ids=NO_HEARTBEATS)
def test_a_heartbeat_out_of_bounds_is_no_message(changes: dict[str, object]) -> None:
    beat = msgspec.structs.replace(wire.Heartbeat(1), **changes)
    with pytest.raises(ProtocolError, match="a message between agents"):
        peers.MESSAGE.decode(peers.MESSAGE.encode(beat)[4:])


# ---------------------------------------------------------------- non-members


class Attacked(Member3):
    """``b``, a member of the view of a, b and c; ``z`` is linked, and in no view with them."""

    def __init__(self) -> None:
        super().__init__()
        self.tell(events.Linked("z", 1))
        self.z = 0

    def say(self, message: NodeMessage, who: str = "z") -> list[events.Action]:
        return self.hear(who, message)

    def claim(self, **facts: object) -> None:
        """z's heartbeats for two seconds, beside those of a and c."""
        for _ in range(10):
            self.beats(1)
            self.z += 1
            beat = wire.Heartbeat(self.z, self.node.detector.number, links=("a", "b", "c"))
            self.say(msgspec.structs.replace(beat, **facts))

    def claim_once(self, history: str) -> None:
        """One heartbeat of z, which claims ``history``."""
        self.z += 1
        self.say(wire.Heartbeat(self.z, history=history, epoch=1, size=1))

    @property
    def state(self) -> object:
        return self.node.view, self.node.record, self.node.paused


def seized(epoch: int = 1000005) -> View:
    return View("L", epoch, (ViewMember("z", 1, 0), *view("abc").members))


OUTSIDERS = {
    "a decision": wire.Decided(seized()),
    "a decision without the receiver": wire.Decided(View("L", 6, without_b())),
    "a proposal": wire.Propose(wire.Proposal((6, "z"), 5, seized(6), ("a",))),
    "a ballot": wire.Prepare("L", 5, (2**31 - 1, "z")),
    "a promise": wire.Promise((6, "b")),
    "a vote": wire.Accepted((6, "b")),
    "a refusal": wire.Rejected((6, "b"), (2**31 - 1, "z"), "no"),
    "a recovery report": wire.RecoveryReport("L", 5, wire.HistoryRecord(seized())),
    "a question about a membership": wire.RecoveryRequest("L", 2**31 - 1),
    "a question about another history": wire.RecoveryRequest("M", 2**31 - 1),
    "what it has reached": wire.Reached("c"),
    "an answer to a probe": wire.Pong("c"),
    "a request to probe": wire.IndirectProbe("c"),
}


@pytest.mark.parametrize("message", OUTSIDERS.values(), ids=OUTSIDERS)
def test_what_a_node_outside_of_the_view_says_changes_nothing(message: NodeMessage) -> None:
    story = Attacked()
    story.claim()
    before = story.state
    ballots = story.node._agreement.paxos
    assert ballots is not None
    votes = (ballots.acceptor.promised, ballots.proposer.highest)
    story.sent.clear()
    story.say(message)
    assert story.state == before
    assert (ballots.acceptor.promised, ballots.proposer.highest) == votes
    assert story.node._agreement.resigned == {}
    assert not [s for s in story.sent if not isinstance(s.message, wire.Heartbeat)]


def test_a_lone_node_that_claims_jobs_and_the_least_name_does_not_seize_the_lead() -> None:
    """The review's attack: heartbeats of a history "0" with a job, then the view of it."""
    story = Attacked()
    story.node.timing = Timing(fresh_s=0.0)
    before = story.node.view
    theirs = View("0", 1000005, (ViewMember("z", 1, 0), ViewMember("b", 1, 1000005)))
    story.claim(history="0", epoch=1000005, size=1, busy=True, digest=digest_of(theirs))
    story.say(wire.Decided(theirs))
    assert story.node.view == before
    assert story.node.wants == ""


def test_a_lone_node_with_a_job_is_left_to_no_other_that_has_more_to_say() -> None:
    story = Story(me="b")
    story.tell(events.FoundHistory())
    story.tell(events.WantGroup("job", (Member("0", "b"),), (), "begins"))
    before = story.node.view
    story.tell(events.Linked("z", 1))
    for number in range(1, 20):
        story.now = story.node.next_wakeup()
        story.tell(events.Tick())
        echo = story.node.detector.number
        beat = wire.Heartbeat(number, echo, links=("b",), history="0", epoch=9, size=1, busy=True)
        story.hear("z", beat)
    assert story.node.detector.status("z") is Status.UP
    assert story.node.view == before


def test_two_fresh_nodes_that_meet_become_one_cluster_without_an_operator() -> None:
    """One of them gives way. Nothing is lost by that: it was alone and had no job."""
    story = Story(me="b")
    story.tell(events.FoundHistory())
    story.run(60)
    story.tell(events.Linked("a", 1))
    for number in range(1, 10):
        story.now = story.node.next_wakeup()
        story.tell(events.Tick())
        echo = story.node.detector.number
        story.hear(
            "a", wire.Heartbeat(number, echo, links=("b",), history="a-1-1", epoch=1, size=1)
        )
    assert story.node.view is None
    assert story.node.wants == "a-1-1"


def test_a_newcomer_uses_the_view_that_most_peers_of_the_history_use() -> None:
    story = Story(me="n")
    mine = ViewMember("n", 1, 6)
    honest = View("L", 6, (*view("abc").members, mine))
    forged = View("L", 7, (ViewMember("z", 1, 0), *view("abc").members, mine))
    for name in "abcz":
        story.tell(events.Linked(name, 1))
    for number in range(1, 6):
        story.now = story.node.next_wakeup()
        story.tell(events.Tick())
        for name in "abcz":
            what = forged if name == "z" else honest
            story.hear(
                name,
                wire.Heartbeat(
                    number,
                    story.node.detector.number,
                    links=tuple("abcnz".replace(name, "")),
                    history="L",
                    epoch=what.epoch,
                    size=4,
                    digest=digest_of(what),
                ),
            )
    assert story.node.wants == "L"
    story.hear("z", wire.Decided(forged))
    assert story.node.view is None
    story.hear("a", wire.Decided(honest))
    assert story.node.view == honest


def test_an_epoch_from_the_end_is_not_heard_and_its_sender_is_named() -> None:
    story = Attacked()
    story.claim()
    assert story.node.detector.status("z") is Status.UP
    (note,) = (
        action
        for action in story.say(wire.Heartbeat(99, installed=5 + MAX_STEP + 1))
        if isinstance(action, events.Note)
    )
    assert "of z is ignored: it claims epoch 1048582, while this node is at 5" in note.reason
    assert story.say(wire.Heartbeat(100, installed=2**31 - 1)) == [], "said once"
    story.beats(20)
    assert story.node.detector.status("z") is not Status.UP


# ---------------------------------------------------------------- one lying member

LYING_MEMBER = {
    "a decision that the receiver did not accept": wire.Decided(
        View("L", 6, view("abc").members, reason="because I say so")
    ),
    "a decision without the receiver": wire.Decided(View("L", 6, without_b())),
    "a ballot from the end": wire.Prepare("L", 5, (2**31 - 1, "a")),
    "a ballot in the name of another": wire.Prepare("L", 5, (6, "c")),
    "a refusal from the end": wire.Rejected((6, "b"), (2**31 - 1, "a"), "no"),
    "a proposal that makes it more senior": wire.Propose(
        wire.Proposal((6, "a"), 5, View("L", 6, (ViewMember("a", 1, 0), *view("abc").members[1:])))
    ),
    "a report of a newer view": wire.RecoveryReport(
        "L", 5, wire.HistoryRecord(View("L", 9, without_b()))
    ),
}


@pytest.mark.parametrize("message", LYING_MEMBER.values(), ids=LYING_MEMBER)
def test_what_a_member_may_not_say_changes_nothing(message: NodeMessage) -> None:
    story = Attacked()
    before = story.state
    ballots = story.node._agreement.paxos
    assert ballots is not None
    votes = (ballots.acceptor.promised, ballots.proposer.highest, ballots.acceptor.accepted)
    story.say(message, "a")
    assert story.state == before
    assert votes == (
        ballots.acceptor.promised,
        ballots.proposer.highest,
        ballots.acceptor.accepted,
    )


NOT_A_SUCCESSOR = {
    "of an earlier view": wire.Proposal((5, "a"), 4, View("L", 5, view("a").members), (), True),
    "of another history": wire.Proposal((6, "a"), 5, View("M", 6, view("a").members), (), True),
}


@pytest.mark.parametrize("accepted", NOT_A_SUCCESSOR.values(), ids=NOT_A_SUCCESSOR)
def test_what_a_member_accepted_must_follow_the_view(accepted: wire.Proposal) -> None:
    """A report of the successor of another view, complete by its own word, was taken for decided:
    no view followed any more."""
    story = Attacked()
    ballots = story.node._agreement.paxos
    assert ballots is not None
    (note,) = (
        action
        for action in story.say(
            wire.RecoveryReport("L", 5, wire.HistoryRecord(view("abc"), accepted)), "a"
        )
        if isinstance(action, events.Note)
    )
    assert "does not follow the view on record" in note.reason
    assert ballots.proposer.reports == {}
    assert story.node._agreement.subtracted == set()


def test_a_proposer_can_put_no_ghosts_into_the_view() -> None:
    """Members that nobody hears would take the majority away from those that are there."""
    story = Attacked()
    new = View("L", 6, (*view("abc").members, ViewMember("ghost", 1, 6)))
    story.say(wire.Prepare("L", 5, (6, "a")), "a")
    story.say(wire.Propose(wire.Proposal((6, "a"), 5, new, (), True)), "a")
    answer = story.sent[-1].message
    assert isinstance(answer, wire.Rejected)
    assert answer.reason == "I do not hear ghost"


def test_a_decision_counts_once_all_that_stay_have_accepted_it() -> None:
    """A proposer that says so too early would have one member use a view that others never do."""
    story = Attacked()
    new = View("L", 6, view("abc").members, reason="a's wish")
    proposal = wire.Proposal((6, "a"), 5, new, (), True)
    story.say(wire.Prepare("L", 5, (6, "a")), "a")
    story.say(wire.Propose(proposal), "a")
    assert isinstance(story.sent[-1].message, wire.Accepted)
    story.say(wire.Decided(new), "a")
    assert story.node.view == view("abc")
    story.say(wire.Accepted((6, "a"), digest_of(new)), "c")
    story.say(wire.Decided(new), "a")
    assert story.node.view == new


def test_a_decision_needs_no_acceptance_of_a_banned_member() -> None:
    """It may have told the proposer alone, and is not heard any more."""
    story = Attacked()
    new = View("L", 6, view("abc").members, reason="a's wish")
    story.say(wire.Prepare("L", 5, (6, "a")), "a")
    story.say(wire.Propose(wire.Proposal((6, "a"), 5, new, (), True)), "a")
    story.say(wire.Decided(new), "a")
    assert story.node.view == view("abc")
    story.tell(events.Barred(frozenset("c")))
    story.say(wire.Decided(new), "a")
    assert story.node.view == new


@pytest.mark.parametrize("told_in", [(6, "a"), (7, "c")], ids=["one ballot", "two ballots"])
def test_what_all_have_accepted_in_one_ballot_counts_whatever_a_liar_proposes_after_it(
    told_in: wire.Ballot,
) -> None:
    """A liar proposes without having asked for promises. In two ballots nothing is chosen."""
    story = Attacked()
    new = View("L", 6, view("abc").members, reason="a's wish")
    other = View("L", 6, view("abc").members, reason="c's wish")
    story.say(wire.Prepare("L", 5, (6, "a")), "a")
    story.say(wire.Propose(wire.Proposal((6, "a"), 5, new, (), True)), "a")
    story.say(wire.Accepted((6, "a"), digest_of(new)), "a")
    story.say(wire.Accepted(told_in, digest_of(new)), "c")
    story.say(wire.Propose(wire.Proposal((8, "c"), 5, other, (), True)), "c")
    assert isinstance(story.sent[-1].message, wire.Accepted)
    story.say(wire.Decided(new), "a")
    assert story.node.view == (new if told_in == (6, "a") else view("abc"))


def test_a_silent_member_is_not_kept_by_the_word_of_a_node_that_was_not_asked() -> None:
    story = Attacked()
    story.beats(12, who="a")
    story.say(wire.Reached("c"), "z")
    status = story.node.detector.status("c")
    assert status in (Status.SUSPECT, Status.SILENT)
    story.say(wire.Reached("c"), "a")
    assert story.node.detector.status("c") is Status.CUT, "a is a member, and was asked"


# ---------------------------------------------------------------- bounds


def test_peers_that_come_and_go_are_forgotten_before_members() -> None:
    detector = FailureDetector(Timing())
    detector.members = frozenset({"member"})
    detector.meet("member", 1)
    for i in range(2 * MAX_PEERS):
        detector.meet(f"key{i}", 1)
    assert len(detector.peers) == MAX_PEERS
    assert "member" in detector.peers


def test_histories_that_a_node_has_resigned_from_are_bounded() -> None:
    story = Attacked()
    for i in range(2 * MAX_RESIGNED):
        story.claim_once(f"H{i}")
        story.say(wire.RecoveryRequest(f"H{i}", 1))
    assert len(story.node._agreement.resigned) == MAX_RESIGNED


def test_a_view_that_does_not_fit_is_refused_by_those_that_ask_for_it_and_by_all_others() -> None:
    members = tuple(Member(f"{'w' * 200}{i}", "a") for i in range(4096))
    want = events.WantGroup("job", members, (), "too many")
    assert "no room" in objection_to(want, view("abc"))
    large = View("L", 6, view("abc").members, (JobGroup("job", 6, members),))
    assert "bytes" in objection_to_form(large)


NO_SUCCESSORS = {
    "an old epoch": View("L", 5, view("abc").members),
    "a fork without an operator": View("L", 6, view("abc").members, fork_of="M"),
    "members out of order": View("L", 6, view("abc").members[::-1]),
    "a node twice": View("L", 6, (*view("abc").members, ViewMember("c", 2, 6))),
    "a newcomer before the others": View("L", 6, (ViewMember("0", 1, 0), *view("abc").members)),
    "a group of tomorrow": View("L", 6, view("abc").members, (JobGroup("job", 7, ()),)),
}


@pytest.mark.parametrize("new", NO_SUCCESSORS.values(), ids=NO_SUCCESSORS)
def test_what_is_no_successor_of_a_view(new: View) -> None:
    assert objection_to_successor(view("abc"), new)


def test_what_is_one() -> None:
    new = View("L", 9, (*without_b(), ViewMember("n", 1, 9)), (JobGroup("job", 9, ()),))
    assert objection_to_successor(view("abc"), new) == ""
