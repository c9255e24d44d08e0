"""What counts as work: computing, and one's own half of the transfers; not waiting for others."""

from __future__ import annotations

import pytest

from potluck.training.stopwatch import busy_s


def test_waiting_without_using_the_processor_is_no_work() -> None:
    assert busy_s(10.0, 4.0, 6.0, 0.0) == 4.0


def test_transfers_count_as_much_longer_as_computing_took_longer() -> None:
    """A worker with a fifth of a core computes 2 s on 0.4 s of CPU; 0.1 s of transfers are 0.5."""
    assert busy_s(5.0, 0.5, 3.0, 0.1) == pytest.approx(2.5)


def test_several_threads_that_compute_do_not_make_transfers_shorter() -> None:
    assert busy_s(5.0, 8.5, 3.0, 0.5) == pytest.approx(2.5)


def test_work_is_never_more_than_the_time_that_passed() -> None:
    assert busy_s(5.0, 2.1, 3.0, 2.0) == 5.0
    assert busy_s(5.0, 0.0, 3.0, 0.0) == 2.0
