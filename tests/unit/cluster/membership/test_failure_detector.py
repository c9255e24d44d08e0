"""FailureDetector, told as stories: what is heard when, and what is made of it."""

from __future__ import annotations

import pytest

from potluck._core.cluster.membership.failure_detector import (
    Changed,
    FailureDetector,
    Finding,
    ProbeIndirectly,
    Status,
    Timing,
)
from potluck._core.wire.nodes import Heartbeat

BEAT = Timing().beat_s


class Story:
    """One node that beats, and peers that answer each beat after ``latency`` unless told not to."""

    def __init__(self, *peers: str, latency: float = 0.001) -> None:
        self.detector = FailureDetector(Timing())
        self.now = 0.0
        self.latency = latency
        self.numbers = dict.fromkeys(peers, 0)
        self.deaf: set[str] = set()
        self.mute: set[str] = set()
        self.findings: list[tuple[float, Finding]] = []
        self.detector.members = frozenset(peers)
        for peer in peers:
            self.detector.meet(peer, 1)

    def beat(self, late: float = 0.0) -> None:
        """One round: I tick and send; each peer hears it and sends its own."""
        self.now += BEAT + late
        self.note(self.detector.tick(self.now, late))
        number = self.detector.next_beat(self.now)
        for peer in self.numbers:
            self.detector.echo(peer, self.now)
            self.numbers[peer] += 1
            if peer in self.mute:
                continue
            known = self.detector.peers[peer].confirmed
            echo = known if peer in self.deaf else number
            beat = Heartbeat(self.numbers[peer], echo)
            self.note(self.detector.heard(peer, 1, beat, self.now + 2 * self.latency))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT)):
            self.beat()

    def note(self, findings: list[Finding]) -> None:
        self.findings += [(self.now, finding) for finding in findings]

    def when(self, node: str, status: Status) -> float:
        return next(
            at
            for at, v in self.findings
            if isinstance(v, Changed) and (v.node, v.status) == (node, status)
        )

    def history(self, node: str) -> list[Status]:
        return [v.status for _, v in self.findings if isinstance(v, Changed) and v.node == node]


def test_a_peer_is_up_once_it_echoes_me() -> None:
    story = Story("b")
    story.deaf.add("b")
    story.run(1)
    assert story.detector.status("b") is Status.NEW
    story.deaf.clear()
    story.beat()
    assert story.detector.up() == ("b",)


def test_latency_and_its_deviation_are_measured() -> None:
    story = Story("b", latency=0.02)
    story.run(5)
    assert story.detector.peers["b"].latency_s == pytest.approx(0.02)
    assert story.detector.peers["b"].deviation_s < 0.005


def test_silence_is_suspected_asked_about_and_then_believed() -> None:
    story = Story("b", "c")
    story.run(5)
    story.mute.add("b")
    silent_since = story.now
    story.run(4)
    assert story.history("b") == [Status.UP, Status.SUSPECT, Status.SILENT]
    assert 1.5 <= story.when("b", Status.SUSPECT) - silent_since <= 1.9
    assert story.when("b", Status.SILENT) - silent_since <= 2.5
    asked = [v for _, v in story.findings if isinstance(v, ProbeIndirectly)]
    assert (asked[0].target, asked[0].via) == ("b", ("c",))


def test_who_does_not_hear_me_is_suspected_too() -> None:
    story = Story("b", "c")
    story.run(5)
    story.deaf.add("b")
    story.run(2)
    assert story.history("b")[:2] == [Status.UP, Status.SUSPECT]
    reason = next(v.reason for _, v in story.findings if isinstance(v, ProbeIndirectly))
    assert "not hearing me" in reason


def test_whom_others_reach_is_cut_not_silent_and_asked_about_again() -> None:
    story = Story("b", "c")
    story.run(5)
    story.mute.add("b")
    story.run(1.8)
    story.note(story.detector.reached("b", "c", story.now))
    assert story.detector.status("b") is Status.CUT
    story.run(1.2)
    assert story.detector.status("b") is Status.CUT
    story.run(2)
    assert story.detector.status("b") is Status.SILENT, "asked again, nobody answered"


