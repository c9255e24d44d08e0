"""Whose jobs a machine runs: the owner's rule, and the decisions about single members."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck._core.cluster.sharing.offers import SharingStore
from potluck._core.cluster.sharing.rules import (
    Kept,
    decided,
    is_allowed,
    objection,
    ruled,
    undecided,
    who_may,
)
from potluck._core.wire.peers import MAX_DECISIONS, Offer
from potluck.errors import ConfigurationError

NAMES = {"ada": "a" * 64, "bob": "b" * 64}
ADA, BOB, CARL = "a" * 64, "b" * 64, "c" * 64


def find(name: str) -> str:
    if name not in NAMES:
        raise ConfigurationError(f"no node {name}")
    return NAMES[name]


@pytest.mark.parametrize(
    ("text", "ada", "carl"),
    [("all", True, True), ("none", False, False), ("ask", None, None), ("ada, bob", True, False)],
)
def test_a_rule_says_whose_jobs_run(text: str, ada: bool | None, carl: bool | None) -> None:
    offer = ruled(Kept(), text, find).offer()
    assert (is_allowed(offer, ADA), is_allowed(offer, CARL)) == (ada, carl)


@pytest.mark.parametrize("text", ["", ",", "all,ada", "none,none", "nobody"])
def test_a_rule_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--run-for|no node nobody"):
        ruled(Kept(), text, find)


def test_a_new_rule_replaces_all_decisions_and_keeps_the_pause() -> None:
    kept = decided(decided(Kept(is_paused=True), ADA, is_allowed=True), BOB, is_allowed=False)
    for text in ("all", "none", "ask"):
        assert ruled(kept, text, find) == Kept(text, is_paused=True, given=text)
    bob = Kept("none", allowed=(BOB,), is_paused=True, given="bob")
    assert ruled(kept, "bob", find) == bob


@pytest.mark.parametrize("text", ["all", "none", "ask", "ada, bob"])
def test_the_rule_of_each_start_of_a_service_leaves_later_decisions_in_force(text: str) -> None:
    """What was denied, or banned, is not allowed again because the machine was started anew."""
    for is_allowed_now in (True, False):
        kept = decided(ruled(Kept(), text, find), ADA, is_allowed=is_allowed_now)
        again = ruled(kept, text, find)
        assert again == kept
        assert is_allowed(again.offer(), ADA) is is_allowed_now
    assert ruled(kept, "none" if text == "all" else "all", find).denied == ()


@pytest.mark.parametrize("rule", ["all", "ask", "none"])
def test_a_decision_holds_under_any_rule_until_the_opposite_one(rule: str) -> None:
    kept = ruled(Kept(), rule, find)
    for verdict in (True, False, False, True):
        kept = decided(kept, ADA, is_allowed=verdict)
        assert is_allowed(kept.offer(), ADA) is verdict
        assert len((*kept.allowed, *kept.denied)) == 1


def test_decisions_are_bounded() -> None:
    kept = Kept(denied=tuple(map(str, range(MAX_DECISIONS))))
    assert decided(kept, "7", is_allowed=False).denied[-1] == "7"
    with pytest.raises(ConfigurationError, match="begin anew with a rule"):
        decided(kept, ADA, is_allowed=False)


def test_who_is_refused_is_told_why_and_what_to_do() -> None:
    def why(offer: Offer, starter: str = ADA, *, is_own: bool = False) -> str:
        return objection(offer, is_own=is_own, starter=starter, called=lambda node: node[0])

    assert why(Offer("all")) == ""
    assert why(Offer("all", denied=(ADA,))).startswith(
        "its owner does not let it run jobs of a; `potluck"
    )
    assert "`potluck allow aaaaaaaa` there" in why(Offer("none"))
    assert "has not decided yet whether it runs jobs of a" in why(Offer("ask"))
    assert "`potluck resume` there" in why(Offer("all", is_paused=True))
    assert why(Offer("none"), is_own=True) == "", "its own jobs"
    assert "paused" in why(Offer("all", is_paused=True), is_own=True), "not even its own"
    assert "starts jobs only" in why(Offer("none", is_paused=True), is_own=True)


def test_only_those_about_whom_nothing_was_said_are_asked_about() -> None:
    assert undecided(Offer("ask", allowed=(ADA,), denied=(BOB,)), (ADA, BOB, CARL)) == (CARL,)
    assert undecided(Offer("all"), (ADA, BOB)) == undecided(Offer("none"), (ADA, BOB)) == ()


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (Offer("all"), "all"),
        (Offer("all", denied=(BOB,)), "all but b"),
        (Offer("ask"), "asked for each"),
        (Offer("ask", allowed=(ADA,)), "a; asked for others"),
        (Offer("none"), "none"),
        (Offer("none", allowed=(ADA, BOB)), "a, b"),
        (Offer("none", allowed=(ADA,) * 10), "a, a, a, a, a, a, a, a and 2 more"),
    ],
)
def test_the_rule_in_a_few_words(offer: Offer, words: str) -> None:
    assert who_may(offer, lambda node: node[0]) == words


def test_decisions_outlive_the_agent_and_a_damaged_file_allows_nothing(tmp_path: Path) -> None:
    store = SharingStore(tmp_path)
    assert store.read() == Kept()
    kept = Kept("none", (ADA,), (BOB,), True)
    store.write(kept)
    assert SharingStore(tmp_path).read() == kept
    file = tmp_path / "sharing.json"
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text('{"rule": "everybody"}')
    with pytest.raises(ConfigurationError, match=r"is damaged.*potluck up --run-for"):
        store.read()
