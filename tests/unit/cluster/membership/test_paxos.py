"""Deciding one view, told message by message: who hears what, who is gone, what may follow."""

from __future__ import annotations

from collections.abc import Collection

from potluck._core.cluster.membership.paxos import Effects, PaxosInstance
from potluck._core.wire.nodes import (
    Accepted,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Rejected,
    View,
    ViewMember,
)

MEMBERS = tuple(ViewMember(name, 1, joined) for joined, name in enumerate("abc", 1))


def successor(names: str, epoch: int, *, joining: str = "") -> View:
    members = [member for member in MEMBERS if member.node in names]
    return View("L", epoch, (*members, *(ViewMember(name, 1, epoch) for name in joining)))


class Table:
    """The members of one view, each with what it knows; ``gone`` hear and say nothing."""

    def __init__(self, names: str = "abc") -> None:
        view = View("L", 5, tuple(member for member in MEMBERS if member.node in names))
        self.members = {name: PaxosInstance(name, view) for name in names}
        self.gone: set[str] = set()
        self.mute_accepts: set[str] = set()
        self.decided: dict[str, View] = {}
        self.failed: dict[str, str] = {}

    def propose(
        self, me: str, keep: str, subtracted: Collection[str] = (), joining: str = ""
    ) -> None:
        effects = self.members[me].propose(
            keep,
            lambda epoch: successor(keep, epoch, joining=joining),
            floor=0,
            subtracted=subtracted,
            ended=subtracted,
            ends_at=1.0,
        )
        self.follow(me, effects, subtracted)

    def follow(self, me: str, effects: Effects, subtracted: Collection[str]) -> None:
        """Carry out what came of it, at once, with a disk that is fast."""
        if effects.failed:
            self.failed[me] = effects.failed
        if effects.decided is not None:
            self.decided[me] = effects.decided
        member = self.members[me]
        if effects.accept is not None and member.acceptor.accept(effects.accept):
            self.follow(me, member.saved(effects.accept, subtracted), subtracted)
        for send in effects.actions:
            if send.node not in self.gone:  # type: ignore[union-attr]
                self.deliver(me, send.node, send.message, subtracted)  # type: ignore[union-attr]

    def deliver(
        self, source: str, target: str, message: object, subtracted: Collection[str]
    ) -> None:
        member = self.members[target]
        match message:
            case Prepare():
                effects = member.prepare(source, message)
            case Promise():
                effects = member.promised_by(source, message, subtracted)
            case Propose(proposal):
                effects = member.proposed(source, proposal, "")
            case Accepted(ballot):
                if target in self.mute_accepts:
                    return
                effects = member.accepted_by(source, ballot, subtracted)
            case Rejected():
                effects = member.rejected_by(source, message)
            case _:
                raise AssertionError(message)
        self.follow(target, effects, subtracted)


def test_all_that_stay_accept_and_it_is_decided() -> None:
    table = Table()
    table.propose("a", "ab", subtracted="c")
    assert table.decided == {"a": successor("ab", 6)}
    assert [table.members[n].acceptor.accepted is not None for n in "abc"] == [True, True, False]


def test_alone_it_takes_no_messages() -> None:
    table = Table("a")
    table.propose("a", "a", joining="x")
    assert table.decided["a"].nodes == ("a", "x")


def test_one_that_stays_and_does_not_answer_holds_it_up() -> None:
    table = Table()
    table.gone.add("c")
    table.propose("a", "abc", joining="x")
    assert table.decided == {}
    assert table.members["a"].proposer.expire(0.9) == Effects()
    assert table.members["a"].proposer.expire(1.0).failed == "no answer from c"


