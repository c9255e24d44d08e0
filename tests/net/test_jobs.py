"""``potluck run`` on a cluster of hosts: workers on all of them, from any of them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.hosts import Network
from support.machines import Machine, cluster_of, form, leader_of
from support.sums import TRAINING, check_sums

pytestmark = pytest.mark.needs_root_netns


def test_a_job_outlives_any_agent_and_takes_newcomers_in(tmp_path: Path) -> None:
    """A node that is neither leader nor starter; then the leader; then one comes in."""
    with cluster_of(4, tmp_path / "homes") as (*machines, dora):
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        summary_file = tmp_path / "summary.json"
        with starter.run("--json", summary_file, TRAINING, tmp_path / "stop") as run:
            run.wait_for("step 5 of 3")
            began = time.monotonic()
            other.kill()
            run.wait_for("of 2")
            other.start()
            again = len(run.lines)
            run.wait_for(lambda line: "of 3" in line and line in run.lines[again:])
            leader.kill()
            again = len(run.lines)
            run.wait_for(lambda line: "of 2" in line and line in run.lines[again:])
            dora.start()
            again = len(run.lines)
            run.wait_for(lambda line: "of 3" in line and line in run.lines[again:])
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
            trained_s = time.monotonic() - began
            assert check_sums(run).keys() == {starter.name, other.name, dora.name}
        summary = json.loads(summary_file.read_text())
        assert summary["seconds"] > trained_s, "also those under the leader before"
        causes = [each["cause"] for each in summary["recoveries"]]
        assert any(other.id in cause for cause in causes), causes
        assert any(leader.id in cause for cause in causes), causes
        assert summary["steps_run_again"] >= sum(
            each["run_again"] for each in summary["recoveries"]
        )
        begins = next(each for each in summary["events"] if "starting 3 workers on" in each)
        assert summary["events"].index(begins) < 3
        times = [float(each.split(" ")[0]) for each in summary["events"]]
        assert times == sorted(times)


def test_a_job_goes_on_when_the_agent_that_it_was_started_from_is_killed(tmp_path: Path) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        starter = leader_of(machines)  # the worst case: it leads, too
        left = [each for each in machines if each is not starter]
        with starter.run(TRAINING, tmp_path / "stop") as run:
            run.wait_for("step 5 of 3")
            starter.kill()
            assert run.finish() == 2
            assert "go on with the job" in run.text
        for machine in left:
            machine.sees(*left)
        leader = leader_of(left)
        leader.shows(lambda status: [job["node"] for job in status["jobs"]] == [leader.node])
        (tmp_path / "stop").touch()
        leader.command.wait_for("is over: exit code 0")
        log = leader.runs("logs", "sums")
        assert log.returncode == 0, log.stderr
        assert sum("counted " in line for line in log.stdout.splitlines()) == 2
        assert log.stdout.count("step 5 of 3") >= 2, "also what they wrote before"


def test_a_host_that_is_cut_off_pauses_and_comes_back_into_the_job(tmp_path: Path) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter = next(each for each in machines if each is not leader)
        with starter.run(TRAINING, tmp_path / "stop") as run:
            run.wait_for("step 5 of 3")
            leader.cut()
            leader.command.wait_for("paused: ")
            run.wait_for("of 2")
            leader.heal()
            again = len(run.lines)
            # Lines that it wrote before the cut may come now.
            mine = f" {starter.name}] "
            run.wait_for(lambda line: "of 3" in line and mine in line and line in run.lines[again:])
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
            assert check_sums(run).keys() == {each.name for each in machines}


def package(site: Path, name: str, version: str, *, module: str = "") -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if module:
        (site / f"{module}.py").touch()
        (info / "RECORD").write_text(f"{module}.py,,\n")


NAMED = """
{imports}
import potluck
ctx = potluck.init()
print("ran in a world of", ctx.world_size)
ctx.close()
"""


def script(folder: Path, imports: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(NAMED.format(imports=imports))
    return folder / "train.py"


def test_a_machine_that_can_not_run_a_script_is_left_out_and_told_with_what_to_do(
    tmp_path: Path,
) -> None:
    """Seen: one without a package failed the job, and the hint named the starter's Python. Another
    release of torch takes part, and is named."""
    site, mine, homes = tmp_path / "site", tmp_path / "mine", tmp_path / "homes"
    package(site, "torch", "1.2.3")
    package(mine, "Only-Here", "7.0", module="onlyhere")
    with (
        Network(2) as network,
        Machine(network[0], homes, PYTHONPATH=str(mine)) as ada,
        Machine(network[1], homes, PYTHONPATH=str(site)) as bob,
    ):
        form(ada, bob)
        optional = "try:\n    import onlyhere, torch\nexcept ImportError:\n    pass"
        for imports in ("import numpy", optional):
            with ada.run(script(tmp_path / "plain", imports)) as run:
                assert run.finish() == 0, run.text
                assert run.text.count("ran in a world of 2") == 2
        torch_here = importlib.metadata.version("torch").partition("+")[0]
        with ada.run(script(tmp_path / "unlike", "import torch")) as run:
            assert run.finish() == 0, run.text
            assert f"bob ({bob.id}) has torch 1.2.3, the starter {torch_here}: they" in run.text
            assert run.text.count("ran in a world of 2") == 2
        lacking = script(tmp_path / "lacking", "def f():\n    import onlyhere")
        with ada.run(lacking) as run:
            assert run.finish() == 0, run.text
            assert f"bob ({bob.id}) lacks Only-Here; there: " in run.text
            assert "starting 1 worker on ada" in run.text
            assert run.text.count("ran in a world of 1") == 1
        with ada.run("--min-nodes", "2", lacking) as run:
            assert run.finish() == 2
            assert "1 of at least 2 machines can run this job. a node can't" in run.text
        failing = script(
            tmp_path / "failing", "import importlib; importlib.import_module('onlyhere')"
        )
        with ada.run(failing) as run:
            assert run.finish() == 1
            assert "'onlyhere', which is not installed on bob (" in run.text
            assert "); there: " in run.text


@pytest.mark.long
def test_the_cut_off_half_goes_on_alone_when_it_is_told_to(tmp_path: Path) -> None:
    """Also a cluster that a passphrase and addresses make, without any multicast."""
    with cluster_of(
        2,
        tmp_path / "homes",
        psk="",
        POTLUCK_PASSPHRASE="subway useless cement misery cause lawsuit",
        POTLUCK_CLUSTER="attic",
        POTLUCK_DISCOVERY="static",
        POTLUCK_PEERS="10.88.0.1,10.88.0.2",
    ) as machines:
        form(*machines)
        leader = leader_of(machines)
        other = next(each for each in machines if each is not leader)
        with leader.run(TRAINING, tmp_path / "stop") as run:
            run.wait_for("step 5 of 2")
            other.cut()
            other.command.wait_for("paused: ")
            run.wait_for("of 1")
            told = other.runs("continue", "--alone")
            assert told.returncode == 0, told.stderr
            other.command.wait_for("leads the job from now on")
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
            assert check_sums(run).keys() == {leader.name}
            other.command.wait_for("is over: exit code 0")


def jobs_since(since: float, status: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the jobs that began after ``since`` (Unix time): a job of the test before may still
    be shown where nobody was told of its end yet."""
    return [job for job in status["jobs"] if job["started"] >= since]


