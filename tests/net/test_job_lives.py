"""Jobs outlive their terminals and machines, and their ends are told to whoever asks later."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from potluck._core.system import SIGCONT, SIGHUP, SIGKILL, SIGSTOP
from support.clusters import found_cluster
from support.commands import Command, comes_true, potluck_command
from support.hosts import Network
from support.machines import Machine, agreed, cluster_of, form, leader_of, machines, marks
from support.pages import DOCS
from support.sums import TRAINING
from support.terminal import Terminal

pytestmark = pytest.mark.needs_root_netns


def history_of(machine: Machine, *arguments: str) -> list[dict[str, Any]]:
    """``potluck jobs --json`` there."""
    done = machine.runs("jobs", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    return told


def repository(folder: Path, script: str) -> Path:
    """A git repository with ``script`` in it, and a change since its commit."""
    folder.mkdir()
    (folder / "train.py").write_text("print('before')")
    git = ["git", "-C", str(folder), "-c", "user.name=ada", "-c", "user.email=ada@home"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (folder / "train.py").write_text(script)
    return folder / "train.py"


def test_the_end_of_a_job_is_told_by_another_machine_when_starter_and_leader_are_gone(
    tmp_path: Path,
) -> None:
    failing = "import os, sys, potluck; c = potluck.init(); sys.exit(3 * (c.rank == 1))"
    script = repository(tmp_path / "code", failing)
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with starter.run("--on", f"{leader.name},{starter.name}", script) as run:
            assert run.finish() == 3, run.text
        [job] = history_of(starter)
        assert (job["state"], job["exit_code"]) == ("ended", 3)
        assert job["machine"] == starter.name
        assert set(job["machines"]) == {leader.name, starter.name}
        assert sorted(code for _, code in job["exits"]) == [0, 3]
        assert job["commit"].endswith("-dirty")
        assert len(job["commit"]) == 46
        assert history_of(other) == [job], "which had no part in it, and asked the others"

        since = other.mark
        starter.kill()
        other.sees(leader, other, since=since)  # or none of two could be a majority of three
        leader.kill()
        other.sees(other)
        assert history_of(other) == []
        unknown = other.runs("wait", job["job"])
        assert unknown.returncode == 2
        assert "no machine that is there knows a job" in unknown.stderr
        leader.start()
        leader.sees(leader, other)
        other.sees(leader, other)
        assert history_of(other) == [job], "of the disk of a machine that was down"
        waited = other.runs("wait", job["job"][:-3])
        assert waited.returncode == 3
        assert f"job {job['job']} ended with exit code 3" in waited.stdout
        assert "exited with code 3" in waited.stderr
        told = other.runs("jobs", job["job"])
        assert "worker 1: 3" in told.stdout
        assert job["package"] in told.stdout


def test_the_end_of_a_job_on_one_machine_is_on_a_second_one(tmp_path: Path) -> None:
    """Starter, leader and the only machine that runs it are one; its disk is gone."""
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        starter = leader_of([ada, bob])
        other = bob if starter is ada else ada
        with starter.run("--on", starter.name, TRAINING, tmp_path / "stop") as run:
            run.wait_for("step 3 of 1")
            [job] = history_of(other)
            assert (job["state"], job["machines"]) == ("running", [starter.name])
            late = other.runs("wait", "sums", "--timeout", "0.2")
            assert late.returncode == 2
            assert "still runs after 0.2 s" in late.stderr
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
        lacking = tmp_path / "lacking" / "train.py"
        lacking.parent.mkdir()
        lacking.write_text("import importlib; importlib.import_module('onlyhere')")
        with starter.run("--on", starter.name, lacking) as run:
            assert run.finish() == 1
            assert "'onlyhere', which is not installed" in run.text, "its last words are known"
        starter.kill()
        other.sees(other)
        _, job = history_of(other)
        assert (job["state"], job["exit_code"]) == ("ended", 0)
        assert other.runs("wait", "sums").returncode == 0


def command(machine: Machine, *arguments: str | os.PathLike[str]) -> Command:
    """``potluck ARGUMENTS`` there, started."""
    words = [*potluck_command(), *(os.fspath(each) for each in arguments)]
    return Command(machine.host.command(words), env=machine.environment)


def detached(machine: Machine, *arguments: str | os.PathLike[str]) -> str:
    """The id of a job that was started there."""
    done = machine.runs("run", "--detach", *map(os.fspath, arguments))
    assert done.returncode == 0, done.stderr
    assert f"potluck attach {done.stdout.strip()}" in done.stderr
    return done.stdout.strip()


def state_of(machine: Machine, job: str) -> str:
    [told] = history_of(machine, job)
    return str(told["state"])


def test_a_detached_job_is_attached_to_and_read_from_any_machine(tmp_path: Path) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        places = f"{leader.name},{starter.name}"
        job = detached(starter, "--on", places, TRAINING, tmp_path / "stop")
        with command(other, "attach", job) as first, command(leader, "attach", job) as second:
            first.wait_for("step 20 of 2")
            second.wait_for("step 20 of 2")
            first.signal(signal.SIGINT)
            assert first.finish() == 0
            assert "detached; the job goes on" in first.text
            with command(other, "logs", "-f", job) as follower:
                follower.wait_for("step 5 of 2")
                follower.wait_for("starting 2 workers on")
                (tmp_path / "stop").touch()
                assert follower.finish() == 0
                assert follower.text.count("counted ") == 2
            assert second.finish() == 0, second.text
            assert second.text.count("counted ") == 2
            assert "committed steps" in second.text, "the summary"
        assert other.runs("wait", job).returncode == 0

        whole = other.runs("logs", job)
        assert whole.returncode == 0, whole.stderr
        assert "not kept" not in whole.stdout
        objects = other.runs("logs", "--json", job).stdout
        lines = [json.loads(text) for text in objects.splitlines()]
        assert {each["rank"] for each in lines} == {None, 0, 1}
        assert not any(each["missed"] for each in lines)
        only = starter.runs("logs", "--rank", "1", job).stdout
        assert {line.split(" ")[0] for line in only.splitlines()} == {"[1"}
        assert starter.runs("logs", "--since", "0s", job).stdout == ""
        leader.kill()
        starter.kill()
        other.sees(other)
        gone = other.runs("logs", job)
        assert gone.returncode == 2
        starter.start()
        for machine in (starter, other):
            machine.sees(starter, other)
        again = other.runs("logs", job)
        assert sorted(again.stdout.splitlines()) == sorted(whole.stdout.splitlines()), (
            "one of two machines has all of it"
        )

        for words, says in (
            (("logs", job, "--rank", "7"), "has lines of no rank 7; of ranks: 0, 1"),
            (("logs", job, "--since", "soon"), "--since 'soon': write 90s, 10m, 2h"),
            (("logs", "nothing"), "knows a job 'nothing'"),
            (("attach", job), f"job {job} does not run: `potluck jobs {job}` shows how it ended"),
            (("run", "--detach", "--json", "-", os.fspath(TRAINING)), "--detach returns before"),
        ):
            refused = other.runs(*words)
            assert refused.returncode == 2
            assert says in refused.stderr


def test_a_job_goes_on_when_its_command_is_killed_or_its_terminal_closed(tmp_path: Path) -> None:
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        for number in (SIGKILL, SIGHUP):
            stop = tmp_path / f"stop-{number}"
            with ada.run(TRAINING, stop) as run:
                run.wait_for("step 5 of 2")
                job = next(each["job"] for each in history_of(ada) if each["state"] == "running")
                run.signal(number)
                run.finish()
            assert state_of(bob, job) == "running"
            with command(bob, "attach", job) as attached:
                attached.wait_for("step 2")
                stop.touch()
                assert attached.finish() == 0, attached.text

        stop, words = tmp_path / "stop-terminal", [*potluck_command(), "run", os.fspath(TRAINING)]
        variables = [f"{name}={value}" for name, value in ada.environment.items()]
        shell = ada.host.command(["env", *variables, *words, os.fspath(stop)])
        with Terminal(*shell) as terminal:
            terminal.read_until(lambda drawn: "step 5 of 2" in drawn)
            job = next(each["job"] for each in history_of(ada) if each["state"] == "running")
            terminal.hang_up()
            terminal.wait()
        assert state_of(bob, job) == "running"
        stop.touch()
        assert bob.runs("wait", job).returncode == 0

        with ada.run("--on-hangup", "end", TRAINING, tmp_path / "never") as run:
            run.wait_for("step 5 of 2")
            job = next(each["job"] for each in history_of(ada) if each["state"] == "running")
            run.signal(SIGKILL)
        assert bob.runs("wait", job).returncode == 128 + SIGHUP


def test_a_job_goes_on_without_the_agent_of_its_starter_and_tells_it_later(tmp_path: Path) -> None:
    """The starter trains, too; its agent is killed and comes back."""
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        starter = leader_of(machines)
        left = [each for each in machines if each is not starter]
        job = detached(starter, TRAINING, tmp_path / "stop")
        with command(left[0], "attach", job) as attached:
            attached.wait_for("step 5 of 3")
            starter.kill()
            attached.wait_for("of 2")
            (tmp_path / "stop").touch()
            assert attached.finish() == 0, attached.text
            assert attached.text.count("counted ") == 2
        starter.start()
        starter.sees(*machines)
        waited = starter.runs("wait", job)
        assert waited.returncode == 0, waited.stderr
        told = starter.runs("logs", job)
        assert told.stdout.count("counted ") == 2
        assert "not kept" not in told.stdout


CHATTY = """
import pathlib, sys, time, potluck
ctx = potluck.init()
for number in range(20_000):
    print(f"line {number} of rank {ctx.rank} " + "x" * 200, flush=number % 100 == 0)