def test_a_ballot_is_promised_once() -> None:
    """A number comes again only if a message was doubled, or its proposer forgot that it had used
    it. A second promise would say less of this member than the first: whom it has promised to since
    it accepted the proposal of that very ballot."""
    member, ballot = PaxosInstance("b", View("L", 5, MEMBERS)), (6, "a")
    prepare = Prepare("L", 5, ballot)
    (first,) = member.prepare("a", prepare).actions
    assert first.message == Promise(ballot, None, ("a",))  # type: ignore[union-attr]
    refusal = Rejected(ballot, ballot, "I promised a newer one")
    (again,) = member.prepare("a", prepare).actions
    assert again.message == refusal  # type: ignore[union-attr]
    proposal = Proposal(ballot, 5, successor("ab", 6))
    assert member.proposed("a", proposal, "").accept == proposal
    assert member.acceptor.accept(proposal)
    (late,) = member.prepare("a", prepare).actions
    assert late.message == refusal  # type: ignore[union-attr]
    assert member.acceptor.promised_to == frozenset(), "of none since it accepted"


def test_a_minority_decides_nothing() -> None:
    table = Table()
    table.propose("c", "c")
    assert table.decided == {}
    assert table.failed["c"] == "only 1 of 3 nodes can be reached from here"
    assert table.members["c"].acceptor.accepted is None


def test_the_dead_are_subtracted() -> None:
    table = Table()
    table.gone = {"a", "b"}
    table.propose("c", "c", subtracted="ab")
    assert table.decided["c"].nodes == ("c",)


def test_what_all_have_accepted_stays_though_its_proposer_never_said_so() -> None:
    table = Table()
    table.mute_accepts.add("a")
    table.propose("a", "abc", joining="x")
    table.gone.add("a")  # silent, perhaps it heard them and went on
    table.propose("b", "bc")
    assert table.decided["b"] == successor("abc", 6, joining="x")


def test_the_same_when_the_proposer_is_known_to_be_dead() -> None:
    table = Table()
    table.mute_accepts.add("a")
    table.propose("a", "ab", subtracted="c")
    table.gone = {"a"}
    table.propose("b", "b", subtracted="ac")
    assert table.decided["b"] == successor("ab", 6), "first that one, then the next"


def test_it_is_void_when_one_of_its_members_is_here_and_has_not_accepted_it() -> None:
    table = Table()
    table.gone.add("c")
    table.propose("a", "abc", joining="x")  # c never hears of it
    table.gone = {"a"}
    table.members["b"].acceptor.accepted = Proposal((6, "a"), 5, successor("abc", 6, joining="x"))
    table.propose("b", "bc", subtracted="a")
    assert table.decided["b"].nodes == ("b", "c")


def test_a_dead_member_that_had_not_accepted_proves_nothing() -> None:
    """Whoever knew of its death may have decided without it."""
    table = Table()
    past = Proposal((6, "b"), 5, successor("abc", 6, joining="x"), ("a",))
    for name in "bc":
        table.members[name].acceptor.accepted = past
        table.members[name].acceptor.promised = past.ballot
    table.members["c"].proposer.reports["a"] = None
    table.propose("c", "bc", subtracted="a")
    assert table.decided["c"] == past.view


def test_nobody_guesses_what_only_the_absent_know() -> None:
    table = Table()
    past = Proposal((6, "b"), 5, successor("ac", 6))
    table.members["c"].acceptor.accepted = past
    table.gone.add("a")
    table.propose("b", "bc")
    assert table.decided == {}
    assert table.failed["b"] == "only a knows whether a view was agreed on"


def four(me: str) -> PaxosInstance:
    """What ``me`` knows of the view of a, b, c, d, where c has ended."""
    members = tuple(ViewMember(name, 1, joined) for joined, name in enumerate("abcd", 1))
    return PaxosInstance(me, View("L", 5, members))


def offered(member: PaxosInstance, past: Proposal, asked: str) -> View | None:
    """What ``member`` proposes when all ``asked`` promised, of whom those in ``past`` accepted."""
    keep = View("L", 9, tuple(each for each in member.view.members if each.node in asked))
    effects = member.propose(
        asked, lambda epoch: keep, floor=8, subtracted="c", ended="c", ends_at=1.0
    )
    for node in set(asked) - {member.me}:
        told = past if node in past.view.nodes else None
        effects = member.promised_by(node, Promise((9, member.me), told), "c")
    return None if effects.accept is None else effects.accept.view


