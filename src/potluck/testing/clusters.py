"""Clusters of hosts: ``potluck up`` on each host of a network, and ``potluck run`` from any.

    with ClusterOfHosts(3, folder) as cluster:
        ada, bob, carl = cluster.up()
        with bob.run("train.py") as run:           # workers on all three
            run.wait_for("step 20")
            carl.kill_agent()                      # SIGKILL; its workers end with it
            ada.sees(ada, bob)
            assert run.finish() == 0
        print(ada.status()["jobs"])

Needs what ``hosts`` needs. Each machine has a name, a host, and a home of its own; what is started
here is ended when the cluster closes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from potluck.cluster.identity import load_or_create_identity
from potluck.testing.commands import Command, potluck_command
from potluck.testing.hosts import Host, Network
from potluck.transport.credentials import node_id_of

PSK = "ab" * 32
NAMES = ("ada", "bob", "carl", "dora", "emil", "fay", "gus", "hedy")

_VIEW = re.compile(r"epoch (\d+): (.*) \(leader \S+ \(([0-9a-f]{8})\)")
_WAIT_S = 60.0


class Machine:
    """One host of a cluster; ``command`` is its agent. ``environment`` may be changed before
    ``up``."""

    def __init__(self, host: Host, home: Path, name: str, **environment: str) -> None:
        self.host, self.home, self.name = host, home, name
        self.environment = {
            "POTLUCK_HOME": str(home),
            "POTLUCK_PSK": PSK,
            "POTLUCK_NAME": name,
            "POTLUCK_DISCOVERY": "beacon",
            "PYTHONUNBUFFERED": "1",
            **environment,
        }
        self.node = node_id_of(load_or_create_identity(home).public_key())
        self.command: Command

    @property
    def id(self) -> str:
        """The beginning of the node's id, as lines for people have it."""
        return self.node[:8]

    @property
    def full_environment(self) -> dict[str, str]:
        """All variables of this machine's commands."""
        return os.environ | self.environment

    def up(self) -> Command:
        """Start the agent (again); a context manager that ends it."""
        arguments = self.host.command([*potluck_command(), "up"])
        self.command = Command(arguments, env=self.environment)
        return self.command

    def run(self, *arguments: str | os.PathLike[str], cwd: Path | None = None) -> Command:
        """``potluck run ARGUMENTS`` on this machine, started."""
        words = [*potluck_command(), "run", *(os.fspath(each) for each in arguments)]
        return Command(self.host.command(words), env=self.environment, cwd=cwd)

    def runs(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of potluck on this machine, to its end."""
        return subprocess.run(
            self.host.command([*potluck_command(), *arguments]),
            env=self.full_environment,
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
        )

    def status(self) -> dict[str, Any]:
        """``potluck status --json``."""
        status: dict[str, Any] = json.loads(self.runs("status", "--json").stdout)
        return status

    def sees(self, *others: Machine, timeout_s: float = _WAIT_S) -> str:
        """Wait until the agent said that it is in a view of exactly these; the line. Lines from
        before an agent was started again don't count: that is another ``command``."""
        wanted = {each.id for each in others}

        def is_it(line: str) -> bool:
            match = _VIEW.search(line)
            return match is not None and _ids(match[2]) == wanted

        return self.command.wait_for(is_it, timeout_s)

    @property
    def view(self) -> set[str]:
        """The ids in the newest view that the agent told of."""
        views = [match[2] for line in self.command.lines if (match := _VIEW.search(line))]
        return _ids(views[-1]) if views else set()

    @property
    def leader(self) -> str:
        """The id of the leader in the newest view; empty without one."""
        leaders = [match[3] for line in self.command.lines if (match := _VIEW.search(line))]
        return leaders[-1] if leaders else ""

    def kill_agent(self, number: int = signal.SIGKILL) -> None:
        """Send the agent a signal; its workers end with it, unless the signal only stops it."""
        os.kill(self.command.process.pid, number)

    def cut(self) -> None:
        """Pull its cable."""
        self.host.link(up=False)

    def heal(self) -> None:
        """Plug its cable in again."""
        self.host.link(up=True)

    def __repr__(self) -> str:
        return f"<machine {self.name} ({self.id})>"


class ClusterOfHosts:
    """``num_hosts`` machines, each with a host of a ``Network``, in homes below ``folder``."""

    def __init__(
        self, num_hosts: int, folder: Path, *, rate: str | None = None, **environment: str
    ) -> None:
        self._stack = ExitStack()
        self.network = self._stack.enter_context(Network(num_hosts, rate=rate))
        self.machines = [
            Machine(host, folder / name, name, **environment)
            for host, name in zip(self.network, NAMES, strict=False)
        ]

    def up(self, machines: Sequence[Machine] | None = None) -> list[Machine]:
        """Start the agents of ``machines`` (all), and wait until each sees them all."""
        started = self.machines if machines is None else list(machines)
        for machine in started:
            self._stack.enter_context(machine.up())
        for machine in started:
            machine.sees(*started)
        return started

    def join(self, machine: Machine) -> None:
        """Start the agent of ``machine`` (again), without waiting for anything."""
        self._stack.enter_context(machine.up())

    def leader(self, *among: Machine) -> Machine:
        """The machine that leads, as the first of ``among`` (all) sees it."""
        first = (among or self.machines)[0]
        return next(each for each in self.machines if each.id == first.leader)

    def __enter__(self) -> ClusterOfHosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()


def _ids(text: str) -> set[str]:
    return set(re.findall(r"\(([0-9a-f]{8})\)", text))
