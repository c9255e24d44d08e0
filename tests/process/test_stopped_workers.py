"""A stopped worker is named by the agent of its machine long before its operations are overdue.

Nobody else is: not a worker that computes for long, and not one that holds the interpreter's lock
in native code. The figures are printed (``pytest -s``) and kept in docs/reliability.md.
"""

from __future__ import annotations

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.commands import START_S, run_command
from support.notes import Notebook

SCRIPTS = Path(__file__).parent / "scripts"
SOON_S = 15.0
"""Half of the deadline of an operation: whoever notices earlier did not wait for that."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_stopped_worker_is_named_to_those_that_wait_for_it(
    tmp_path: Path, num_workers: int
) -> None:
    notes = Notebook(tmp_path / "notes")
    options = ("--workers", str(num_workers), str(SCRIPTS / "elastic_regression.py"))
    with run_command(*options, str(notes.folder), "1000") as command:
        notes.wait_for("all to commit", lambda: len(notes.all("commit")) >= 4 * num_workers)
        victim = next(note.pid for note in notes.all("begin") if note.facts[0] == "1")
        stopped = time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        try:
            notes.wait_for(
                "all others to notice",
                lambda: len({note.pid for note in notes.all("lost", stopped)}) == num_workers - 1,
            )
            losses = notes.all("lost", stopped)
        finally:
            os.kill(victim, signal.SIGCONT)
        # A worker that is still on its way back when the others finish fails: the job ends.
        back = time.monotonic()
        notes.wait_for(
            "the victim to be back",
            lambda: any(note.pid == victim for note in notes.all("commit", back)),
        )
        (notes.folder / "stop").touch()
        assert command.finish() == 0, command.text
    noticed = max(note.at for note in losses) - stopped
    print(f"\n{num_workers} workers: SIGSTOP noticed after {noticed:.2f} s")
    for note in losses:
        assert f"worker 1 stands still: its process {victim} is stopped" in " ".join(note.facts)
    assert f"kill -CONT {victim}" in command.text
    assert noticed < SOON_S


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["computes", "holds the lock"])
@pytest.mark.parametrize("seconds", [7, pytest.param(60, marks=pytest.mark.long)])
def test_a_worker_that_comes_late_is_not_blamed(how: str, seconds: int) -> None:
    """The others look after it every two seconds of their wait."""
    options = ("--workers", "3", "--peer-timeout", "100", str(SCRIPTS / "one_comes_late.py"))
    with run_command(*options, how, str(seconds)) as command:
        assert command.finish(seconds + START_S) == 0, command.text
    for rank in range(3):
        assert f"rank {rank} of epoch 1: 3" in command.text


FIXED = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("potluck")
for step in range(10 ** 9):
    dist.all_reduce(torch.ones(4))
    if step == 20:
        print(f"rank {dist.get_rank()} trains, pid {os.getpid()}", flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and step == 20:
        break
dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_fixed_world_with_a_stopped_rank_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "fixed.py"
    script.write_text(FIXED)
    with run_command("--workers", "3", str(script)) as command:
        pids = [int(command.wait_for(f"rank {rank} trains").split()[-1]) for rank in range(3)]
        os.kill(pids[1], signal.SIGSTOP)
        stopped = time.monotonic()
        named = command.when(f"worker 1 stands still: its process {pids[1]} is stopped") - stopped
        assert command.finish() == 0, command.text
    print(f"\na fixed world: SIGSTOP noticed after {named:.2f} s")
    assert named < SOON_S
