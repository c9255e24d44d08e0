"""Worlds of scripts that are not elastic: what they wait for, and under another leader."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.counting import Run, kill_a_worker, run_on
from support.machines import cluster_of, form, leader_of

pytestmark = pytest.mark.needs_root_netns


@pytest.mark.parametrize("how", ["cut off", pytest.param("agent killed", marks=pytest.mark.long)])
def test_a_world_outlives_the_leaders_machine(tmp_path: Path, how: str) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with run_on(starter, tmp_path, "gloo") as command:
            run = Run(command, tmp_path)
            run.begun(3)
            kill_a_worker(other)
            run.begun(3)
            lost = time.monotonic()
            leader.kill() if how == "agent killed" else leader.cut()
            assert run.begun(2) == {starter.name, other.name}
            print(f"trains again after {time.monotonic() - lost:.1f} s")
            assert "restart 2" in command.text, "the count goes on under another leader"
            run.finish()


def test_machines_that_leave_before_the_ranks_met_are_not_waited_for(tmp_path: Path) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        (tmp_path / f"late-{other.name}").touch()
        with run_on(starter, tmp_path, "gloo") as command:
            command.wait_for("is late")
            since = command.mark
            lost = other.kill()
            told = command.when("can't go on without it", since=since)
            print(f"said after {told - lost:.2f} s")
            assert Run(command, tmp_path).begun(2) == {leader.name, starter.name}
            Run(command, tmp_path).finish()


def test_a_job_waits_for_as_many_machines_as_it_needs(tmp_path: Path) -> None:
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada)
        options = ("--min-nodes", "2", "--wait", "2")
        with run_on(ada, tmp_path, "gloo", *options) as command:
            command.wait_for("in the cluster: 1 of at least 2 machines (ada); waiting 2 s")
            assert command.finish() == 2
            assert "after 2 s; start `potluck up` on the others" in command.lines[-1]
        ada.environment["POTLUCK_MIN_PEERS"] = "1"
        with run_on(ada, tmp_path, "gloo") as command:
            command.wait_for("1 of at least 2 machines")
            bob.start()
            run = Run(command, tmp_path)
            assert run.begun(2) == {"ada", "bob"}
            run.finish()
        since = ada.mark
        bob.kill()
        ada.sees(ada, since=since)
        with run_on(ada, tmp_path, "gloo") as command:
            command.wait_for("1 of at least 2 machines")
            command.signal(signal.SIGINT)
            assert command.finish() == 2
            assert "interrupted before it began" in command.lines[-1]
