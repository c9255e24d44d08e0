"""Seniority, majorities, whom to keep: tables."""

from __future__ import annotations

import pytest

from potluck._core.cluster.membership.view import (
    by_seniority,
    explain_minority,
    has_majority,
    keep,
    newcomers,
)
from potluck._core.wire.nodes import ViewMember


def nodes(names: str) -> tuple[ViewMember, ...]:
    """Seats that joined one after the other."""
    return tuple(ViewMember(name, 1, joined) for joined, name in enumerate(names, 1))


def test_the_first_to_join_is_the_most_senior_then_the_lesser_name() -> None:
    unsorted = [ViewMember("z", 1, 1), ViewMember("b", 1, 2), ViewMember("a", 3, 2)]
    assert [member.node for member in by_seniority(unsorted[::-1])] == ["z", "a", "b"]


MAJORITIES = [
    # members, who agrees, the certainly dead, and whether that is enough
    ("alone", "a", "a", "", True),
    ("two of three", "abc", "bc", "", True),
    ("one of three", "abc", "a", "", False),
    ("half, with the leader", "abcd", "ad", "", True),
    ("half, without", "abcd", "bc", "", False),
    ("of two the leader", "ab", "a", "", True),
    ("of two the other", "ab", "b", "", False),
    ("of two the survivor", "ab", "b", "a", True),
    ("three of five", "abcde", "cde", "", True),
    ("two of five", "abcde", "ab", "", False),
    ("two of the three that live", "abcde", "ab", "cd", True),
    ("half of those that live, with their most senior", "abcde", "bc", "a", True),
    ("half of those that live, without", "abcde", "de", "a", False),
    ("the dead have no vote", "abc", "ac", "c", True),
    ("nobody lives", "abc", "", "abc", False),
    ("strangers have no vote", "abc", "axyz", "", False),
]


@pytest.mark.parametrize(
    ("members", "acks", "dead", "wanted"),
    [row[1:] for row in MAJORITIES],
    ids=[row[0] for row in MAJORITIES],
)
def test_majorities(members: str, acks: str, dead: str, wanted: bool) -> None:
    assert has_majority(nodes(members), set(acks), set(dead)) is wanted


@pytest.mark.parametrize("members", ["a", "ab", "abc", "abcd", "abcde"])
def test_two_sides_are_never_both_a_majority(members: str) -> None:
    for chosen in range(1 << len(members)):
        side = {name for i, name in enumerate(members) if chosen >> i & 1}
        rest = set(members) - side
        assert has_majority(nodes(members), side) != has_majority(nodes(members), rest)


def test_a_minority_is_explained() -> None:
    assert explain_minority(nodes("abc"), {"c"}) == "only 1 of 3 nodes can be reached from here"
    text = explain_minority(nodes("ab"), {"b"})
    assert text.endswith("and the most senior, a, is not among them")


KEPT = [
    ("nothing is broken", "abc", [], "abc"),
    ("the less senior end goes", "abc", ["ac"], "ab"),
    ("even if it is the second", "abc", ["bc"], "ab"),
    ("the most senior goes when it has most broken links", "abcd", ["ab", "ac"], "bcd"),
    ("two pairs", "abcd", ["ab", "cd"], "ac"),
    ("links to strangers do not count", "ab", ["ax"], "ab"),
    ("all broken: the most senior is left", "abc", ["ab", "bc", "ac"], "a"),
]


@pytest.mark.parametrize(
    ("members", "broken", "wanted"), [row[1:] for row in KEPT], ids=[row[0] for row in KEPT]
)
def test_who_is_kept(members: str, broken: list[str], wanted: str) -> None:
    pairs = {frozenset(pair) for pair in broken}
    assert "".join(member.node for member in keep(nodes(members)[::-1], pairs)) == wanted


def test_newcomers_need_links_to_all_and_to_each_other() -> None:
    links = {"a": "bcxyz", "b": "acxy", "x": "aby", "y": "abx", "z": "axy"}
    assert newcomers(links, ["a", "b"], ["z", "y", "x"]) == ("x", "y")
    assert newcomers(links | {"x": "ab"}, ["a", "b"], ["y", "x"]) == ("x",)
    assert newcomers({"a": "x"}, ["a"], ["x"]) == (), "it does not hear us"