def test_nobody_guesses_what_only_the_ended_knew() -> None:
    member = four("a")
    past = Proposal(
        (6, "a"), 5, View("L", 6, tuple(s for s in member.view.members if s.node in "ac"))
    )
    assert member.acceptor.accept(past)
    assert offered(member, past, "abd") is None


def test_what_the_ended_accepted_and_testified_is_decided() -> None:
    """Without c's vote a alone would be no majority."""
    member = four("a")
    past = Proposal(
        (6, "a"), 5, View("L", 6, tuple(s for s in member.view.members if s.node in "ac"))
    )
    assert member.acceptor.accept(past)
    member.proposer.reports["c"] = past
    keep = View("L", 9, tuple(each for each in member.view.members if each.node in "abd"))
    member.propose("abd", lambda epoch: keep, floor=8, subtracted="c", ended="c", ends_at=1.0)
    member.promised_by("b", Promise((9, "a"), None), "c")
    assert member.promised_by("d", Promise((9, "a"), None), "c").decided == past.view


def test_a_view_is_void_once_the_ended_testified_that_it_had_not_accepted() -> None:
    """a alone is no majority: that view would be offered for ever."""
    member = four("a")
    past = Proposal(
        (6, "a"), 5, View("L", 6, tuple(s for s in member.view.members if s.node in "ac"))
    )
    assert member.acceptor.accept(past)
    member.proposer.reports["c"] = None
    view = offered(member, past, "abd")
    assert view is not None
    assert view.nodes == ("a", "b", "d")


def test_what_too_few_accepted_is_void_once_every_seat_is_known_of() -> None:
    """c, which has ended, gave b a lease: so it had not accepted a view without b."""
    member = four("b")
    past = Proposal(
        (6, "a"), 5, View("L", 6, tuple(s for s in member.view.members if s.node in "ac"))
    )
    view = offered(member, past, "abd")
    assert view is not None
    assert view.nodes == ("a", "b", "d")


def test_of_two_attempts_the_newer_wins_and_the_older_is_told() -> None:
    table = Table()
    table.members["b"].acceptor.promised = (9, "c")
    table.propose("a", "ab", subtracted="c")
    assert table.failed["a"] == "b refused: I promised a newer one"
    table.propose("a", "ab", subtracted="c")
    assert table.decided["a"].epoch == 10


def test_answers_to_older_attempts_do_not_count() -> None:
    table = Table()
    table.gone = {"b", "c"}
    table.propose("a", "ab")
    table.propose("a", "ab")
    member = table.members["a"]
    assert member.promised_by("b", Promise((6, "a")), ()) == Effects()
    assert member.accepted_by("b", (7, "a"), ()) == Effects(), "not proposed yet"
    assert member.rejected_by("b", Rejected((6, "a"), (40, "c"), "late")) == Effects()
    table.gone.clear()
    table.propose("a", "ab", subtracted="c")
    assert table.decided["a"].epoch == 41, "but the numbers are remembered"


def test_a_view_that_its_proposer_could_not_finish_holds_nobody_up() -> None:
    """c may have accepted it, and is gone: who offered it is here, and it came to nothing."""
    table = Table()
    table.mute_accepts = {"a"}
    table.propose("a", "abc", joining="d")
    table.mute_accepts = set()
    assert not table.decided
    table.gone.add("c")
    table.propose("a", "ab")
    assert table.decided["a"].nodes == ("a", "b")


def test_but_it_does_when_somebody_else_may_have_come_to_it() -> None:
    """c was promised something by b meanwhile: it may have found that all had accepted."""
    table = Table()
    table.mute_accepts = {"a"}
    table.propose("a", "abc", joining="d")
    table.mute_accepts = set()
    ballot = (99, "c")
    table.members["b"].prepare("c", Prepare("L", 5, ballot))
    table.gone.add("c")
    table.members["a"].proposer.highest = 100
    table.propose("a", "ab")
    assert not table.decided
    assert "only c knows" in table.failed["a"]
