"""What a member may do on another member's machine: on hosts, with real scripts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck._core.system import SIGKILL
from support.clusters import found_cluster
from support.commands import Command
from support.machines import PSK, Machine, cluster_of, form, leader_of
from support.sums import TRAINING, check_sums

pytestmark = pytest.mark.needs_root_netns

LOOKER = """
import os
print("variables", *sorted(os.environ))
print("given", os.environ.get("GIVEN"), os.environ.get("TAKEN"), os.environ.get("DATA"))
"""
OWNERS = {
    "AWS_SECRET_ACCESS_KEY": "aws",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "HF_TOKEN": "hf",
    "SLURM_PROCID": "3",
    "DATA": "/data",
    "POTLUCK_PASS_ENV": "DATA",
}


def test_a_script_of_another_member_finds_no_key_of_the_owner(tmp_path: Path) -> None:
    script = tmp_path / "code" / "look.py"
    script.parent.mkdir()
    script.write_text(LOOKER)
    with cluster_of(2, tmp_path / "homes", psk="", **OWNERS) as (ada, bob):
        found_cluster(ada.home, bob.home, psk=bytes.fromhex(PSK))
        form(ada, bob)
        ada.environment["TAKEN"] = "along"
        with ada.run("--env", "GIVEN=value", "--env", "TAKEN", script) as run:
            assert run.finish() == 0, run.text
            variables = [line for line in run.lines if "] variables " in line]
            assert len(variables) == 2, run.text
            for line in variables:
                names = set(line.split())
                assert {"PATH", "HOME", "RANK", "POTLUCK_WORKER_HOME", "DATA"} <= names
                unwanted = {"AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "HF_TOKEN", "SLURM_PROCID"}
                assert not names & (unwanted | {"POTLUCK_PSK", "POTLUCK_PASSPHRASE"})
                assert "POTLUCK_HOME" not in names
            assert sum("] given value along /data" in line for line in run.lines) == 2, run.text


def trains_on(run: Command, num_hosts: int, *, since: int) -> None:
    """The job commits steps in a group of so many, of lines after ``since``."""
    run.wait_for(lambda line: "step " in line and line.endswith(f"of {num_hosts}"), since=since)


def done(machine: Machine, *arguments: str) -> None:
    """A command on ``machine`` that succeeds."""
    result = machine.runs(*arguments)
    assert result.returncode == 0, result.stderr


def shown(status: dict[str, Any], of: Machine) -> dict[str, Any]:
    """The node ``of`` in the status of a machine."""
    return next(each for each in status["cluster"]["nodes"] if each["node"] == of.node)


def shows(machine: Machine, of: Machine, **facts: object) -> dict[str, Any]:
    """The status of ``machine``, once it has these ``facts`` of the node ``of``: a machine tells
    all others what its owner decides, who may hear of it after the leader."""
    return machine.shows(lambda status: facts.items() <= shown(status, of).items())


def worker_on(machine: Machine, status: dict[str, Any]) -> dict[str, Any]:
    """A worker of the one job there, as a status tells of it; empty if it does not."""
    workers = [each for job in status["jobs"] for each in job["workers"]]
    return next((each for each in workers if each["node"] == machine.name), {})


def test_scripts_run_only_where_the_owner_allows_whoever_starts_them(tmp_path: Path) -> None:
    """Denied before, allowed while the job runs, denied again: the job has the machine meanwhile,
    and no process of the job is there before and after."""
    with cluster_of(3, tmp_path / "homes") as machines:
        ada, bob, carl = machines
        done(bob, "deny", ada.node)
        form(*machines)
        bob.command.wait_for("scripts run here, as root: all but ")
        with ada.run(TRAINING, tmp_path / "stop") as run:
            trains_on(run, 2, since=0)
            why = f"bob ({bob.id}) takes no part: its owner does not let it run jobs of ada"
            run.wait_for(why)
            assert f"`potluck allow {ada.id}` there" in run.text
            assert bob.others() == [], "it runs nothing"
            since = run.mark
            done(bob, "allow", "ada")
            trains_on(run, 3, since=since)
            since = run.mark
            done(bob, "deny", ada.id)
            trains_on(run, 2, since=since)
            assert bob.left_over() == [], "what ran there has ended"
            shows(carl, bob, runs_for="all but ada")
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
            assert check_sums(run).keys() == {"ada", "carl"}
        with bob.run(TRAINING, tmp_path / "stop") as run:
            assert run.finish() == 0, run.text
            assert check_sums(run).keys() == {"ada", "bob", "carl"}, "bob runs its own jobs"


@pytest.mark.parametrize("who", ["leader", "starter"])
def test_the_owner_takes_a_machine_back_and_gives_it_again_while_it_trains(
    tmp_path: Path, who: str
) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter = next(each for each in machines if each is not leader)
        paused = leader if who == "leader" else starter
        with starter.run(TRAINING, tmp_path / "stop") as run:
            trains_on(run, 3, since=0)
            since = run.mark
            done(paused, "pause")
            trains_on(run, 2, since=since)
            run.wait_for("its owner paused it; `potluck resume` there", since=since)
            for machine in machines:
                status = shows(machine, paused, paused=True)
                assert shown(status, paused)["role"], "it stays a member"
            # The leader tells the others twice a second what has become of workers.
            status = paused.shows(lambda told: worker_on(paused, told).get("phase") == "away")
            assert [job["node"] for job in status["jobs"]] == [leader.node], "it leads as before"
            assert worker_on(paused, status)["restarts"] == 0
            since = run.mark
            done(paused, "resume")
            trains_on(run, 3, since=since)
            shows(leader, paused, paused=False)
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
            assert check_sums(run).keys() == {"ada", "bob", "carl"}


def test_a_job_that_runs_on_a_paused_machine_only_waits_for_it(tmp_path: Path) -> None:
    with cluster_of(2, tmp_path / "homes") as machines:
        ada, bob = machines
        form(*machines)
        with ada.run("--nodes", "1", TRAINING, tmp_path / "stop") as run:
            trains_on(run, 1, since=0)
            done(ada, "pause")
            run.wait_for("its owner paused it")
            bob.shows(lambda status: worker_on(ada, status).get("phase") == "away")
            since = run.mark
            done(ada, "resume")
            trains_on(run, 1, since=since)
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
        done(bob, "pause")
        done(ada, "pause")
        shows(ada, bob, paused=True)
        shows(bob, ada, paused=True)
        with ada.run("--wait", "1", TRAINING, tmp_path / "stop") as run:
            assert run.finish() == 2
            for machine in machines:
                assert f"{machine.name} ({machine.id}): its owner paused it" in run.lines[-1]


ORDERS = """
import asyncio, os
from potluck._core.backends.agent_link import agent_address
from potluck._core.cluster.trust.credentials import load_credentials
from potluck.errors import Refused
from potluck._core.settings import load_settings
from potluck._core.transport import aio
from potluck._core.wire.greeting import Hello

