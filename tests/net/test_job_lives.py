"""Jobs outlive their terminals and machines, and their ends are told to whoever asks later."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.machines import Machine, cluster_of, form, leader_of
from support.sums import TRAINING

pytestmark = pytest.mark.needs_root_netns


def history_of(machine: Machine, *arguments: str) -> list[dict[str, Any]]:
    """``potluck jobs --json`` there."""
    done = machine.runs("jobs", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    return told


def repository(folder: Path, script: str) -> Path:
    """A git repository with ``script`` in it, and a change since its commit."""
    folder.mkdir()
    (folder / "train.py").write_text("print('before')")
    git = ["git", "-C", str(folder), "-c", "user.name=ada", "-c", "user.email=ada@home"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (folder / "train.py").write_text(script)
    return folder / "train.py"


def test_the_end_of_a_job_is_told_by_another_machine_when_starter_and_leader_are_gone(
    tmp_path: Path,
) -> None:
    failing = "import os, sys, potluck; c = potluck.init(); sys.exit(3 * (c.rank == 1))"
    script = repository(tmp_path / "code", failing)
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with starter.run("--on", f"{leader.name},{starter.name}", script) as run:
            assert run.finish() == 3, run.text
        [job] = history_of(starter)
        assert (job["state"], job["exit_code"]) == ("ended", 3)
        assert job["machine"] == starter.name
        assert set(job["machines"]) == {leader.name, starter.name}
        assert sorted(code for _, code in job["exits"]) == [0, 3]
        assert job["commit"].endswith("-dirty")
        assert len(job["commit"]) == 46
        assert history_of(other) == [job], "which had no part in it, and asked the others"

        starter.kill()
        leader.kill()
        other.sees(other)
        assert history_of(other) == []
        unknown = other.runs("wait", job["job"])
        assert unknown.returncode == 2
        assert "no machine that is there knows a job" in unknown.stderr
        leader.start()
        leader.sees(leader, other)
        other.sees(leader, other)
        assert history_of(other) == [job], "of the disk of a machine that was down"
        waited = other.runs("wait", job["job"][:-3])
        assert waited.returncode == 3
        assert f"job {job['job']} ended with exit code 3" in waited.stdout
        assert "exited with code 3" in waited.stderr
        told = other.runs("jobs", job["job"])
        assert "worker 1: 3" in told.stdout
        assert job["package"] in told.stdout


def test_the_end_of_a_job_on_one_machine_is_on_a_second_one(tmp_path: Path) -> None:
    """Starter, leader and the only machine that runs it are one; its disk is gone."""
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        starter = leader_of([ada, bob])
        other = bob if starter is ada else ada
        with starter.run("--on", starter.name, TRAINING, tmp_path / "stop") as run:
            run.wait_for("step 3 of 1")
            [job] = history_of(other)
            assert (job["state"], job["machines"]) == ("running", [starter.name])
            late = other.runs("wait", "sums", "--timeout", "0.2")
            assert late.returncode == 2
            assert "still runs after 0.2 s" in late.stderr
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
        starter.kill()
        other.sees(other)
        [job] = history_of(other)
        assert (job["state"], job["exit_code"]) == ("ended", 0)
        assert other.runs("wait", "sums").returncode == 0
