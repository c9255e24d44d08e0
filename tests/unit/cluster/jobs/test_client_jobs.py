"""What the commands that started jobs ask of the leader, and what they are told."""

from __future__ import annotations

import signal

import pytest

from potluck._core.cluster.jobs.client_jobs import ClientJobs
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.system import SIGHUP
from potluck._core.wire import jobs, local
from potluck._core.wire.worker_link import JobState


class Terminal:
    """A command, with all that it was told."""

    is_behind = False

    def __init__(self) -> None:
        self.told: list[local.Reply] = []

    def take(self, message: local.Reply) -> None:
        self.told.append(message)


Asked = list[jobs.Submit | jobs.InterruptJob]
"""What the leader was asked."""


def spec(job: str) -> jobs.JobSpec:
    return jobs.JobSpec(
        job=job, script="train.py", package=None, starter="ada", versions=own_versions()
    )


@pytest.fixture
def leader() -> Asked:
    return []


@pytest.fixture
def watched(leader: Asked) -> ClientJobs:
    return ClientJobs(leader.append, lambda spec: None)


def test_what_became_of_the_machine_is_told_to_each_command(watched: ClientJobs) -> None:
    first, second = Terminal(), Terminal()
    watched.submit(spec("a-1"), first)
    watched.submit(spec("b-2"), second)
    watched.back("epoch 4: ada, bob (leader ada)")
    assert first.told == [], "it was never out"
    watched.out("paused: only 1 of 3 nodes can be reached from here")
    watched.back("epoch 7: ada, bob (leader bob)")
    watched.back("epoch 8: ada, bob, carl (leader bob)")
    texts = [
        "this machine: paused: only 1 of 3 nodes can be reached from here",
        "this machine: goes on in epoch 7: ada, bob (leader bob)",
    ]
    assert first.told == [jobs.JobNote("a-1", text) for text in texts]
    assert second.told == [jobs.JobNote("b-2", text) for text in texts]


def test_a_new_leader_is_asked_again_for_what_the_old_one_may_not_have_heard(
    watched: ClientJobs, leader: Asked
) -> None:
    terminal = Terminal()
    watched.submit(spec("a-1"), terminal)
    watched.submit(spec("b-2"), Terminal())
    watched.received(jobs.Submitted("b-2", ""))
    watched.interrupt(terminal, signal.SIGINT)
    asked = [jobs.Submit(spec("a-1")), jobs.InterruptJob("a-1", signal.SIGINT, 1)]
    assert leader == [asked[0], jobs.Submit(spec("b-2")), asked[1]]
    leader.clear()
    watched.ask_again()
    assert leader == asked, "the second job is taken, and nobody interrupted it"


def test_a_job_that_ended_while_this_node_was_away_ends_its_command(watched: ClientJobs) -> None:
    taken, new = Terminal(), Terminal()
    watched.submit(spec("a-1"), taken)
    watched.submit(spec("b-2"), new)
    watched.show(jobs.JobStatus(JobState("a-1", "ada", 1, "train.py", 0.0, 3, 7, None, (), ())))
    watched.listed(())
    told = [type(message) for message in taken.told]
    assert told == [local.JobTaken, jobs.JobStatus, local.CommandResult]
    assert new.told == [], "the leader may not have heard of it yet"
    watched.out("paused")
    assert len(taken.told) == 3


def test_a_job_that_outlives_its_command_goes_on_when_that_leaves(
    watched: ClientJobs, leader: Asked
) -> None:
    terminal, other = Terminal(), Terminal()
    watched.submit(spec("a-1"), terminal, outlives=True)
    watched.submit(spec("b-2"), other)
    watched.received(jobs.Submitted("a-1", ""))
    watched.received(jobs.Submitted("a-1", ""))  # a new leader says it again
    assert terminal.told[0] == local.JobTaken("a-1", "ada")
    leader.clear()
    watched.left(terminal)
    watched.left(other)
    assert leader == [jobs.InterruptJob("b-2", SIGHUP, 1)]
    told = len(terminal.told)
    watched.received(jobs.JobEnded("a-1", b"{}"))
    assert len(terminal.told) == told
    assert watched.names == ("b-2",)