def test_a_job_runs_on_all_hosts_and_leaves_nothing(trio: list[Machine], tmp_path: Path) -> None:
    _, bob, carl = trio
    summary_file, since = tmp_path / "summary.json", time.time()
    with bob.run("--json", summary_file, TRAINING, tmp_path / "stop") as run:
        run.wait_for("step 5 of 3")
        shown = carl.shows(lambda status: len(jobs_since(since, status)) == 1)
        [job] = jobs_since(since, shown)
        assert {worker["node"] for worker in job["workers"]} == {"ada", "bob", "carl"}
        assert job["job"].startswith("sums-")
        assert job["job"] in carl.runs("status").stdout
        (tmp_path / "stop").touch()
        assert run.finish() == 0, run.text
        assert check_sums(run).keys() == {"ada", "bob", "carl"}
    summary = json.loads(summary_file.read_text())
    assert [worker["finished"] for worker in summary["workers"]] == [True] * 3
    for machine in trio:
        assert machine.left_over() == [], "only the agent is left"
    carl.shows(lambda status: status["jobs"] == [])


def worker_on(machine: Machine, seer: Machine, *, since: float) -> tuple[str, int]:
    """Name and process of the worker there, of the job that began after ``since``, once ``seer``
    has been told."""

    def found(status: dict[str, Any]) -> list[tuple[str, int]]:
        return [
            (each["worker"], each["pid"])
            for job in jobs_since(since, status)
            for each in job["workers"]
            if each["node"] == machine.name and each["pid"]
        ]

    [worker] = found(seer.shows(lambda status: len(found(status)) == 1))
    return worker


def test_a_stopped_worker_is_named_by_its_own_node_and_comes_back(
    trio: list[Machine], tmp_path: Path
) -> None:
    """Its agent runs, so no heartbeat is missed; the others' deadline is 30 s."""
    leader = leader_of(trio)
    starter, other = (each for each in trio if each is not leader)
    job_since = time.time()
    with starter.run(TRAINING, tmp_path / "stop") as run:
        run.wait_for("step 5 of 3")
        worker, pid = worker_on(other, starter, since=job_since)
        since, began = run.mark, time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            named = f"worker {worker} on {other.name} stands still: its process {pid} is stopped"
            noticed = run.when(named, since=since) - began
            run.when("of 2", since=since)
        finally:
            os.kill(pid, signal.SIGCONT)
        run.when(f"worker {worker} rejoined at step", since=since)
        (tmp_path / "stop").touch()
        assert run.finish() == 0, run.text
        assert check_sums(run).keys() == {each.name for each in trio}
    print(f"\na worker of another node: SIGSTOP noticed after {noticed:.2f} s")
    assert noticed < 15.0


def test_ctrl_c_ends_the_job_everywhere(trio: list[Machine], tmp_path: Path) -> None:
    _, bob, carl = trio
    with carl.run(TRAINING, tmp_path / "stop") as run:
        run.wait_for("step 5 of 3")
        run.signal(signal.SIGINT)
        assert run.finish() == 130, run.text
    for machine in trio:
        assert machine.left_over() == []
    bob.shows(lambda status: status["jobs"] == [])


def test_a_job_runs_on_the_machines_that_are_named(trio: list[Machine], tmp_path: Path) -> None:
    ada, bob, _ = trio
    train = script(tmp_path / "plain", "import numpy")
    with ada.run("--on", f"carl,{bob.id}", train) as run:
        assert run.finish() == 0, run.text
        assert "starting 2 workers on bob, carl" in run.text or (
            "starting 2 workers on carl, bob" in run.text
        )
        assert run.text.count("ran in a world of 2") == 2
    with ada.run("--on", "attic", train) as run:
        assert run.finish() == 2
        assert "--on attic: " in run.text
        assert "The machines that are there: ada, bob, carl" in run.text
