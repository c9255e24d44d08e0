"""Runs of a script that is not elastic, ``tests/net/scripts/training/counting.py``."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from potluck._core.system import SIGKILL
from support.commands import Command
from support.machines import Machine

SCRIPT = Path(__file__).parents[1] / "net" / "scripts" / "training" / "counting.py"


class Run:
    """A run of the script, and what its ranks said since they began last."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.command = command
        self.folder = folder
        self._since = 0

    def begun(self, size: int) -> set[str]:
        """Wait until a world of ``size`` trains (again) on its machines, which are named."""
        names = set()
        for rank in range(size):
            line = self.command.wait_for(f"rank {rank} of {size} begins", since=self._since)
            machine = re.match(r"\[ *\d+ (\S+)\]", line)
            assert machine is not None, line
            names.add(machine[1])
        self._since = self.command.mark
        self.command.wait_for("step ", since=self._since)
        return names

    def finish(self) -> None:
        (self.folder / "stop").touch()
        assert self.command.finish() == 0, self.command.text


def run_on(machine: Machine, folder: Path, backend: str, *options: str) -> Command:
    return machine.run(*options, SCRIPT, backend, folder)


def kill_a_worker(machine: Machine) -> None:
    """SIGKILL its worker: it runs the script in the agent's copy of its folder."""
    for pid in machine.others():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"/code_store/" in command:
                os.kill(pid, SIGKILL)
                return
    raise AssertionError(f"no worker runs on {machine}")
