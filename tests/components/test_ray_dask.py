"""``potluck launch ray`` and ``dask`` on real clusters of processes of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.components import environment
from support.managed import Work, commands_of

RAY = "ray==2.60.0"
DASK = "distributed==2026.8.0"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "PYTHONWARNINGS": "ignore",
}


def launched(python: Path, section: str, work: Work, address: str) -> Command:
    """The command of a section of docs/managed.md, with the cluster's own address."""
    [words] = commands_of(section)
    words = [address if "://" in word else word for word in words[1:]]
    if section == "Ray":
        words.insert(2, f"--address={address}")
    command = [str(python), *potluck_command()[1:], *words]
    return Command(command, cwd=work.folder, env=QUIET)


def loses_a_machine_and_gets_it_back(work: Work, cluster: Lossy, run: Command) -> None:
    step = work.wait_for_world(3)
    cluster.lose()
    step = work.wait_for_world(2, after=step.number)
    cluster.add()
    work.wait_for_world(3, after=step.number)
    work.hurry()
    assert run.finish() == 0, run.text
    work.check_result()


class Lossy:
    """A cluster whose machines are lost and added; what its processes are is its own affair."""

    address: str

    def lose(self) -> None:
        raise NotImplementedError

    def add(self) -> None:
        raise NotImplementedError


class RayCluster(Lossy):
    """Nodes in a process with ``ray.cluster_utils``."""

    def __init__(self, script: Command) -> None:
        self._script = script
        self.address = script.wait_for("cluster at").rpartition(" ")[2]

    def lose(self) -> None:
        self._script.order("remove")

    def add(self) -> None:
        self._script.order("add")
        self._script.wait_for("added")


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[tuple[Path, RayCluster]]:
    python = environment("ray", RAY)
    script = Path(__file__).with_name("scripts") / "ray_cluster.py"
    with Command([str(python), str(script)], env=QUIET, orders=True) as running:
        yield python, RayCluster(running)
        assert running.process.stdin is not None
        running.process.stdin.close()
        running.finish()


def test_ray_trains_loses_a_node_and_places_its_actor_again(
    ray: tuple[Path, RayCluster], tmp_path: Path
) -> None:
    python, cluster = ray
    work = Work(tmp_path / "work", lambda: run.text)
    with launched(python, "Ray", work, cluster.address) as run:
        loses_a_machine_and_gets_it_back(work, cluster, run)


class DaskCluster(Lossy):
    """A scheduler, and workers with addresses of their own: machines, as Dask sees them."""

    def __init__(self, python: Path, stack: ExitStack) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._program = [str(python), "-m", "distributed.cli."]
        self._stack = stack
        self._workers: list[Command] = []
        self.address = f"tcp://127.0.0.1:{port}"
        options = ["--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
        self._start("dask_scheduler", *options).wait_for("Scheduler at")
        for _ in range(3):
            self.add()

    def _start(self, name: str, *options: str) -> Command:
        *python, module = self._program
        return self._stack.enter_context(Command([*python, module + name, *options]))

    def lose(self) -> None:
        os.killpg(self._workers.pop().process.pid, signal.SIGKILL)

    def add(self) -> None:
        host = f"127.0.0.{len(self._workers) + 11}"
        options = [self.address, "--host", host, "--nthreads", "1", "--no-nanny"]
        worker = self._start("dask_worker", *options)
        worker.wait_for("Registered to")
        self._workers.append(worker)


def test_dask_trains_loses_a_worker_and_takes_another_machine(tmp_path: Path) -> None:
    python = environment("dask", DASK)
    work = Work(tmp_path / "work", lambda: run.text)
    with ExitStack() as stack:
        cluster = DaskCluster(python, stack)
        with launched(python, "Dask", work, cluster.address) as run:
            loses_a_machine_and_gets_it_back(work, cluster, run)


def test_without_a_scheduler_the_error_says_where(tmp_path: Path) -> None:
    python = environment("dask", DASK)
    (tmp_path / "train.py").touch()
    command = [str(python), *potluck_command()[1:], "launch", "dask"]
    options = ["--scheduler", "tcp://127.0.0.1:9", "train.py"]
    variables = os.environ | {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"}
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 2
    assert "potluck: there is no scheduler of Dask at tcp://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr
