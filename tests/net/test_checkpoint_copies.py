"""Checkpoints of a job on the disks of its machines: one of them is lost with its disk."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from support.commands import Command
from support.machines import Machine, agreed, cluster_of, form

pytestmark = pytest.mark.needs_root_netns

SCRIPT = """
import os, pathlib, sys, threading
import numpy as np
import potluck
from potluck.checkpoint import CheckpointStore
from potluck.training import ElasticLoop, Policy, Schedule, StateReplica

stop, state, waits = pathlib.Path(sys.argv[1]), {"sum": np.zeros(1)}, threading.Event()

def set_state(new):
    state["sum"][:] = new["sum"]

ctx = potluck.init()
job = ElasticLoop(
    ctx,
    Schedule(64, 8, epochs=1_000_000),
    StateReplica(lambda: state, set_state),
    checkpoint=CheckpointStore("state", keep=2),
    policy=Policy(save_every=5),
)
began = None
for _ in job:
    if began is None:
        began = job.step_number
        print(f"begins at step {began}", flush=True)
    with job.step():
        waits.wait(0.05)
        job.commit(loss=float(stop.exists()))
        state["sum"] += job.step_number
    if job.step_number % 5 == 1 and ctx.is_master:
        print(f"saved step {job.step_number - 1} of {ctx.world_size}", flush=True)
    if job.last_loss > 0:
        break
print(f"ends at step {job.step_number}, sum {int(state['sum'][0])}", flush=True)
ctx.close()
"""


def newest(folder: Path) -> int:
    """The step of the newest checkpoint below ``folder``; -1: none."""
    steps = [int(path.stem.rpartition("-")[2]) for path in folder.rglob("state/*-step-*.json")]
    return max(steps, default=-1)


def last_saved(run: Command, since: int = 0) -> int:
    """The newest step of which rank 0 said that its checkpoint counts."""
    text = "\n".join(run.lines[since:])
    return max(int(step) for step in re.findall(r"saved step (\d+) of", text))


def on(*members: Machine) -> list[str]:
    return ["--on", ",".join(each.name for each in members)]


def end_of(run: Command, num_ranks: int) -> int:
    """At which step all ranks ended, with the right sum."""
    assert run.finish() == 0, run.text
    ends = re.findall(r"ends at step (\d+), sum (\d+)", run.text)
    assert len(ends) == num_ranks, run.text
    [(step, total)] = {(int(step), int(total)) for step, total in ends}
    assert total == step * (step + 1) // 2
    return step


@pytest.mark.timeout(400)
def test_a_job_goes_on_from_whatever_machine_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of rank 0 is lost with its disk, amid the job; after its end one more. Another
    job, which is called in the same directory, goes on from what the third machine has, also on one
    that had no part in the first."""
    project, stop = tmp_path / "project", tmp_path / "stop"
    project.mkdir()
    monkeypatch.chdir(project)  # where workers of the starter write
    (project / "train.py").write_text(SCRIPT)
    with cluster_of(4, tmp_path / "homes") as members:
        form(*members)
        *trio, starter = members
        with starter.run(*on(*trio), "train.py", stop) as run:
            line = run.wait_for(lambda line: re.search(r"\[ *0 .* saved step \d+ of 3", line))
            name = line.partition("]")[0].split()[-1]
            lost = next(each for each in trio if each.name == name)
            left = [each for each in trio if each is not lost]
            counted, since = last_saved(run), run.mark
            lost.kill()
            shutil.rmtree(lost.home / "code_store")
            run.wait_for("of 2", since=since)  # it has saved at once, on both that are left
            assert all(newest(each.home) >= counted for each in left)
            stop.touch()
            end = end_of(run, 2)

        second, third = left
        second.kill()
        shutil.rmtree(second.home / "code_store")
        agreed(third, starter)
        kept = newest(third.home)
        assert counted <= kept <= end
        with starter.run(*on(third, starter), "train.py", stop) as run:
            assert end_of(run, 2) == kept + 1
        assert f"resumed from the checkpoint of step {kept}" in run.text
        assert newest(project) == kept  # at once, for two machines are there
