"""Whose result of a task counts: exactly one, over all schedules with lost workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.training.work_ledger import TaskLost, WorkLedger

WORKERS = ["a", "b", "c"]


def ledger(num_tasks: int, num_backups: int = 0, max_attempts: int = 3) -> WorkLedger:
    return WorkLedger(num_tasks, num_backups, max_attempts)


@settings(max_examples=300, deadline=None)
@given(
    num_tasks=st.integers(0, 8),
    num_backups=st.integers(0, 3),
    schedule=st.lists(st.tuples(st.sampled_from("tfk"), st.sampled_from(WORKERS)), max_size=60),
)
def test_each_task_counts_exactly_once_whoever_is_lost(
    num_tasks: int, num_backups: int, schedule: list[tuple[str, str]]
) -> None:
    it = ledger(num_tasks, num_backups, max_attempts=1000)
    holds: dict[str, int] = {}
    counted: list[int] = []

    def act(what: str, worker: str) -> None:
        if what == "t":
            task = it.take(worker)
            holds.pop(worker, None)
            if task is not None:
                assert task not in counted
                holds[worker] = task
        elif what == "f" and worker in holds:
            task = holds.pop(worker)
            if it.finish(worker, task):
                counted.append(task)
        elif what == "k":
            holds.pop(worker, None)
            it.give_up([worker])

    for what, worker in schedule:
        act(what, worker)
        # Each task is at one place.
        places = [*it.waiting, *it.running, *it.done]
        assert sorted(places) == list(range(num_tasks))
    while not it.is_over:
        for worker in WORKERS:
            act("f", worker)
            act("t", worker)
    assert sorted(counted) == list(range(num_tasks))


def test_a_free_worker_gets_a_copy_of_the_longest_running_of_the_last_few() -> None:
    it = ledger(3, num_backups=2)
    assert [it.take(worker) for worker in WORKERS] == [0, 1, 2]
    assert it.finish("c", 2)
    assert it.take("c") == 0
    assert it.finish("c", 0)
    assert not it.finish("a", 0)
    assert it.take("a") == 1
    assert it.take("c") is None
    assert (it.num_copies, it.num_refused) == (2, 1)


def test_without_backups_a_free_worker_waits() -> None:
    it = ledger(1)
    assert it.take("a") == 0
    assert it.take("b") is None


def test_a_lost_workers_task_comes_next_and_its_late_result_still_counts_if_it_is_the_first() -> (
    None
):
    it = ledger(3)
    assert it.take("a") == 0
    assert it.give_up(["a"]) == [0]
    assert it.finish("a", 0)
    assert it.take("b") == 1
    assert it.give_up(["b"]) == [1]
    assert it.take("c") == 1


def test_a_copy_of_a_lost_workers_task_goes_on() -> None:
    it = ledger(1, num_backups=1)
    assert it.take("a") == 0
    assert it.take("b") == 0
    assert it.give_up(["a"]) == []
    assert it.finish("b", 0)


def test_a_task_that_ends_its_workers_ends_the_queue() -> None:
    it = ledger(1, max_attempts=2)
    for worker in ("a", "b"):
        assert it.take(worker) == 0
        it.give_up([worker])
    with pytest.raises(TaskLost, match="task 0 was begun 2 times"):
        it.take("c")


def test_a_result_of_no_task_is_an_error() -> None:
    with pytest.raises(ValueError, match="no task 5; there are 2"):
        ledger(2).finish("a", 5)


def test_a_task_counts_as_handed_out_again_however_it_was_given_up() -> None:
    """A worker that is started again within its silence asks for a task, and has none."""
    ledger = WorkLedger(3, num_backups=0, max_attempts=3)
    assert ledger.take("a") == 0
    assert ledger.take("a") == 0
    assert ledger.num_again == 1
    assert ledger.take("b") == 1
    ledger.give_up(["b"])
    assert ledger.num_again == 2
