"""A process that waits for another one to gather the next group."""

from __future__ import annotations

import itertools
import socket
import time
from typing import Any

import pytest

from potluck._core.backends import discovery_gather, discovery_rules
from potluck._core.backends.discovery_gather import Found, Gathering, Next
from potluck._core.types import Member
from potluck._core.wire.gathering import Attempt, Formed, Participant
from potluck.errors import LinkError

WAIT_S = 60.0
ADA, BOB, CLEO = (
    Participant(digit * 32, Member(str(rank), digit, "10.0.0.1", 1000 + rank))
    for rank, digit in enumerate("abc")
)


class Credentials:
    namespace = "home"


class SilentLink:
    """A link whose other side says nothing, and does not end it."""

    peer_host = "10.0.0.1"
    readable = False

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()

    def fileno(self) -> int:
        return self._here.fileno()

    def send(self, data: memoryview) -> int:
        return len(data)

    def close(self) -> None:
        self._here.close()
        self._there.close()


@pytest.fixture
def bob(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    def connect(*_: Any, **__: Any) -> tuple[SilentLink, None]:
        return SilentLink(), None

    unused: Any = None
    credentials: Any = Credentials()
    monkeypatch.setattr(discovery_gather, "connect", connect)
    return Gathering(BOB, 0, credentials, unused, unused)


def test_a_gatherer_that_falls_silent_is_given_up_for_the_next_long_before_the_deadline(
    bob: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped, or its host cut off, when this process had joined: its link stays."""
    monkeypatch.setattr(discovery_gather, "_PROBE_S", 0.0)
    monkeypatch.setattr(discovery_rules, "SILENT_S", 0.1)
    answers = itertools.chain([Found.RUNS], itertools.repeat(Found.SILENT))
    monkeypatch.setattr(bob, "probe", lambda participant: next(answers))
    situation = Next(BOB.instance, Formed(1, (ADA, BOB, CLEO)), None)
    deadline = time.monotonic() + WAIT_S
    assert bob._ask(situation, ADA, deadline) is None
    assert time.monotonic() < deadline
    assert situation.seniors() == [], "this process gathers now"


def test_a_successor_at_the_gatherers_port_is_not_joined(
    bob: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bob, "probe", lambda participant: Found.GONE)
    situation = Next(BOB.instance, Formed(1, (ADA, BOB, CLEO)), None)
    assert bob._ask(situation, ADA, time.monotonic() + WAIT_S) is None
    assert situation.seniors() == []
    assert situation.absent([]) == [CLEO.instance]


def test_a_group_that_was_agreed_on_counts_until_a_newer_one_is_known(bob: Gathering) -> None:
    situation = Next(BOB.instance, Formed(1, (ADA, BOB, CLEO)), None)
    bob._remember(Formed(2, (ADA, BOB)))
    for attempt in bob.attempts:
        situation.attempted(attempt)
    situation.heard(ADA.instance, Found.SILENT)
    assert not situation.is_complete([CLEO.instance])
    assert bob.attempts == [Attempt(2, (ADA.instance, BOB.instance))]


def test_a_group_of_an_epoch_that_is_over_is_not_entered(bob: Gathering) -> None:
    with pytest.raises(LinkError, match="formed epoch 2; this process is past 3"):
        bob._entered(Formed(2, (ADA, BOB)), "10.0.0.1", 3)
