"""Forked children of ranks: they get one error, change nothing, and hold no connection open.

What is checked, and that sums of the ranks stay exact, is in ``scripts/forking.py`` and
``scripts/forking_torch.py``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from potluck._core import native
from potluck._core.system import SIGKILL
from support.pages import snippets
from support.ports import reserved_ports

SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_S = 300.0

LINKS = {
    "shared memory": {},
    "links": {"POTLUCK_USE_SHARED_MEMORY": "no"},
    "python links": {"POTLUCK_USE_SHARED_MEMORY": "no", "POTLUCK_NATIVE": "0"},
}
TOGETHER = "idle,own_context,amid_a_call,in_a_handler,helpers,load,processes"
"""What one world answers: to start its ranks takes longer than most of these."""
LONG = pytest.mark.long
NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

EXECUTED = pytest.mark.real_exec
"""Ranks that have not been forked themselves; and that fork faster: they have no torch."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def run_ranks(script: str, scenarios: str, folder: Path, variables: dict[str, str]) -> None:
    """Two ranks by their variables; all end right, but for rank 0 where it is killed."""
    with reserved_ports(1) as [port]:
        pass
    processes = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with open(folder / f"output-{rank}", "wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPTS / script), scenarios, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | place | meeting | variables,
                    start_new_session=True,
                )
            )
    try:
        codes = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, SIGKILL)
            process.wait()
    output = "\n".join((folder / f"output-{rank}").read_text() for rank in range(2))
    assert codes == [-signal.SIGKILL if scenarios == "outlived" else 0, 0], output


def run_job(
    script: str, scenarios: str, folder: Path, workers: int, variables: dict[str, str]
) -> None:
    """The same as a job of ``potluck run``."""
    program = Path(sys.executable).with_name("potluck")
    command = [str(program), "run", "--workers", str(workers), str(SCRIPTS / script), scenarios]
    done = subprocess.run(
        [*command, str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@EXECUTED
@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize(
    "scenarios",
    [
        pytest.param(TOGETHER, id="ranks that live"),
        "outlived",
        pytest.param("much_load", marks=LONG),
    ],
)
def test_a_forked_child_is_refused_and_the_ranks_go_on(
    scenarios: str, links: str, tmp_path: Path
) -> None:
    if links != "links" and not native.available:
        pytest.skip("without the native core all of these are the same")
    run_ranks("forking.py", scenarios, tmp_path, LINKS[links])


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("scenarios", "method", "links"),
    [
        pytest.param("group,loader,spawned_loader", "env://", "shared memory", marks=EXECUTED),
        ("group,loader", "potluck://", "links"),
        ("outlived", "env://", "shared memory"),
        ("outlived", "potluck://", "shared memory"),
    ],
)
def test_so_it_is_with_process_groups_of_torch_and_with_data_loaders(
    scenarios: str, method: str, links: str, tmp_path: Path
) -> None:
    run_ranks("forking_torch.py", scenarios, tmp_path, LINKS[links] | {"FORKING_INIT": method})


@EXECUTED
@pytest.mark.parametrize("links", ["shared memory", "links"])
@pytest.mark.parametrize(
    ("scenarios", "workers"),
    [("idle,own_context,load", 2), ("reform", 3)],
    ids=["lives", "reforms"],
)
def test_so_it_is_in_a_job(scenarios: str, workers: int, links: str, tmp_path: Path) -> None:
    run_job("forking.py", scenarios, tmp_path, workers, LINKS[links])


@NEEDS_TORCH
def test_so_it_is_in_a_job_with_a_process_group(tmp_path: Path) -> None:
    run_job("forking_torch.py", "group", tmp_path, 2, {})


@NEEDS_TORCH
def test_the_loader_of_the_page_starts_workers_of_its_own(tmp_path: Path) -> None:
    (snippet,) = [each for each in snippets("torch.md") if "multiprocessing_context" in each]
    path = tmp_path / "spawning.py"
    path.write_text(snippet)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "28.0\n", done.stdout + done.stderr
