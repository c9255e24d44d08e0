"""``potluck launch slurm`` on a real Slurm: three nodes with names, addresses and networks of their
own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import comes_true
from support.components import program
from support.hosts import missing
from support.managed import POTLUCK, Work, commands_of
from support.slurm import PACKAGES, SlurmCluster

SECRET = re.compile("[0-9a-f]{64}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    for name, package in PACKAGES.items():
        program(name, package)
    if reason := missing():
        pytest.skip(reason)
    for folder in tmp_path.parents[:3]:  # munged asks for it
        folder.chmod(0o755)
    with SlurmCluster(tmp_path / "slurm", 3) as cluster:
        yield cluster


def output_of(work: Work) -> str:
    """What Slurm's job of the folder of ``work`` wrote so far."""
    return "".join(path.read_text() for path in work.folder.glob("slurm-*.out"))


def submitted(
    cluster: SlurmCluster, folder: Path, *options: str, more: str = ""
) -> tuple[Work, str]:
    """A job of the script, and its number."""
    work = Work(folder, lambda: output_of(work))
    words = [*options, *work.arguments, *filter(None, [more])]
    command = (POTLUCK, "launch", "slurm", "--nodes=3", *words)
    said = cluster.run(*command, cwd=work.folder)
    return work, said.split()[1]


def test_a_job_trains_loses_a_node_and_ends_well(cluster: SlurmCluster, tmp_path: Path) -> None:
    """By the commands of docs/managed.md."""
    work = Work(tmp_path / "work", lambda: output_of(work))
    [launch] = commands_of("Slurm")
    job = cluster.run(POTLUCK, *launch[1:], cwd=work.folder).split()[1]
    work.wait_for_world(3)
    lost = next(step.place for step in work.steps() if step.place != "n1")
    number = max(step.number for step in work.steps())
    cluster.kill(int(lost[1:]))
    work.wait_for_world(2, after=number)
    work.hurry()
    assert cluster.ended(job) == "COMPLETED", work.read()
    work.check_result()
    assert f"in {work.folder}" in work.read()  # files are shared: workers are where sbatch was
    assert comes_true(lambda: cluster.run("sinfo", "-h", "-n", lost, "-o", "%T") == "down*")
    cluster.start(int(lost[1:]))
    assert comes_true(cluster.is_idle)


def test_a_notice_saves_a_checkpoint_and_the_requeued_job_resumes(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm sends it two minutes before the time limit; here it is sent by scancel."""
    before = [len(host.pids()) for host in cluster.network]
    work, job = submitted(cluster, tmp_path / "work", "--requeue", more="kept")
    work.wait_for_world(3)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    work.wait_for("the checkpoint of step")
    assert comes_true(lambda: cluster.state(job) == "PENDING"), work.read()
    work.hurry()
    # Slurm lets two minutes pass before it begins a requeued job. It would take a late word of
    # the first run's end for the second's, so let all of that be gone.
    assert comes_true(lambda: [len(host.pids()) for host in cluster.network] == before)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert cluster.ended(job) == "COMPLETED", work.read()
    work.check_result()
    began = [line for line in work.read().splitlines() if "begins at step" in line]
    assert "begins at step 0 " in began[0]
    assert all("begins at step 0 " not in line for line in began[3:])


def test_a_job_that_is_asked_to_end_saves_a_checkpoint_and_is_not_queued_again(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    work, job = submitted(cluster, tmp_path / "work", "--requeue", more="kept")
    work.wait_for_world(3)
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    assert cluster.ended(job) == "FAILED"
    work.wait_for("the checkpoint of step")
    assert comes_true(cluster.is_idle)


def test_a_cancelled_job_ends_at_once_and_leaves_nothing(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    before = [len(host.pids()) for host in cluster.network]
    work, job = submitted(cluster, tmp_path / "work")
    work.wait_for_world(3)
    cluster.run("scancel", job)
    assert cluster.ended(job) == "CANCELLED"
    assert comes_true(cluster.is_idle)
    assert comes_true(lambda: [len(host.pids()) for host in cluster.network] == before)


def test_the_secret_is_in_no_argument_and_no_environment(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    work, job = submitted(cluster, tmp_path / "work")
    work.wait_for_world(3)
    for host in cluster.network:
        for pid in host.pids():
            for name in ("cmdline", "environ"):
                assert not SECRET.search(Path(f"/proc/{pid}/{name}").read_text(errors="replace"))
    assert not SECRET.search(cluster.run("scontrol", "show", "job", job))
    work.hurry()
    assert cluster.ended(job) == "COMPLETED", work.read()
