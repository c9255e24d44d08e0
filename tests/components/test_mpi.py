"""``potluck launch mpi`` on a real Open MPI: three hosts, which mpirun reaches by a program in
place of ssh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck._core.system import SIGKILL
from support.commands import Command, comes_true
from support.components import program
from support.hosts import Network, missing
from support.managed import POTLUCK, Work, commands_of, kill_all, on_host, write_names

NAMES = ("desk", "laptop", "attic")


class Machines:
    """Hosts whose names mpirun knows."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.hosts = dict(zip(NAMES, network, strict=True))
        self._known = folder / "hosts"
        write_names(self._known, self.hosts)
        # As ssh: a name, and words for a shell there.
        lines = ["#!/bin/sh", "name=$1; shift", "case $name in"]
        for name in NAMES:
            lines.append(f'{name}) exec {shlex.join(self._on(name, ["sh", "-c"]))} "$*" ;;')
        self._reach = folder / "reach"
        self._reach.write_text("\n".join([*lines, "esac", ""]))
        self._reach.chmod(0o755)

    def _on(self, name: str, words: list[str]) -> list[str]:
        return on_host(self.hosts[name], name, self._known, words)

    def launched(self, work: Work, *more: str) -> Command:
        """The command of docs/managed.md on the first machine."""
        [words] = commands_of("Open MPI")
        assert words[0] == "potluck"
        command = [POTLUCK, *words[1:], str(work.folder), "60", *more]
        variables = {
            "OMPI_MCA_plm_rsh_agent": str(self._reach),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.environ["PATH"],
        }
        return Command(self._on(NAMES[0], command), cwd=work.folder, env=variables)

    def are_idle(self) -> bool:
        """Whether no process is left on any of them."""
        return not any(host.pids() for host in self.hosts.values())


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    program("mpirun", "openmpi-bin")
    if reason := missing():
        pytest.skip(reason)
    with Network(len(NAMES)) as network:
        yield Machines(tmp_path, network)


def test_a_job_trains_loses_a_worker_takes_it_back_and_ends_well(
    machines: Machines, tmp_path: Path
) -> None:
    work = Work(tmp_path / "work", lambda: run.text)
    with machines.launched(work) as run:
        step = work.wait_for_world(3)
        os.kill(step.pid, SIGKILL)
        run.wait_for("killed by SIGKILL")
        work.wait_for_world(3, after=max(step.number for step in work.steps()))
        work.hurry()
        assert run.finish() == 0, run.text
    work.check_result()
    assert comes_true(machines.are_idle)


def test_a_job_that_lost_a_machine_ends_and_resumes_when_it_is_started_again(
    machines: Machines, tmp_path: Path
) -> None:
    work = Work(tmp_path / "work", lambda: run.text)
    with machines.launched(work, "kept") as run:
        step = work.wait_for_world(3)
        work.wait_for_world(3, after=step.number)  # a checkpoint is written every 10 steps
        kill_all(machines.hosts["attic"])
        assert run.finish() != 0, run.text
    assert "mpirun ended with exit code" in run.text
    assert comes_true(machines.are_idle)
    with machines.launched(work, "kept") as run:
        work.wait_for_world(3)
        work.hurry()
        assert run.finish() == 0, run.text
        assert "begins at step 0 " not in run.text
    work.check_result()
