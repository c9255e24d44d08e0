"""What the tests of `potluck launch` on real managers have in common: a script and its output."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck._core.system import SIGKILL
from support.commands import comes_true
from support.components import ROOT
from support.hosts import Host

SCRIPT = ROOT / "tests" / "components" / "scripts" / "managed.py"
EPOCHS = 60
COUNTED = EPOCHS * sum(range(64))
POTLUCK = str(Path(sys.executable).with_name("potluck"))

_STEP = re.compile(r"step (\d+): rank (\d) of (\d) (\S*) (\d+) (\d+)")


def write_names(path: Path, hosts: Mapping[str, Host]) -> None:
    """A file like /etc/hosts with the names of ``hosts``."""
    known = [f"{host.address} {name}" for name, host in hosts.items()]
    path.write_text("\n".join(["127.0.0.1 localhost", *known, ""]))


def on_host(host: Host, name: str, known: Path, command: Sequence[str]) -> list[str]:
    """``command`` on ``host``, whose name is ``name``, with the names of the file ``known``."""
    script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
    # Not by `ip netns exec`, which mounts another /sys, where slurmd misses its cgroups.
    enter = ["nsenter", f"--net=/run/netns/{host.namespace}", "--"]
    words = ["sh", "-c", script, "sh", name, str(known), *command]
    return [*enter, "unshare", "--uts", "--mount", *words]


def kill_all(host: Host) -> None:
    """Kill every process on ``host``, so that none says goodbye to another."""
    while pids := host.pids():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)


def commands_of(section: str) -> list[list[str]]:
    """The commands of a section of docs/managed.md, in words."""
    page = (ROOT / "docs" / "managed.md").read_text()
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [shlex.split(line) for line in re.findall(r"^\w+\$ (.*)", text, re.MULTILINE)]


@dataclass(frozen=True)
class Step:
    """A line of the script: one rank of a world of ``size``, whose process is ``pid``."""

    number: int
    rank: int
    size: int
    place: str
    pid: int
    parent: int


class Work:
    """A folder in which the script is called. Its steps are slow until ``hurry``; ``read()`` is
    what was written so far."""

    def __init__(self, folder: Path, read: Callable[[], str]) -> None:
        self.folder = folder
        self.read = read
        folder.mkdir(exist_ok=True)
        (folder / "slow").touch()
        (folder / "train.py").write_text(SCRIPT.read_text())

    @property
    def arguments(self) -> list[str]:
        return ["train.py", str(self.folder), str(EPOCHS)]

    def hurry(self) -> None:
        (self.folder / "slow").unlink()

    def steps(self) -> list[Step]:
        return [
            Step(int(number), int(rank), int(size), place, int(pid), int(parent))
            for number, rank, size, place, pid, parent in _STEP.findall(self.read())
        ]

    def wait_for_world(self, size: int, *, after: int = 0, timeout_s: float = 120.0) -> Step:
        """The last rank of a world of ``size``, in a step after ``after``."""

        def found() -> list[Step]:
            return [
                step
                for step in self.steps()
                if step.size == size and step.rank == size - 1 and step.number > after
            ]

        assert comes_true(lambda: bool(found()), timeout_s), self.read()
        return found()[0]

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        assert comes_true(lambda: text in self.read(), timeout_s), self.read()

    def check_result(self) -> None:
        """Every sample was counted exactly once, and the results of the workers were brought."""
        assert f"counted {COUNTED}" in self.read(), self.read()
        found = {path.read_text() for path in self.folder.glob("train-*/**/result*.txt")}
        assert found == {f"{COUNTED}\n"}, self.read()
