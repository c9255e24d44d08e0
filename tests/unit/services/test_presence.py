"""Which callers of a service are there: heard lately, in the group, and not gone."""

from __future__ import annotations

import pytest

from potluck._core.types import Group, Member
from potluck.services import Call
from potluck.services import presence as module
from potluck.services.presence import Presence


def call_of(worker: str) -> Call:
    return Call("node", worker, 0, "s", "m", 1.0)


def test_a_worker_is_there_while_it_is_in_the_group_and_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    groups = [Group(1, 0, (Member("0"), Member("1"), Member("2")))]
    it = Presence(lambda: groups[-1], silence_s=10.0)
    assert it.others("0") == ["1", "2"]
    now[0] = 108.0
    it.hear(call_of("1"))
    now[0] = 111.0
    assert it.others("0") == ["1"]
    assert it.workers() == ["0", "1", "2"]
    assert not it.is_there("2")
    it.leave("1")
    assert not it.is_there("1")
    assert it.workers() == ["0", "2"]
    it.hear(call_of("1"))
    assert it.is_there("1")
    groups.append(Group(2, 0, (Member("0"),)))
    assert not it.is_there("1")


def test_a_worker_that_is_in_the_group_no_more_is_lost_once() -> None:
    groups = [Group(1, 0, (Member("0"), Member("1"), Member("2")))]
    it = Presence(lambda: groups[-1], silence_s=10.0)
    assert it.lost() == []
    groups.append(Group(2, 0, (Member("0"), Member("3"))))
    assert it.lost() == ["1", "2"]
    assert it.lost() == []
    groups.append(groups[0])
    assert it.lost() == ["3"]


def test_a_worker_that_has_left_and_comes_back_is_there_again() -> None:
    """Also if no group without it was seen between its lives; one that stays has left."""
    groups = [Group(1, 0, (Member("0", port=5), Member("1", port=6), Member("2", port=7)))]
    it = Presence(lambda: groups[-1], silence_s=10.0)
    for worker in ("1", "2"):
        it.leave(worker)
    assert it.workers() == ["0"]
    assert it.lost() == []
    groups.append(Group(2, 0, (Member("0", port=5), Member("2", port=7), Member("1", port=8))))
    assert it.others("0") == ["1"]
    assert it.gone() == ["2"]
    assert it.lost() == ["1"], "its first life"
    for port, there in ((7, ["0", "1"]), (9, ["0", "1", "2"])):  # cut off; started again
        groups.append(Group(3, 0, (Member("0", port=5), Member("1", port=8))))
        assert it.workers() == ["0", "1"]
        groups.append(Group(4, 0, (*groups[-1].members, Member("2", port=port))))
        assert it.workers() == there
