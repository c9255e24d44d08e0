from __future__ import annotations

from types import SimpleNamespace


def test_who_says_it_has_not_called_is_to_blame_at_once(twin: SimpleNamespace) -> None:
    check = twin.HangCheck(reports={1: True, 3: False})
    assert check.blocking_rank([1, 2, 3], [1], final=False) == 3


def test_silence_counts_only_when_time_is_up(twin: SimpleNamespace) -> None:
    check = twin.HangCheck(reports={1: True})
    assert check.blocking_rank([1, 2, 3], [1, 3], final=False) == -1
    assert check.blocking_rank([1, 2, 3], [1, 3], final=True) == 3, "first whom this rank waits for"
    assert check.blocking_rank([1, 2, 3], [1], final=True) == 2


def test_if_all_have_called_nobody_is_to_blame(twin: SimpleNamespace) -> None:
    check = twin.HangCheck(reports={1: True, 2: True})
    assert check.blocking_rank([1, 2], [1], final=True) == -1


def test_only_the_latest_checks_are_kept(twin: SimpleNamespace) -> None:
    detector = twin.HangDetector()
    first, is_new = detector.open((0, 0))
    assert is_new
    assert detector.open((0, 0)) == (first, False)
    for number in range(1, 100):
        detector.open((0, number))
    assert detector.get((0, 0)) is None
    assert detector.get((0, 99)) is not None
