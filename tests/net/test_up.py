"""`potluck up` on several hosts: a cluster without configuration, and who is in when one goes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from potluck.cluster.identity import load_or_create_identity
from potluck.cluster.keyring import replace_secret
from potluck.cluster.trust import TrustStore
from potluck.testing.commands import Command, potluck_command
from potluck.testing.hosts import Host, Network
from potluck.transport.credentials import node_id_of

pytestmark = pytest.mark.needs_root_netns

PSK = "ab" * 32
WAIT_S = 60.0
VIEW = re.compile(r"epoch (\d+): (.*) \(leader")


class Machine:
    """A host with a home, and its agent."""

    def __init__(self, host: Host, home: Path, psk: str = PSK) -> None:
        self.host, self.home = host, home
        self.environment = {
            "POTLUCK_HOME": str(home),
            "POTLUCK_DISCOVERY": "mdns",
            "POTLUCK_PSK": psk,
            "PYTHONUNBUFFERED": "1",
        }
        self.id = node_id_of(load_or_create_identity(home).public_key())[:8]
        self.command: Command

    def up(self) -> Command:
        arguments = self.host.command([*potluck_command(), "up"])
        self.command = Command(arguments, env=self.environment)
        return self.command

    def stays_up(self, seconds: float) -> None:
        """Let time pass, in which the agent does not end."""
        with pytest.raises(subprocess.TimeoutExpired):
            self.command.process.wait(seconds)

    def sees(self, *others: Machine) -> str:
        """Wait for a view of exactly these."""
        wanted = {each.id for each in others}

        def is_it(line: str) -> bool:
            match = VIEW.search(line)
            return match is not None and set(re.findall(r"\b[0-9a-f]{8}\b", match[2])) == wanted

        return self.command.wait_for(is_it, WAIT_S)

    def status(self) -> dict[str, Any]:
        cluster: dict[str, Any] = json.loads(self.runs("status", "--json").stdout)["cluster"]
        return cluster

    def runs(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of potluck on this machine, to its end."""
        return subprocess.run(
            self.host.command([*potluck_command(), *arguments]),
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    @property
    def epoch(self) -> int:
        return max(int(match[1]) for line in self.command.lines if (match := VIEW.search(line)))


@contextmanager
def machines(network: Network, root: Path) -> Iterator[list[Machine]]:
    with ExitStack() as stack:
        made = [Machine(host, root / str(host.index)) for host in network]
        for machine in made:
            stack.enter_context(machine.up())
        for machine in made:
            machine.command.wait_for(" is up on port ", WAIT_S)
        yield made


def test_another_secret_and_a_banned_node_never_come_into_a_view_and_a_new_secret_is_for_the_rest(
    tmp_path: Path,
) -> None:
    with Network(4) as network, ExitStack() as stack:
        ada, bob, eve, bad = (Machine(host, tmp_path / str(host.index)) for host in network)
        eve.environment["POTLUCK_PSK"] = "cd" * 32
        for machine in (ada, bob, bad):  # the secret in its file, so that it can be changed
            del machine.environment["POTLUCK_PSK"]
            replace_secret(machine.home, bytes.fromhex(PSK))
        TrustStore(ada.home).ban(node_id_of(load_or_create_identity(bad.home).public_key()))
        for machine in (ada, bob, eve, bad):
            stack.enter_context(machine.up())
        for machine in (ada, bob):
            machine.sees(ada, bob)
        eve.sees(eve)
        rotated = ada.runs("rotate")
        assert rotated.returncode == 0, rotated.stderr
        assert "2 nodes have the new secret" in rotated.stdout
        secrets = {(machine.home / "cluster_secret").read_text() for machine in (ada, bob)}
        assert len(secrets) == 1
        assert secrets != {PSK + "\n"}
        assert (bad.home / "cluster_secret").read_text().strip() == PSK
        shown = ada.status()
        assert {each["node"][:8] for each in shown["nodes"] if each["role"]} == {ada.id, bob.id}
        for machine in (ada, bob):
            machine.stays_up(1)
            views = [match[2] for line in machine.command.lines if (match := VIEW.search(line))]
            assert not any(other.id in view for view in views for other in (eve, bad))


def _is_agent(pid: int) -> bool:
    """The program itself, not a shell around it."""
    return Path(f"/proc/{pid}/exe").resolve() == Path(sys.executable).resolve()


def _is_later(line: str, epoch: int, node: str) -> bool:
    match = VIEW.search(line)
    return match is not None and int(match[1]) > epoch and node in match[2]
