"""A worker tells its agent of an operation that does not end: after 2 s, then every 2 s."""

from __future__ import annotations

from potluck._core.backends.agent_link import LongWaits


def test_an_operation_of_two_seconds_is_long_and_told_every_two_seconds() -> None:
    waits = LongWaits()
    told = [now / 10 for now in range(0, 70, 2) if waits.is_long(["first"], now / 10)]
    assert told == [2.0, 4.0, 6.0]


def test_many_short_operations_are_not_long() -> None:
    waits = LongWaits()
    assert not any(waits.is_long([f"call {look}"], 0.2 * look) for look in range(100))


def test_the_oldest_operation_counts() -> None:
    waits = LongWaits()
    assert not waits.is_long(["receive"], 0.0)
    assert not waits.is_long(["receive", "sum"], 1.0)
    assert waits.is_long(["receive", "sum"], 2.0)
    assert not waits.is_long(["sum"], 2.5)
    assert waits.is_long(["sum"], 4.0)


def test_no_operation_is_not_long_however_long_the_script_computes() -> None:
    waits = LongWaits()
    assert not any(waits.is_long([], float(now)) for now in range(60))
