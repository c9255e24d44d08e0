"""Jobs that wait for machines: begun in turn, under whichever leader, once."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from potluck._core.cluster.content.shelf import Shelf
from support.clusters import found_cluster
from support.commands import Command, comes_true
from support.machines import PSK, Machine, agreed, cluster_of, form, leader_of, marks
from support.sums import TRAINING

pytestmark = pytest.mark.needs_root_netns

RAN = """
import os, pathlib, potluck, sys
ctx = potluck.init()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.environ['POTLUCK_NAME']} {ctx.world_size} {len(os.sched_getaffinity(0))}\\n")
ctx.close()
"""
WAITING = """
import os, pathlib, potluck, sys, time
ctx = potluck.init()
print("has", len(os.sched_getaffinity(0)), flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
ctx.close()
"""


def states(machine: Machine) -> dict[str, str]:
    """By job: its state, and why."""
    done = machine.runs("jobs", "--json")
    found: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    return {each["job"].partition("-")[0]: f"{each['state']} {each['problem']}" for each in found}


def script(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


def code_at(machine: Machine) -> set[str]:
    """The files of all packages of code that lie there whole."""
    shelf = Shelf(machine.home / "content" / "code")
    found = [package for kept in shelf.packages() if (package := shelf.package(kept.package))]
    whole = [each for each in found if all(map(shelf.has, each.contents))]
    return {file.path for each in whole for file in each.manifest.files}


def is_waiting(run: Command, reason: str) -> None:
    run.wait_for(lambda line: " waits: it needs " in line and reason in line)


def test_a_job_waits_for_machines_and_begins_when_they_are_free(tmp_path: Path) -> None:
    long = script(tmp_path / "long", "long", WAITING)
    short = script(tmp_path / "short", "short", RAN)
    stop, ran = tmp_path / "stop", tmp_path / "ran"
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        with ada.run(long, stop) as first:
            first.wait_for("has")
            refused = bob.runs("run", "--now", str(short), str(ran))
            assert refused.returncode == 2
            assert "it can't start now: it needs 1 machine, 0 are free; ada's long-" in (
                refused.stderr
            )
            with bob.run(short, ran) as second:
                is_waiting(second, "ada's long-")
                assert states(ada)["short"].startswith("queued it needs 1 machine, 0 are free")
                assert states(ada)["long"].startswith("running")
                with ada.run("--priority", "5", short, ran, "urgent") as third:
                    is_waiting(third, "ada's long-")
                    third.process.send_signal(signal.SIGINT)
                    assert third.finish() == 130, third.text
                assert not ran.exists()
                stop.touch()
                assert first.finish() == 0, first.text
                assert second.finish() == 0, second.text
        assert len(ran.read_text().splitlines()) == 2
        assert comes_true(lambda: states(bob)["short"].startswith("ended"), 10)


def test_small_jobs_share_a_machine_and_each_has_its_cores(tmp_path: Path) -> None:
    job = script(tmp_path / "job", "small", WAITING)
    stop = tmp_path / "stop"
    part = ("--cores", "1", "--min-nodes", "1", "--nodes", "1")
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        with ada.run(*part, job, stop) as one, ada.run(*part, job, stop) as two:
            assert one.wait_for("has") == "[0 ada] has 1"
            assert two.wait_for("has") == "[0 ada] has 1"
            with bob.run("--min-nodes", "2", job, stop) as whole:
                is_waiting(whole, "2 machines, 1 is free")
                stop.touch()
                assert [each.finish() for each in (one, two, whole)] == [0, 0, 0]


TURNS = """
import os, potluck, sys
with potluck.init() as ctx:
    if ctx.rank == 0:
        for word in ("begins", "ends"):
            with open(sys.argv[1], "a") as file:
                file.write(f"{os.environ['POTLUCK_JOB']} {word} on {ctx.world_size}\\n")
    ctx.barrier()
"""


def test_two_persons_start_jobs_at_once_and_have_their_turns(tmp_path: Path) -> None:
    job, turns = script(tmp_path / "job", "turns", TURNS), tmp_path / "turns"
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        with ada.run(job, turns) as one, bob.run(job, turns) as two:
            assert [each.finish() for each in (one, two)] == [0, 0], one.text + two.text
        first, again, second, last = (line.split(" ", 1) for line in turns.read_text().splitlines())
        assert first[1] == second[1] == "begins on 2"
        assert first[0] == again[0] != second[0] == last[0]


def test_a_job_that_waits_begins_once_under_the_next_leader(tmp_path: Path) -> None:
    short = script(tmp_path / "short", "short", RAN)
    ran = tmp_path / "ran"
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        only = f"{starter.name},{other.name}"
        with other.run("--on", only, TRAINING, tmp_path / "stop") as first:
            first.wait_for("step 5 of 2")
            with starter.run("--on", only, short, ran) as second:
                is_waiting(second, f"{other.name}'s ")
                leader.kill()
                starter.sees(starter, other)
                again = len(first.lines)
                first.wait_for(lambda line: "of 2" in line and line in first.lines[again:])
                assert not ran.exists()
                (tmp_path / "stop").touch()
                assert first.finish() == 0, first.text
                assert second.finish() == 0, second.text
        assert sorted(line.split()[0] for line in ran.read_text().splitlines()) == sorted(
            [starter.name, other.name]
        )


def test_a_job_that_waits_outlives_its_starter_and_its_leader_with_its_code(tmp_path: Path) -> None:
    short = script(tmp_path / "short", "short", RAN)
    long = script(tmp_path / "long", "long", WAITING)
    stop, ran = tmp_path / "stop", tmp_path / "ran"
    with cluster_of(4, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, runner, last = (each for each in machines if each is not leader)
        with runner.run("--on", runner.name, long, stop) as first:
            first.wait_for("has")
            done = starter.runs("run", "--detach", "--on", runner.name, str(short), str(ran))
            assert done.returncode == 0, done.stderr
            starter.kill()
            runner.sees(leader, runner, last)
            # The next in seniority fetches it from the leader; then either may go.
            assert comes_true(lambda: "short.py" in code_at(runner) | code_at(last), 20)
            shutil.rmtree(starter.home / "content")
            shutil.rmtree(starter.home / "code_store")
            leader.kill()
            runner.sees(runner, last)
            assert not ran.exists()
            reason = "queued it needs 1 machine, 0 are free"
            assert comes_true(lambda: states(last).get("short", "").startswith(reason), 20)
            stop.touch()
            assert first.finish() == 0, first.text
        job = done.stdout.strip()
        assert last.runs("wait", job).returncode == 0
        assert [line.split()[0] for line in ran.read_text().splitlines()] == [runner.name]


def test_a_machine_that_boots_alone_begins_nothing_that_waits(tmp_path: Path) -> None:
    short = script(tmp_path / "short", "short", RAN)
    long = script(tmp_path / "long", "long", WAITING)
    stop, ran = tmp_path / "stop", tmp_path / "ran"
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, runner = (each for each in machines if each is not leader)
        first = starter.runs("run", "--detach", "--on", runner.name, str(long), str(stop))
        assert first.returncode == 0, first.stderr
        second = starter.runs("run", "--detach", "--on", runner.name, str(short), str(ran))
        assert second.returncode == 0, second.stderr
        assert comes_true(lambda: states(runner).get("short", "").startswith("queued"), 20)
        runner.kill()
        leader.sees(leader, starter)
        runner.cut()
        runner.start()
        runner.sees(runner)
        assert not states(runner).get("short", "lost").startswith(("ended", "running"))
        waits = comes_true(lambda: states(leader).get("short", "").startswith("queued"), 20)
        assert waits, "it is not over for the others"
        runner.heal()
        agreed(*machines)
        assert starter.runs("cancel", "--kill", first.stdout.strip()).returncode == 0
        job = second.stdout.strip()
        assert leader.runs("wait", job).returncode == 0
        assert [line.split()[0] for line in ran.read_text().splitlines()] == [runner.name]


def test_a_job_ends_when_its_time_is_over(tmp_path: Path) -> None:
    job = script(tmp_path / "job", "long", WAITING)
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        with ada.run("--time", "3s", job, tmp_path / "stop") as run:
            run.wait_for("as long as it may by its --time")
            assert run.finish() == 143, run.text


def test_a_job_of_a_banned_machine_that_waits_in_the_queue_never_begins(tmp_path: Path) -> None:
    """Also not under the next leader, which has it on its disk, and although its code is there."""
    loot = tmp_path / "loot"
    steal = script(tmp_path / "steal", "steal", f"open({str(loot)!r}, 'w').write('here')")
    long = script(tmp_path / "long", "long", WAITING)
    stop = tmp_path / "stop"
    with cluster_of(3, tmp_path / "homes", psk="") as machines:
        found_cluster(*(each.home for each in machines), psk=bytes.fromhex(PSK))
        form(*machines)
        leader, founder = leader_of(machines), machines[0]
        thief = next(each for each in machines if each not in (leader, founder))
        [other] = (each for each in machines if each not in (leader, thief))
        only = f"{leader.name},{other.name}"
        with other.run("--on", only, long, stop) as first:
            first.wait_for("has")
            with thief.run("--on", only, steal) as waiting:
                is_waiting(waiting, f"{other.name}'s long-")
                since = marks([leader, other])
                assert founder.runs("ban", thief.name, "--yes").returncode == 0
                agreed(leader, other, since=since)
                assert comes_true(lambda: "steal" not in str(states(other)), 20), states(other)
                leader.kill()
                other.sees(other)
                stop.touch()
                assert first.finish() == 0, first.text
        leader.start()
        agreed(leader, other)
        assert other.runs("run", "--min-nodes", "2", str(long), str(stop)).returncode == 0
        assert not loot.exists(), "and the queue has moved on"
