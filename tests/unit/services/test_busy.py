"""Waits that are busy while a peer is quick."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator

import pytest

from potluck.services import poller
from potluck.services.poller import BusyWait


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, BusyWait]]:
    monkeypatch.setattr(poller, "_HAS_OTHERS", True)
    here, there = socket.socketpair()
    with here, there:
        yield there, BusyWait(here.fileno())


def test_only_a_quick_peer_is_waited_for_busily(pair: tuple[socket.socket, BusyWait]) -> None:
    there, wait = pair
    there.send(b"x")
    assert not wait.run(), "nothing is known of the peer"
    wait.note(0.1)
    assert not wait.run()
    wait.note(1e-4)
    assert wait.is_due
    assert wait.run()
    assert wait.is_due


def test_a_peer_that_lets_wait_is_not_quick_any_more(
    pair: tuple[socket.socket, BusyWait],
) -> None:
    there, wait = pair
    wait.note(1e-4)
    assert not wait.run()
    there.send(b"x")
    assert not wait.is_due
    assert not wait.run()


def test_other_work_ends_a_busy_wait(
    pair: tuple[socket.socket, BusyWait], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "LONGEST_S", math.inf)
    _, wait = pair
    wait.note(1e-4)
    asked = iter([False, False, True])
    assert not wait.run(lambda: next(asked))
    assert wait.is_due, "that says nothing of the peer"


def test_on_one_processor_no_wait_is_busy(
    pair: tuple[socket.socket, BusyWait], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "_HAS_OTHERS", False)
    there, wait = pair
    there.send(b"x")
    wait.note(1e-4)
    assert not wait.run()


def test_waits_in_vain_make_busy_waits_rarer_until_one_succeeds(
    pair: tuple[socket.socket, BusyWait],
) -> None:
    """On a machine whose processors are all busy a busy wait keeps the peer from its own."""
    there, wait = pair

    def num_calls_until_due() -> int:
        wait.note(1e-4)
        count = 0
        while not wait.is_due:
            count += 1
            wait.note(1e-4)
        return count

    skipped = []
    for _ in range(10):
        skipped.append(num_calls_until_due())
        assert not wait.run()
    assert skipped[:5] == [0, 0, 2, 6, 14]
    assert skipped[-2:] == [63, 63]
    num_calls_until_due()
    there.send(b"x")
    assert wait.run()
    assert num_calls_until_due() == 0