async def main():
    mine, job = load_credentials(load_settings()), os.environ["POTLUCK_JOB"]
    mine.refusal_of = lambda peer: None  # it calls whom it likes
    own = agent_address()
    for where, address in (("own", own), ("other", (os.environ["OTHER"], own[1]))):
        for kind, job in (("client", ""), ("client", mine.job), ("node", ""), ("measure", ""),
                          ("worker", "train-0")):
            try:
                hello = Hello(kind, job=job)
                _, writer, _ = await aio.connect(*address, hello, mine)
                await aio.end(writer)
                print("heard", where, kind, flush=True)
            except Refused as refused:
                print("refused", where, kind, refused.code, flush=True)

asyncio.run(main())
"""


def test_a_script_gives_no_orders_to_any_agent(tmp_path: Path) -> None:
    """Not to that of its own machine, nor to another's: its certificate is good for its job. What
    its certificate was good for is gone when the job is over."""
    script = tmp_path / "code" / "orders.py"
    script.parent.mkdir()
    script.write_text(ORDERS)
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        with ada.run("--env", f"OTHER={bob.host.address}", script) as run:
            assert run.finish() == 0, run.text
        said = [line.partition("] ")[2] for line in run.lines if "] refused " in line]
        assert "] heard " not in run.text
        kinds = ("client", "client", "node", "measure", "worker")
        own = [f"refused own {kind} kind" for kind in kinds]
        assert {line for line in said if " own " in line} == set(own), run.text
        assert len(said) == 4 * len(kinds), run.text
        for machine in (ada, bob):
            assert machine.kept("workers/*/*") == [], "left after the job"


PEEKER = """
import json, os, pathlib
def can(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return False
    return True
home = pathlib.Path.home()
credentials = pathlib.Path(os.environ["POTLUCK_WORKER_HOME"])
agents, mine = credentials.parents[2], (credentials, pathlib.Path(__file__).parent)
found = {
    "key": (home / ".ssh" / "id").exists(),
    "diary": pathlib.Path(os.environ["DIARY"]).exists(),
    "files of the agent": any(
        path.is_file() and not any(path.is_relative_to(each) for each in mine)
        for path in agents.rglob("*")
    ),
    "agent": os.getppid() != 1 and can(os.kill, int(os.environ["AGENT"]), 0),
    "system": os.access("/etc", os.W_OK) and can(os.utime, "/etc/hostname"),
}
pathlib.Path(__file__).with_name("written here").touch()
pathlib.Path(os.environ["POTLUCK_OUTPUT"], "written there").touch()
print("found", json.dumps(found), flush=True)
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: the command bwrap")
def test_a_script_in_the_sandbox_finds_its_own_folder_and_little_else(tmp_path: Path) -> None:
    script, owner = tmp_path / "code" / "peek.py", tmp_path / "owner"
    for path, text in ((script, PEEKER), (owner / ".ssh" / "id", "key"), (owner / "diary", "dear")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given = {"HOME": str(owner), "POTLUCK_SANDBOX": "1", "DIARY": str(owner / "diary")}
    with cluster_of(2, tmp_path / "homes", POTLUCK_PASS_ENV="DIARY", **given) as (ada, bob):
        form(ada, bob)
        assert "a sandbox for scripts of others" in shown(ada.status(), bob)["limits"]
        for _ in range(2):
            with ada.run("--env", f"AGENT={bob.pid}", script) as run:
                assert run.finish() == 0, run.text
        found = {}
        for line in run.lines:
            if match := re.search(r"\[ *\d+ (\w+)\] found (.*)", line):
                found[match[1]] = json.loads(match[2])
        assert found["bob"] == dict.fromkeys(found["bob"], False), run.text
        assert found["ada"]["key"], "the owner's own script runs as the owner"
        assert found["ada"]["files of the agent"]
        kept = list((bob.home / "code_store" / "jobs").glob("*/code/written here"))
        assert len(kept) == 2, "what a script writes into its folder stays there"
        results = list((bob.home / "code_store" / "jobs").glob("*/output/written there"))
        assert len(results) == 2


@pytest.fixture(scope="module")
def sandboxed(
    tmp_path_factory: pytest.TempPathFactory, forked_workers: None
) -> Iterator[list[Machine]]:
    """Two machines that run scripts of others in a sandbox."""
    root = tmp_path_factory.mktemp("sandboxed")
    with cluster_of(2, root, POTLUCK_SANDBOX="1") as made:
        form(*made)
        yield made


CALLER = """
import errno, os, socket
import potluck
from potluck._core.transport import broker
from potluck._core.transport.listener import listening_socket

def reached(connect, *where):
    try:
        connect(*where).close()
        return "reached"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))

def brokered(host, port):
    with broker.dialling(host, port) as (asking, steps):
        asking.setblocking(True)
        return next(steps, None) or steps.send(None)

ctx = potluck.init()
ada = os.environ["ADA"]
for where in ((ada, int(os.environ["PORT"])), ("127.0.0.1", 22), ("203.0.113.9", 443)):
    print("direct", where[1], reached(socket.create_connection, where), flush=True)
    if broker.is_needed():
        print("brokered", where[1], reached(brokered, *where), flush=True)
if broker.is_needed():
    port = listening_socket("", 0)
    print("listens", port.port, flush=True)
ctx.barrier()
ctx.close()
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: the command bwrap")
def test_a_script_in_the_sandbox_reaches_its_group_and_nothing_else(
    sandboxed: list[Machine], tmp_path: Path
) -> None:
    """Not another program of the machine where the job was started, nor the internet: neither by
    itself nor by the broker of sockets."""
    script = tmp_path / "code" / "call.py"
    script.parent.mkdir()
    script.write_text(CALLER)
    ada, _ = sandboxed
    with Command(ada.host.command([sys.executable, "-c", SERVER])) as server:
        port = server.wait_for("port ").split()[-1]
        given = ("--env", f"ADA={ada.host.address}", "--env", f"PORT={port}")
        with ada.run(*given, script) as run:
            assert run.finish() == 0, run.text
    said = [line.partition("] ")[2] for line in run.lines if " bob] " in line]
    assert [line for line in said if line.startswith("direct")] == [
        f"direct {port} ENETUNREACH",
        "direct 22 ECONNREFUSED",
        "direct 443 ENETUNREACH",
    ]
    assert [line for line in said if line.startswith("brokered")] == [
        f"brokered {port} EACCES",
        "brokered 22 EACCES",
        "brokered 443 EACCES",
    ]
    assert any(line.startswith("listens ") for line in said)
    assert f"] direct {port} reached" in run.text, "the owner's own script has the network"


SERVER = """
import socket
with socket.create_server(("", 0)) as server:
    print("port", server.getsockname()[1], flush=True)
    while True:
        server.accept()[0].close()
"""

TORCH = """
import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

for turn in range(2):
    dist.init_process_group("potluck")
    total = torch.ones(1000) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, dist.get_rank())
    print("torch", total[0].item(), said, flush=True)
    if "POTLUCK_BROKER" in os.environ and turn == 0:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.distributed_c10d._get_default_store()
        file = dist.FileStore("beside the script", 1)
        for make, arguments in (
            (dist.TCPStore, (address, port)),
            (dist.FileStore, ("/tmp/store", 2)),
            (dist.ProcessGroupGloo, (store, dist.get_rank(), 4)),
        ):
            try:
                make(*arguments)
            except Exception as error:
                print("refused", make.__name__, "POTLUCK_SANDBOX_NETWORK" in str(error), flush=True)
        alone = dist.TCPStore("127.0.0.1", 0, 1, True)
        dist.ProcessGroupGloo(alone, 0, 1)
        print("its own loopback", alone.port > 0, flush=True)
    dist.destroy_process_group()
loaded = DataLoader(torch.arange(64.0), batch_size=8, num_workers=2, multiprocessing_context="fork")
print("loaded", sum(each.sum().item() for each in loaded), flush=True)
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: the command bwrap")
def test_torchs_groups_and_loaders_work_in_the_sandbox_and_what_cannot_is_refused_at_once(
    sandboxed: list[Machine], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "code" / "plain.py"
    script.parent.mkdir()
    script.write_text(TORCH)
    _, bob = sandboxed
    with bob.run("--workers", "2", script) as run:
        assert run.finish() == 0, run.text
    said = [line.partition("] ")[2] for line in run.lines]
    assert said.count("torch 10.0 [0, 1, 2, 3]") == 2 * 4, run.text
    assert said.count("loaded 2016.0") == 4, run.text
    for kind in ("TCPStore", "FileStore", "ProcessGroupGloo"):
        assert said.count(f"refused {kind} True") == 2, run.text
    assert said.count("its own loopback True") == 2, run.text


def trainings(status: dict[str, Any]) -> dict[str, Any]:
    """Without jobs of the tests before, which may still be shown."""
    return {"jobs": [job for job in status["jobs"] if job["job"].startswith("sums-")]}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: the command bwrap")
def test_a_training_works_in_the_sandbox_and_survives_a_kill_and_an_interrupt(
    sandboxed: list[Machine], tmp_path: Path
) -> None:
    ada, bob = sandboxed
    with ada.run("--workers", "2", TRAINING, tmp_path / "stop") as run:
        trains_on(run, 4, since=0)
        status = ada.shows(lambda told: worker_on(bob, trainings(told)).get("pid", 0) > 0)
        since = run.mark
        pid = worker_on(bob, trainings(status))["pid"]
        assert pid in bob.others(), "its number outside of the sandbox"
        os.kill(pid, SIGKILL)
        trains_on(run, 3, since=since)
        trains_on(run, 4, since=since)
        (tmp_path / "stop").touch()
        assert run.finish() == 0, run.text
        assert check_sums(run).keys() == {"ada", "bob"}
        assert bob.left_over() == []
    (tmp_path / "stop").unlink()
    with ada.run(TRAINING, tmp_path / "stop") as run:
        trains_on(run, 2, since=0)
        run.signal(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT, run.text
        assert "KeyboardInterrupt" in "".join(each for each in run.lines if " bob]" in each)
        assert bob.left_over() == []