def test_alone_there_is_nobody_to_ask() -> None:
    story = Story("b")
    story.run(5)
    story.mute.add("b")
    story.run(2.2)
    assert story.detector.status("b") is Status.SILENT
    assert not [v for _, v in story.findings if isinstance(v, ProbeIndirectly)]


def test_it_is_up_again_when_it_is_heard_again() -> None:
    story = Story("b", "c")
    story.run(5)
    story.mute.add("b")
    story.run(3)
    story.mute.clear()
    story.beat()
    assert story.history("b") == [Status.UP, Status.SUSPECT, Status.SILENT, Status.UP]


def test_half_a_second_of_silence_is_nothing() -> None:
    story = Story("b")
    story.run(5)
    story.mute.add("b")
    story.run(0.6)
    story.mute.clear()
    story.run(3)
    assert story.history("b") == [Status.UP]


def test_an_unsteady_link_is_given_more_time_but_never_more_than_three_seconds() -> None:
    story = Story("b")
    for round_ in range(40):
        story.mute = {"b"} if round_ % 5 < 3 else set()
        story.beat()
    story.mute = {"b"}
    since = story.now
    story.run(4)
    assert 1.9 <= story.when("b", Status.SUSPECT) - since <= 3.2


def test_when_my_own_loop_was_late_nobody_is_suspected_at_once() -> None:
    story = Story("b")
    story.run(5)
    story.mute.add("b")
    story.beat(late=10.0)
    assert story.detector.status("b") is Status.UP, "what it sent may lie unread"
    story.run(1.2)
    assert story.detector.status("b") is Status.UP
    story.run(1)
    assert story.detector.status("b") is Status.SILENT


def test_a_refused_connection_is_certain_death_at_once() -> None:
    story = Story("b")
    story.run(5)
    story.note(story.detector.refused("b", 1, story.now))
    assert story.detector.status("b") is Status.DEAD
    assert story.detector.peers["b"].leased_death
    story.beat()
    assert story.detector.status("b") is Status.DEAD, "an old heartbeat does not wake the dead"
    story.note(story.detector.heard("b", 2, Heartbeat(1), story.now))
    assert story.detector.status("b") is Status.NEW, "another incarnation"


def test_a_refusal_of_another_life_says_nothing() -> None:
    story = Story("b")
    story.run(5)
    assert story.detector.refused("b", 7, story.now) == []
    assert story.detector.refused("nobody", 1, story.now) == []


def test_a_death_seen_after_a_silence_hides_what_happened_in_it() -> None:
    story = Story("b")
    story.run(5)
    story.mute.add("b")
    story.run(1.4)
    story.detector.refused("b", 1, story.now)
    assert not story.detector.peers["b"].leased_death


def test_no_lease_from_a_peer_in_a_newer_view() -> None:
    """It may have agreed to that view without me."""
    story = Story("b")
    story.run(5)
    assert story.detector.has_lease("b", story.now)
    for _ in range(10):
        story.now += BEAT
        number = story.detector.next_beat(story.now)
        story.numbers["b"] += 1
        beat = Heartbeat(story.numbers["b"], number)
        story.detector.heard("b", 1, beat, story.now + 0.002, same_view=False)
    assert story.detector.status("b") is Status.UP
    assert not story.detector.has_lease("b", story.now)


def test_who_is_renounced_gets_no_lease_and_is_heard_all_the_same() -> None:
    story = Story("b")
    story.run(5)
    assert story.detector.echo("b", story.now)[2]
    story.detector.withhold_leases(["b"])
    story.run(1.2)
    assert story.detector.echo("b", story.now)[0] == story.numbers["b"]
    assert not story.detector.echo("b", story.now)[2]
    assert story.detector.has_granted("b", story.now)
    story.run(0.4)
    assert not story.detector.has_granted("b", story.now)
    assert story.detector.status("b") is Status.UP


def test_old_and_doubled_heartbeats_change_nothing() -> None:
    story = Story("b")
    story.run(2)
    heard_at = story.detector.peers["b"].heard_at
    for number in (1, story.numbers["b"]):
        story.detector.heard("b", 1, Heartbeat(number), story.now + 1)
    story.detector.heard("b", 0, Heartbeat(99), story.now + 1)
    assert story.detector.peers["b"].heard_at == heard_at
