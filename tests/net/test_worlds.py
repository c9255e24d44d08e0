"""Scripts that are not elastic, on machines that come and go: their worlds start again."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import Command
from support.hosts import Host, Network
from support.machines import Machine, cluster_of, form, leader_of, machines

pytestmark = pytest.mark.needs_root_netns

SCRIPT = Path(__file__).parent / "scripts" / "training" / "counting.py"


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
            names.add(re.match(r"\[ *\d+ (\S+)\]", line)[1])
        self._since = self.command.mark
        self.command.wait_for("step ", since=self._since)
        return names

    def finish(self) -> None:
        (self.folder / "stop").touch()
        assert self.command.finish() == 0, self.command.text


def run_on(machine: Machine, folder: Path, backend: str, *options: str) -> Command:
    return machine.run(*options, SCRIPT, backend, folder)


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("agent killed", "gloo"),
        ("cut off", "potluck"),
        pytest.param("agent killed", "potluck", marks=pytest.mark.long),
        pytest.param("cut off", "gloo", marks=pytest.mark.long),
    ],
)
def test_a_world_goes_on_without_a_machine_and_with_it_at_the_next_start(
    tmp_path: Path, how: str, backend: str
) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with run_on(starter, tmp_path, backend) as command:
            run = Run(command, tmp_path)
            assert run.begun(3) == {each.name for each in machines}
            lost = time.monotonic()
            other.kill() if how == "agent killed" else other.cut()
            assert run.begun(2) == {leader.name, starter.name}
            print(f"trains again after {time.monotonic() - lost:.1f} s")
            other.start() if how == "agent killed" else other.heal()
            command.wait_for("can run, and waits until the world starts again")
            kill_a_worker(starter)
            assert run.begun(3) == {each.name for each in machines}
            run.finish()
        for machine in machines:
            assert machine.left_over() == [], "no worker of an older world is left"


@pytest.mark.parametrize("how", ["cut off", pytest.param("agent killed", marks=pytest.mark.long)])
def test_a_world_outlives_the_leaders_machine(tmp_path: Path, how: str) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with run_on(starter, tmp_path, "gloo") as command:
            run = Run(command, tmp_path)
            run.begun(3)
            kill_a_worker(other)
            run.begun(3)
            lost = time.monotonic()
            leader.kill() if how == "agent killed" else leader.cut()
            assert run.begun(2) == {starter.name, other.name}
            print(f"trains again after {time.monotonic() - lost:.1f} s")
            assert "restart 2" in command.text, "the count goes on under another leader"
            run.finish()


def test_machines_that_leave_before_the_ranks_met_are_not_waited_for(tmp_path: Path) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        (tmp_path / f"late-{other.name}").touch()
        with run_on(starter, tmp_path, "gloo") as command:
            command.wait_for("is late")
            since = command.mark
            lost = other.kill()
            told = command.when("can't go on without it", since=since)
            print(f"said after {told - lost:.2f} s")
            assert Run(command, tmp_path).begun(2) == {leader.name, starter.name}
            Run(command, tmp_path).finish()


def test_a_job_waits_for_as_many_machines_as_it_needs(tmp_path: Path) -> None:
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada)
        options = ("--min-nodes", "2", "--wait", "2")
        with run_on(ada, tmp_path, "gloo", *options) as command:
            command.wait_for("in the cluster: 1 of at least 2 machines (ada); waiting 2 s")
            assert command.finish() == 2
            assert "after 2 s; start `potluck up` on the others" in command.lines[-1]
        ada.environment["POTLUCK_MIN_PEERS"] = "1"
        with run_on(ada, tmp_path, "gloo") as command:
            command.wait_for("1 of at least 2 machines")
            bob.start()
            run = Run(command, tmp_path)
            assert run.begun(2) == {"ada", "bob"}
            run.finish()
        since = ada.mark
        bob.kill()
        ada.sees(ada, since=since)
        with run_on(ada, tmp_path, "gloo") as command:
            command.wait_for("1 of at least 2 machines")
            command.signal(signal.SIGINT)
            assert command.finish() == 2
            assert "interrupted before it began" in command.lines[-1]


def kill_a_worker(machine: Machine) -> None:
    """SIGKILL its worker: it runs the script in the agent's copy of its folder."""
    for pid in machine.others():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"/code_store/" in command:
                os.kill(pid, signal.SIGKILL)
                return
    raise AssertionError(f"no worker runs on {machine}")


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


WIDTHS = """
import numpy as np, potluck
from potluck.estimators import StandardScaler

ctx = potluck.init()
X = np.random.default_rng(0).normal(size=(100, 64))
for wrong in (X[:, :60], X.astype(complex)):
    try:
        StandardScaler(ctx=ctx).fit(X if ctx.rank == 0 else wrong)
        print("it fits")
    except ValueError as error:
        print("it says:", str(error).replace(chr(10), " "))
ctx.close()
"""


def test_a_refusal_of_an_estimator_is_the_same_error_on_all_hosts(tmp_path: Path) -> None:
    script = tmp_path / "code" / "widths.py"
    script.parent.mkdir()
    script.write_text(WIDTHS)
    with cluster_of(2, tmp_path / "homes") as pair:
        form(*pair)
        with pair[0].run(script) as run:
            assert run.finish() == 0, run.text
            said = [re.sub(r"^\[.*?\] ", "", line) for line in run.lines if "it says: " in line]
    assert len(said) == 4
    assert {said.count(each) for each in said} == {2}, said
    other = next(each for each in said if "has 64 features, that of" in each)
    assert re.search(
        r"rank 0 \(worker \d at (ada|bob):\d+\) has 64 features, that of rank 1", other
    )
    assert any("omplex data not supported" in each for each in said)


@pytest.mark.parametrize("what", ["a worker", "a machine"])
def test_a_script_with_a_context_that_does_not_re_form_starts_again(
    tmp_path: Path, what: str
) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with starter.run(SCRIPT.with_name("context_counting.py"), tmp_path) as command:
            run = Run(command, tmp_path)
            run.begun(3)
            if what == "a worker":
                kill_a_worker(other)
                assert len(run.begun(3)) == 3
                assert "(restart 1 of 3)" in command.text
            else:
                other.kill()
                assert run.begun(2) == {leader.name, starter.name}
                assert "(restart" not in command.text
            run.finish()
