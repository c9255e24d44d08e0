"""When processes that found each other are a group: the first, the next; groups that exist."""

from __future__ import annotations

import itertools

import pytest

from potluck._core.backends.discovery_rules import (
    SILENT_S,
    ExistingGroups,
    FirstGroup,
    NextGroup,
    in_order,
    named,
    rounds,
)
from potluck._core.types import MeasuredPath, Member
from potluck._core.wire.gathering import Participant


def test_the_first_group_waits_for_enough_others_and_for_quiet() -> None:
    rule = FirstGroup(0, 2, settle_s=2.0)
    assert not rule.is_complete(["b"], ["b"], 0.0)
    assert not rule.is_complete(["b"], ["b"], 100.0), "quiet, but not enough"
    assert not rule.is_complete(["b", "c"], ["b", "c"], 101.0), "enough, but not quiet yet"
    assert not rule.is_complete(["b", "c", "d"], ["b", "c"], 102.5), "somebody new turned up"
    assert not rule.is_complete(["b", "c", "d"], ["b", "c"], 200.0), "nobody is left behind"
    assert rule.is_complete(["b", "c", "d"], ["b", "c", "d"], 200.0)


def test_a_peer_that_ended_is_not_waited_for_once_it_is_quiet_again() -> None:
    rule = FirstGroup(0, 1, settle_s=2.0)
    assert not rule.is_complete(["b", "c"], ["b"], 0.0)
    assert not rule.is_complete(["b"], ["b"], 10.0)
    assert rule.is_complete(["b"], ["b"], 12.0)


def test_a_world_size_fixes_the_number_without_a_pause() -> None:
    rule = FirstGroup(3, 2)
    assert not rule.is_complete(["b", "c"], ["b"], 0.0)
    assert rule.is_complete(["b", "c", "d"], ["b", "c"], 0.0), "the fourth is too many"
    assert FirstGroup(1, 0).is_complete(["b"], [], 0.0), "a world of one needs nobody"


def test_those_that_remain_go_on_at_once_when_the_others_are_certainly_gone() -> None:
    rule = NextGroup("abc")
    assert not rule.is_complete("bc", 0.0), "a may yet come"
    rule.ended("a")
    assert rule.is_complete("bc", 0.0)
    rule.ended("b")
    assert rule.is_complete("c", 0.0)


def test_a_majority_goes_on_without_a_silent_member_and_a_minority_does_not() -> None:
    rule = NextGroup("abc")
    rule.unanswered("a", 10.0)
    assert not rule.is_complete("bc", 10.0 + SILENT_S / 2)
    assert rule.is_complete("bc", 10.0 + SILENT_S)
    rule.answered("a")
    assert not rule.is_complete("bc", 100.0), "it runs: it is waited for"
    alone = NextGroup("abc")
    alone.unanswered("b", 0.0)
    alone.unanswered("c", 0.0)
    assert not alone.is_complete("a", 1000.0)
    assert "1 of 3 members that may still run is not a majority" in alone.objection("a")


def test_of_two_halves_the_one_with_the_most_senior_goes_on() -> None:
    assert NextGroup("abcd").objection("ab") == ""
    assert "half of them without the most senior" in NextGroup("abcd").objection("cd")
    rule = NextGroup("abcd")
    rule.ended("a")
    rule.ended("b")
    assert rule.objection("c") == "", "of those that may run, c is the most senior"
    assert rule.objection("d") != ""


@pytest.mark.parametrize("count", range(1, 6))
def test_however_a_group_is_cut_at_most_one_side_goes_on(count: int) -> None:
    everyone = "abcde"[:count]
    for sides in itertools.product((0, 1), repeat=count):
        halves = [[m for m, side in zip(everyone, sides, strict=True) if side == k] for k in (0, 1)]
        may = [half for half in halves if half and not NextGroup(everyone).objection(half)]
        assert len(may) == 1, (halves, may)


def test_a_group_that_was_agreed_on_and_may_have_come_about_is_not_left_behind() -> None:
    """Of a, b, c the last was cut off. a and b agreed to go on, and only a saw that come about:
    then a trains, and b must not go on with c, a majority of the last group that b saw."""
    rule = NextGroup("abc")
    assert rule.objection("bc") == ""
    rule.attempts = ["ab"]
    assert "1 of 2 members that may still run is half" in rule.objection("bc")
    assert rule.objection("ab") == ""
    assert "1 of 3" in rule.objection("a"), "nor may a alone: it has not seen it come about either"
    rule.ended("a")
    assert rule.objection("bc") == ""


@pytest.mark.parametrize("last", ["abc", "abcd"])
def test_whoever_saw_which_attempt_complete_at_most_one_group_goes_on(last: str) -> None:
    """A group is agreed on, some of its members see it complete, and then the network is cut."""
    attempts = [
        each
        for size in range(1, len(last))
        for each in itertools.combinations(last, size)
        if not NextGroup(last).objection(each)
    ]
    for attempt in attempts:
        for saw in itertools.product((False, True), repeat=len(attempt)):
            complete = [member for member, sees in zip(attempt, saw, strict=True) if sees]
            for sides in itertools.product((0, 1), repeat=len(last)):
                may = []
                for side in (0, 1):
                    present = [s for s, where in zip(last, sides, strict=True) if where == side]
                    rule = NextGroup(attempt if set(complete) & set(present) else last)
                    if set(attempt) & set(present):
                        rule.attempts = [attempt]
                    members = [each for each in present if each in rule.members]
                    may += [members] if members and not rule.objection(members) else []
                assert len(may) <= 1, (attempt, complete, may)


def test_a_group_that_is_about_to_end_is_waited_for_and_one_that_goes_on_is_an_answer() -> None:
    existing = ExistingGroups()
    assert not existing
    existing.refused(("10.0.0.1", 1), "formed by a", 0.0)
    existing.refused(("10.0.0.2", 1), "formed by b", 3.0)
    assert existing
    assert existing.answer(4.0) == ""
    existing.ended(("10.0.0.1", 1))
    existing.refused(("10.0.0.2", 1), "formed by b", 6.0)
    assert existing.answer(7.0) == ""
    assert existing.answer(8.0) == "formed by b"
    existing.ended(("10.0.0.2", 1))
    assert not existing


@pytest.mark.parametrize("count", range(9))
def test_in_the_rounds_every_pair_meets_once_and_nobody_is_twice_in_one(count: int) -> None:
    played = list(itertools.chain(*rounds(count)))
    assert sorted(played) == list(itertools.combinations(range(count), 2))
    for pairs in rounds(count):
        players = list(itertools.chain(*pairs))
        assert len(players) == len(set(players))


def test_ranks_follow_the_ring_that_avoids_the_slow_link_and_the_first_stays_the_first() -> None:
    participants = [
        Participant(f"{i:032x}", Member("", node, "10.0.0.1", 1)) for i, node in enumerate("abcd")
    ]
    fast, slow = 1e9, 1e6
    paths = [
        MeasuredPath(x, y, 1e-4, slow if {x, y} == {"a", "b"} else fast)
        for x, y in itertools.permutations("abcd", 2)
    ]
    ranked, known = in_order(participants, paths)
    order = [each.member.node for each in ranked]
    assert order[0] == "a"
    assert "b" not in (order[1], order[-1]), "a and b are not neighbours"
    assert len(known) == 12
    assert [each.member.worker for each in named(ranked)] == ["0", "1", "2", "3"]
    left, known = in_order(ranked[1:], known)
    assert {path.source for path in known} == {"b", "c", "d"}
    assert len(left) == 3
