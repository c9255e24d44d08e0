"""The script of ``potluck launch`` under launchers whose worlds are fixed, mpirun and torchrun: by
the commands that docs/managed.md names, with the script's arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from potluck._core.system import SIGKILL
from support.commands import Command
from support.components import program
from support.managed import COUNTED, Work, commands_of

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def started(work: Work, *own: str) -> Command:
    command = [*own, "train.py", str(work.folder), "60", "kept"]
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = VARIABLES | {"POTLUCK_OUTPUT": str(work.folder), "PATH": paths}
    return Command(command, cwd=work.folder, env=variables)


def killed(work: Work) -> None:
    """Kill a worker when there is a checkpoint, which is written every 10 steps."""
    step = work.wait_for_world(3)
    step = work.wait_for_world(3, after=step.number)
    os.kill(step.pid, SIGKILL)


def test_mpirun_ends_a_job_that_lost_a_worker_and_it_resumes_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    mpirun = program("mpirun", "openmpi-bin")
    work = Work(tmp_path / "work", lambda: run.text)
    with started(work, mpirun, "-n", "3", "python") as run:
        killed(work)
        assert run.finish() != 0
    with started(work, mpirun, "-n", "3", "python") as run:
        work.wait_for_world(3)
        work.hurry()
        assert run.finish() == 0, run.text
        assert "begins at step 0 " not in run.text
    assert f"counted {COUNTED}" in run.text


def test_torchrun_starts_all_workers_again_which_resume(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    work = Work(tmp_path / "work", lambda: run.text)
    [words] = commands_of("torchrun")
    with started(work, *TORCHRUN, *words[1 : words.index("train.py")]) as run:
        killed(work)
        since = run.mark
        run.wait_for("begins at step", since=since)
        work.hurry()
        assert run.finish() == 0, run.text
        again = "\n".join(run.lines[since:])  # its workers share a line now and then
    assert again.count("begins at step ") == 3
    assert "begins at step 0 " not in again
    assert f"counted {COUNTED}" in again
