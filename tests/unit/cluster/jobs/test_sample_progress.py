"""The progress of a training, from the counts that workers report."""

from __future__ import annotations

import pytest

from potluck._core.cluster.jobs.journal import WINDOW_S, SampleProgress
from potluck._core.wire.worker_link import Samples


def told(*counts: tuple[float, int], total: int = 1000) -> SampleProgress:
    """The progress after reports of (time, committed samples) of ``total``."""
    progress = SampleProgress()
    for now, committed in counts:
        progress.update(committed, total, now)
    return progress


def test_nothing_is_known_of_a_script_that_tells_nothing() -> None:
    assert told((1.0, 0), total=0).samples(2.0) is None


def test_the_rate_is_that_of_the_last_seconds() -> None:
    slow = [(float(second), 10 * second) for second in range(1, 31)]
    fast = [(30.0 + second, 300 + 20 * second) for second in range(1, 31)]
    assert told(*slow).samples(30.0) == Samples(300, 1000, 10.0)
    assert told(*slow, *fast).samples(60.0) == Samples(900, 1000, 20.0)
    assert WINDOW_S < 30


def test_a_first_count_alone_gives_no_rate_nor_do_two_close_together() -> None:
    assert told((1.0, 10)).samples(90.0) == Samples(10, 1000, None)
    assert told((1.0, 10), (1.1, 20)).samples(1.1) == Samples(20, 1000, None)


def test_steps_that_take_longer_than_the_window_have_a_rate_that_stands() -> None:
    progress = told((0.0, 60), (60.0, 120), (120.0, 180))
    assert [progress.samples(now).per_s for now in (120.0, 150.0, 180.0)] == [1.0, 1.0, 1.0]


def test_a_training_that_stands_still_gets_slower_and_slower() -> None:
    progress = told(*((float(second), 10 * second) for second in range(1, 12)))
    rates = [progress.samples(now).per_s for now in (12.0, 17.0, 22.0)]
    assert rates == [10.0, pytest.approx(100 / 15), 5.0]


def test_a_count_that_goes_back_begins_a_new_measurement() -> None:
    """All workers were lost, and the next ones went on from a checkpoint."""
    progress = told((1.0, 100), (2.0, 200), (9.0, 150))
    assert progress.samples(9.0) == Samples(150, 1000, None)
    progress.update(170, 1000, 11.0)
    assert progress.samples(11.0) == Samples(170, 1000, 10.0)


def test_what_is_kept_does_not_grow_with_the_number_of_reports() -> None:
    progress = told(*((n / 1000, n) for n in range(100_000)), total=10**6)
    assert len(progress._points) < 200
    assert progress.samples(100.0).per_s == pytest.approx(1000, rel=0.01)
