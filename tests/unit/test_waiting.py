"""A long wait says what it is for: after 3 s, then every 10 s, until its deadline."""

from __future__ import annotations

import queue

import pytest

from potluck._core.waiting import EVERY_S, FIRST_S, Reminder, reminding, to_stderr

WAIT_S = 20.0


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(reminder: Reminder, clock: Clock, lines: list[str], until: float) -> list[float]:
    """Go through a wait as its loop would; when each line was said, from its beginning."""
    began, times = clock.now, []
    while clock.now + reminder.patience() < began + until:
        before = len(lines)
        clock.now += max(reminder.patience(), 0.001)
        reminder.tick()
        times += [round(clock.now - began, 1)] * (len(lines) - before)
    return times


def test_the_first_line_comes_after_three_seconds_and_later_ones_every_ten() -> None:
    clock, lines = Clock(), list[str]()
    reminder = Reminder(lambda: "rank 2 is missing", 160.0, say=lines.append, clock=clock)
    assert lines_of(reminder, clock, lines, 30.0) == [3.0, 13.0, 23.0]
    assert lines[0] == "rank 2 is missing (3 s so far, 57 s left)"
    assert lines[2] == "rank 2 is missing (23 s so far, 37 s left)"


def test_a_short_wait_says_nothing() -> None:
    clock, lines = Clock(), list[str]()
    reminder = Reminder(lambda: "rank 2 is missing", 102.0, say=lines.append, clock=clock)
    assert reminder.patience() == 2.0
    clock.now += 2.5
    reminder.tick()
    assert reminder.is_overdue
    assert reminder.patience() == 0.0
    assert lines == []


def test_each_line_names_who_is_missing_then() -> None:
    clock, lines, missing = Clock(), list[str](), [1, 2]
    reminder = Reminder(lambda: f"missing: {missing}", say=lines.append, clock=clock)
    clock.now += FIRST_S
    reminder.tick()
    missing.remove(1)
    clock.now += EVERY_S
    reminder.tick()
    assert lines == ["missing: [1, 2] (3 s so far)", "missing: [2] (13 s so far)"]


def test_a_process_that_is_not_the_one_to_speak_says_nothing_and_asks_again_later() -> None:
    clock, lines, answers = Clock(), list[str](), iter(["", "rank 2 is missing"])
    reminder = Reminder(lambda: next(answers), say=lines.append, clock=clock)
    assert lines_of(reminder, clock, lines, 14.0) == [13.0]


def test_a_call_that_blocks_elsewhere_is_spoken_for_by_a_thread() -> None:
    clock, lines = Clock(), queue.Queue[str]()
    reminder = Reminder(lambda: "rank 2 is missing", say=lines.put, clock=clock)
    clock.now += FIRST_S
    with reminding(reminder):
        assert lines.get(timeout=WAIT_S) == "rank 2 is missing (3 s so far)"
    assert lines.empty()


def test_lines_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    to_stderr("rank 2 is missing")
    assert capfd.readouterr().err == "potluck: rank 2 is missing\n"
