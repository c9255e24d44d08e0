"""Which of a machine's networks its agent and workers use: the named one, never the loopback."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import Host, Network
from support.machines import Machine, form, machines

pytestmark = pytest.mark.needs_root_netns

SCRIPT = """
import pathlib, sys, time
import potluck
ctx = potluck.init()
ctx.barrier()
print("rank", ctx.rank, "is up")
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
ctx.close()
"""
LISTENING = "0A"


def listened_on(machine: Machine) -> set[str]:
    """The local addresses of all listening TCP sockets of a machine, as /proc has them."""
    found = set()
    for table in ("tcp", "tcp6"):
        shown = machine.host.run(["cat", f"/proc/net/{table}"]).stdout.splitlines()[1:]
        rows = [line.split() for line in shown]
        found |= {row[1].partition(":")[0] for row in rows if row[3] == LISTENING}
    return found


def test_an_agent_and_its_workers_listen_on_the_named_interface_only(tmp_path: Path) -> None:
    with Network(2) as network:
        network.second()
        homes = tmp_path / "homes"
        with (
            Machine(network[0], homes, POTLUCK_BIND="eth0") as ada,
            Machine(network[1], homes) as bob,
        ):
            form(ada, bob)
            script, stop = tmp_path / "job" / "wait.py", tmp_path / "stop"
            script.parent.mkdir()
            script.write_text(SCRIPT)
            with bob.run("--workers", "2", script, stop) as run:
                for rank in range(4):
                    run.wait_for(f"rank {rank} is up")
                on_ada, on_bob = listened_on(ada), listened_on(bob)
                stop.touch()
                assert run.finish() == 0, run.text
            shown = ada.host.run(["ip", "-o", "addr", "show", "dev", "eth0"]).stdout
            assert "inet " in shown
            everywhere = {"0" * 8, "0" * 32}
            assert on_bob & everywhere
            assert not on_ada & everywhere
            assert "0100007F" in on_ada, "its own commands and workers"
            wlan = ada.host.run(["ip", "-o", "-4", "addr", "show", "dev", "wlan0"]).stdout
            second = wlan.split("inet ")[1].split("/")[0]
            in_table = "".join(f"{int(part):02X}" for part in reversed(second.split(".")))
            assert in_table not in on_ada
            ada.down()
            wrong = ada.runs("up", "--interface", "eth7")
            assert wrong.returncode == 2
            assert "has no interface or address of this name; there are: eth0 (" in wrong.stderr
            assert "wlan0" in wrong.stderr


PLAIN = """
import os, socket
import torch, torch.distributed as dist

print("own name is", socket.gethostbyname(socket.gethostname()))
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = [os.environ[each] for each in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]
print("total", total.item(), *names)
dist.destroy_process_group()
"""


def test_a_plain_gloo_script_finds_the_network_where_own_names_lead_to_the_loopback(
    tmp_path: Path,
) -> None:
    """Debian's /etc/hosts gives the machine's own name the address 127.0.1.1."""
    script = tmp_path / "code" / "plain.py"
    script.parent.mkdir()
    script.write_text(PLAIN)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(2))
        for host in network:
            stack.enter_context(own_names(host, f"127.0.1.1 {socket.gethostname()}"))
        ada, bob = stack.enter_context(machines(network, tmp_path / "homes"))
        form(ada, bob)
        with ada.run(script) as run:
            assert run.finish() == 0, run.text
            assert len([line for line in run.lines if "own name is 127.0.1.1" in line]) == 2
            assert len([line for line in run.lines if "total 2.0 eth0 eth0" in line]) == 2
        with bob.run("--env", "NCCL_SOCKET_IFNAME=lo", script) as run:
            assert run.finish() == 0, run.text
            chosen = [line for line in run.lines if "total 2.0 eth0 lo" in line]
            assert len(chosen) == 2, "what the user has set stays"


@contextlib.contextmanager
def own_names(host: Host, line: str) -> Iterator[None]:
    """An /etc/hosts of its own, for the programs that start on ``host`` from now on."""
    folder = Path("/etc/netns") / host.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{line}\n")
    try:
        yield
    finally:
        shutil.rmtree(folder)