pathlib.Path(sys.argv[1] + str(ctx.rank)).touch()
ctx.close()
"""


PRINTS = """
import os, pathlib, potluck, sys, time
ctx = potluck.init()
print("is here", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
for number in range(100):
    print(f"line {number} " + "x" * 1_000)
ctx.close()
"""


def test_a_full_disk_costs_a_running_job_nothing_and_the_next_that_machine(tmp_path: Path) -> None:
    script, go, full = tmp_path / "code" / "train.py", tmp_path / "go", tmp_path / "homes" / "bob"
    script.parent.mkdir()
    script.write_text(PRINTS)
    full.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m,mode=700", "none", full], check=True)
    try:
        with cluster_of(2, tmp_path / "homes") as (ada, bob):
            form(ada, bob)
            with ada.run(script, go) as run:
                run.wait_for("bob] is here")
                bob.command.wait_for("hold its state")  # no view changes until its end
                with contextlib.suppress(OSError), (full / "much").open("wb", 0) as file:
                    while file.write(bytes(4096)):
                        pass
                go.touch()
                assert run.finish() == 0, run.text
            told = ada.runs("logs", "train").stdout
            assert (told.count(" ada] line "), told.count(" bob] line ")) == (100, 100)
            assert state_of(ada, "train") == "ended"
            alone = ada.runs("run", str(script), str(go))
            assert alone.returncode == 0, alone.stdout + alone.stderr
            assert alone.stdout.count(" ada] line ") == 100
            since = marks([ada, bob])
            with contextlib.suppress(ProcessLookupError):  # it may have ended, and left the view
                bob.kill()
            bob.pid = 0
            (full / "much").unlink()
            bob.start()
            agreed(ada, bob, since=since)
            again = ada.runs("run", "--min-nodes", "2", str(script), str(go))
            assert again.stdout.count(" bob] line ") == 100, again.stdout + again.stderr
    finally:
        subprocess.run(["umount", "-l", full], check=True)


def test_a_stopped_reader_is_behind_stops_no_worker_and_misses_nothing(tmp_path: Path) -> None:
    """Nor does a signal that its terminal has gone end an agent in the background."""
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(CHATTY)
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        ada.signal(SIGHUP)
        bob.signal(SIGHUP)
        with ada.run("--plain", script, tmp_path / "done") as run:
            run.wait_for("line 0 of rank")
            run.process.send_signal(SIGSTOP)
            assert comes_true(lambda: len(list(tmp_path.glob("done?"))) == 2)
            run.process.send_signal(SIGCONT)
            assert run.finish() == 0, run.text[-3000:]
            for rank in (0, 1):
                mine = [line for line in run.lines if f" of rank {rank} " in line]
                numbers = [int(line.split("line ")[1].split(" ")[0]) for line in mine]
                assert numbers == list(range(20_000))


def test_a_job_is_cancelled_by_whom_it_concerns_and_run_again_by_its_starter(
    tmp_path: Path,
) -> None:
    homes = [tmp_path / "homes" / name for name in ("ada", "bob", "carl")]
    found_cluster(*homes)
    with Network(3) as network, machines(network, tmp_path / "homes", psk="") as (ada, bob, carl):
        form(ada, bob, carl)
        job = detached(bob, TRAINING, tmp_path / "stop")
        with command(ada, "attach", job) as attached:
            attached.wait_for("step 5 of 3")
            refused = carl.runs("cancel", job)
            assert refused.returncode == 2
            assert f"job {job}, started on bob, is not cancelled: it is cancelled on the" in (
                " ".join(refused.stderr.split())
            )
            done = ada.runs("cancel", job[:-2])  # the admin
            assert done.returncode == 0, done.stderr
            assert attached.finish() == 143, attached.text
            assert "cancelled by ada" in attached.text
        waited = carl.runs("wait", job)
        assert waited.returncode == 143
        again = bob.runs("cancel", job)
        assert again.returncode == 2
        assert "ended with exit code 143: there is nothing to cancel" in again.stderr

        elsewhere = carl.runs("rerun", job)
        assert elsewhere.returncode == 2
        assert "was started on bob, and runs in that machine's name only" in elsewhere.stderr
        (tmp_path / "stop").touch()
        rerun = bob.runs("rerun", "--plain", job)
        assert rerun.returncode == 0, rerun.stdout + rerun.stderr
        assert rerun.stdout.count("counted ") == 3
        first, second = history_of(bob)
        assert {first["job"], second["job"]} > {job}
        assert first["package"] == second["package"]
        ambiguous = carl.runs("wait", "sums-")
        assert ambiguous.returncode == 2
        assert "'sums-' is the beginning of 2 jobs: " in ambiguous.stderr

        (tmp_path / "stop").unlink()
        third = detached(bob, TRAINING, tmp_path / "stop")
        variables = [f"{name}={value}" for name, value in bob.environment.items()]
        words = ["env", *variables, *potluck_command(), "attach", third]
        with Terminal(*bob.host.command(words)) as terminal:
            terminal.read_until(lambda drawn: " of 3" in drawn)
            terminal.type("\x03")
            terminal.read_until(lambda drawn: "Ctrl-C again now to cancel it" in drawn)
            terminal.type("\x03")
            terminal.read_until(lambda drawn: f"Cancel job {third}?" in drawn)
            terminal.type("y\n")
            assert terminal.finish() == 143, terminal.text
        assert carl.runs("wait", third).returncode == 143


ESCAPES = """
import potluck
ctx = potluck.init()
print("\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m and back")
ctx.close()
"""


def test_a_log_line_that_is_an_escape_sequence_obeys_no_terminal(tmp_path: Path) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(ESCAPES)
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        job = detached(ada, "--nodes", "1", script)
        assert ada.runs("wait", job).returncode == 0
        for machine in (ada, bob):
            stored = [
                path.read_bytes() for path in (machine.home / "code_store" / "jobs").rglob("*.log")
            ]
            assert any(b"owned" in data for data in stored), "on both machines"
            assert not any(b"\x1b]" in data or b"\\u001b]" in data for data in stored)
            shown = machine.runs("logs", job).stdout
            assert r"\x1b]0;owned\x07\x1b[2J" in shown
            assert "red and back" in shown
            assert "\x1b]" not in shown


PAGE = (DOCS / "jobs.md").read_text()


def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    """Those behind ``desk$``, in their order, with the id of the job that is started."""
    commands = re.findall(r"^desk\$ potluck (.*)$", PAGE, re.MULTILINE)
    assert len(commands) >= 7
    script = tmp_path / "code" / "train.py"
    shutil.copytree(TRAINING.parent, script.parent)
    shutil.copy(TRAINING, script)
    job = ""
    with cluster_of(2, tmp_path / "homes") as (desk, laptop):
        form(desk, laptop)
        for text in commands:
            words = text.replace("train.py", f"{script} {tmp_path / 'never'}").split()
            words = [re.sub(r"^train-\w+$", job[:-1], word) for word in words]
            if words[0] in ("logs", "attach"):  # that go on until somebody leaves
                with command(laptop, *words) as shown:
                    shown.wait_for(" of 2")
                    shown.signal(signal.SIGINT)
                    shown.finish()
                continue
            done = desk.runs(*words)
            assert done.returncode == (143 if words[0] == "wait" else 0), (words, done.stderr)
            if "--detach" in words:
                job = done.stdout.strip()
                assert re.fullmatch(r"train-[0-9a-f]{8}", job), "only the id"
        assert desk.runs("cancel", "--kill", job).returncode == 0
        assert laptop.runs("wait", job).returncode != 0
