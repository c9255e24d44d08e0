"""How a job's end is judged and told."""

from __future__ import annotations

import pytest

from potluck._core.cluster.code_store.imports import describe_missing
from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.events import (
    Entered,
    Event,
    Exited,
    Failed,
    Finished,
    Interrupted,
    Ready,
)
from potluck._core.cluster.jobs.groups.roster import JobPolicy, State
from potluck._core.cluster.jobs.journal import Journal
from potluck._core.cluster.jobs.summary import Summary, explain, summarize
from potluck._core.types import Member
from potluck._core.wire.worker_link import Fact, WorkerProgress


def ended(num_workers: int, *events: Event) -> State:
    state, _ = membership.begin([str(index) for index in range(num_workers)], JobPolicy())
    ready = [Ready(str(index), Member(str(index), port=1)) for index in range(num_workers)]
    for event in (*ready, *events):
        state, _ = membership.handle(state, event, 0.0)
    return state


def well(num_workers: int) -> State:
    names = [str(index) for index in range(num_workers)]
    return ended(
        num_workers,
        *(Entered(name, 1) for name in names),
        *(Finished(name) for name in names),
        *(Exited(name, 0) for name in names),
    )


def summary_of(
    state: State,
    facts: dict[str, dict[str, Fact]] | None = None,
    *,
    unfired: tuple[str, ...] = (),
    stderr: dict[str, list[str]] | None = None,
    machine: str = "",
) -> Summary:
    journal = Journal([worker.name for worker in state.workers], 100.0)
    for name, told in (facts or {}).items():
        journal.progress(WorkerProgress(name, epoch=1, step=50, facts=told), 101.0)
    for name, lines in (stderr or {}).items():
        for line in lines:
            journal.wrote(name, line)
    return summarize(
        job="job",
        script="train.py",
        state=state,
        journal=journal,
        unfired=unfired,
        missing=lambda worker, module: describe_missing(module, (), (), "", "python"),
        called=lambda worker: machine,
        written=(),
        now=110.0,
    )


def test_a_job_without_problems_has_exit_code_0() -> None:
    hashed: dict[str, Fact] = {"parameter_hash": "ab", "steps_run_again": 1, "test_accuracy": 0.98}
    summary = summary_of(well(2), {"0": hashed, "1": hashed | {"committed_steps": 60}})
    assert summary.exit_code == 0
    assert summary.problems == ()
    assert summary.hashes_equal is True
    assert summary.committed_steps == 60
    assert summary.steps_run_again == 1
    assert summary.facts == {"test_accuracy": 0.98}
    assert summary.seconds == 10.0


def test_different_parameters_fail_the_job() -> None:
    summary = summary_of(well(2), {"0": {"parameter_hash": "ab"}, "1": {"parameter_hash": "cd"}})
    assert summary.exit_code == 1
    assert summary.hashes_equal is False
    assert summary.problems == ("the workers ended with different parameters",)


def test_without_hashes_nothing_is_claimed_about_them() -> None:
    assert summary_of(well(1)).hashes_equal is None


def test_the_hash_of_a_worker_that_did_not_finish_does_not_count() -> None:
    state = ended(2, Exited("1", -9), Finished("0"), Exited("0", 0))
    summary = summary_of(state, {"0": {"parameter_hash": "ab"}, "1": {"parameter_hash": "old"}})
    assert summary.hashes_equal is True
    assert [worker.finished for worker in summary.workers] == [True, False]


def test_a_fault_that_never_happened_fails_the_job() -> None:
    summary = summary_of(well(1), unfired=("kill rank 0 at step 9",))
    assert summary.exit_code == 1
    assert summary.problems == ("the fault 'kill rank 0 at step 9' never happened",)


def test_the_first_failure_is_told_with_its_exit() -> None:
    state = ended(2, Failed("1", "rank 1, worker 1 failed: ValueError: no"), Exited("1", 3))
    summary = summary_of(state)
    assert summary.exit_code == 3
    assert summary.problems == ("rank 1, worker 1 failed: ValueError: no (exited with code 3)",)


def test_a_missing_package_is_explained() -> None:
    state = ended(1, Exited("0", 1))
    stderr = {"0": ["Traceback", "ModuleNotFoundError: No module named 'torch.nn'"]}
    (problem,) = summary_of(state, stderr=stderr).problems
    assert problem == (
        "worker 0 exited with code 1: the script needs the Python package 'torch', which is not "
        "installed for python: python -m pip install torch"
    )


def test_an_interrupt_is_told_as_such() -> None:
    summary = summary_of(ended(1, Interrupted(2), Exited("0", 1)))
    assert summary.exit_code == 130
    assert summary.problems == ("interrupted by SIGINT",)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["ModuleNotFoundError: No module named 'sklearn.svm'"], "pip install sklearn"),
        (["x", "potluck.errors.MissingDependency: needs torch: pip ...", ""], "needs torch: pip"),
        (["ValueError: no"], None),
        ([], None),
    ],
)
def test_the_end_of_a_traceback_is_explained(lines: list[str], words: str | None) -> None:
    told = explain(lines, lambda module: f"pip install {module}")
    assert (told is None) if words is None else (words in (told or ""))


def test_the_machine_of_a_worker_and_its_last_words_are_named() -> None:
    failed = ended(2, Exited("1", 3))
    said = {"1": ["a warning", "no data in /data: mount it first", "  "]}
    summary = summary_of(failed, stderr=said, machine="attic")
    assert summary.problems == (
        "worker 1 on attic exited with code 3: it said last: no data in /data: mount it first",
    )
    assert summary_of(failed).problems == ("worker 1 exited with code 3",)
