"""A machine of two that is lost with its disk amid a save: the other one has what is needed."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from pathlib import Path

import pytest

from support.commands import Command
from support.ports import reserved_ports

SCRIPT = Path(__file__).parent / "scripts" / "dies_saving.py"
NUM_CALLS = 8
"""Of fsync, rename and unlink in a save: for the tensors, then for the manifest, the file flushed,
named, and its folder flushed; of the checkpoint before, its manifest and its tensors removed."""


def world(root: Path, machines: str, *arguments: object) -> list[Command]:
    """The script on each of the ``machines``, the first as rank 0, to its end."""
    with contextlib.ExitStack() as stack:
        [port] = stack.enter_context(reserved_ports(1))
        runs = [
            stack.enter_context(
                Command(
                    [sys.executable, str(SCRIPT), str(root / "disks"), *map(str, arguments)],
                    env={
                        "MACHINE": machine,
                        "POTLUCK_HOME": str(root / "homes" / machine),
                        "POTLUCK_PSK": "5" * 64,
                        "RANK": str(rank),
                        "WORLD_SIZE": str(len(machines)),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    },
                )
            )
            for rank, machine in enumerate(machines)
        ]
        for run in runs:
            run.finish()
    return runs


def ends(runs: list[Command]) -> set[tuple[int, int]]:
    """Of each rank the step at which it began, and its sum."""
    found = set()
    for run in runs:
        assert run.process.returncode == 0, run.text
        match = re.search(r"began at (\d+), sum (\d+)", run.text)
        assert match is not None, run.text
        found.add((int(match[1]), int(match[2])))
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("call", range(NUM_CALLS))
@pytest.mark.parametrize("victim", [0, 1])
def test_what_counted_is_on_the_machine_that_is_left(
    tmp_path: Path, victim: int, call: int
) -> None:
    """And the training goes on from it, or from what came after, on a machine that is new."""
    runs = world(tmp_path, "ab", 3, victim, call)
    dead, left = runs[victim], runs[1 - victim]
    assert dead.process.returncode == -signal.SIGKILL, dead.text
    assert not (tmp_path / "disks" / "ab"[victim]).exists()
    assert "step 1 counts" in left.text
    counted = max(int(step) for step in re.findall(r"step (\d+) counts", dead.text + left.text))
    [(began, total)] = ends(world(tmp_path, "c" + "ab"[1 - victim], 5))
    assert counted <= began <= 2
    assert total == 1 + 2 + 3 + 4 + 5


def test_without_a_loss_the_calls_are_as_many_as_are_tried(tmp_path: Path) -> None:
    """So no call of a save is left out above."""
    for victim in (0, 1):
        runs = world(tmp_path / str(victim), "ab", 2, victim, NUM_CALLS)
        assert ends(runs) == {(0, 3)}
