"""Workers under limits of ``potluck up``: what they get, and how it ends if they take more."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from potluck._core.cluster.jobs import shim
from potluck._core.cluster.sharing import cgroups
from support.commands import Command, potluck_command, run_command

SEE = """
import os, resource
print("processors", sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"])
print("nice", os.nice(0))
print("private memory", resource.getrlimit(resource.RLIMIT_DATA)[1])
print("gpus", repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
with open("/proc/self/cgroup") as file:
    print("group", file.read().split())
"""
GREEDY = """
import potluck
ctx = potluck.init()
kept = []
for _ in range(64):
    kept.append(bytearray(64 << 20))
print("it got 4 GiB")
"""


@contextmanager
def agent(home: Path, *options: str) -> Iterator[Command]:
    """``potluck up`` with ``options``, alone and on the loopback."""
    variables = {
        "POTLUCK_HOME": str(home),
        "POTLUCK_DISCOVERY": "static",
        "POTLUCK_ALLOW_ROOT": "1",
        "OMP_NUM_THREADS": "",
    }
    with Command([*potluck_command(), "up", "--port", "0", *options], env=variables) as up:
        up.wait_for("members whose scripts run here")
        yield up
        assert up.process.poll() is None, up.text


def written(folder: Path, text: str) -> str:
    folder.mkdir()
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor can't be shared out")
def test_workers_get_the_part_that_the_owner_gives(tmp_path: Path) -> None:
    home, script = tmp_path / "home", written(tmp_path / "code", SEE)
    options = ("--cpus", "1", "--memory", "1GiB", "--nice", "3", "--gpus", "none")
    with agent(home, *options) as up:
        told = up.wait_for("jobs get 1 processor, 1 GiB of memory, no GPU, nice 3")
        with run_command("--workers", "2", script, POTLUCK_HOME=str(home)) as run:
            assert run.finish() == 0, run.text
            last = max(os.sched_getaffinity(0))
            niceness = os.nice(0) + 3
            assert run.text.count(f"processors [{last}] 1") == 2, run.text
            assert run.text.count(f"] nice {niceness}") == 2, run.text
            assert run.text.count("gpus ''") == 2, run.text
            if "by a control group" in told:
                assert run.text.count(f"/potluck-{up.process.pid}") == 2, run.text
            else:
                assert run.text.count(f"private memory {1 << 29}") == 2, "each half of it"
        status = [*potluck_command(), "status", "--json"]
        with Command(status, env={"POTLUCK_HOME": str(home)}) as shown:
            assert shown.finish() == 0
        [node] = json.loads(shown.text)["cluster"]["nodes"]
        assert (node["cores"], node["memory_bytes"], node["accelerators"]) == (1, 1 << 30, [])
        assert node["limits"] in told


def test_a_worker_that_takes_more_memory_than_is_given_ends_and_the_summary_says_why(
    tmp_path: Path,
) -> None:
    home, script = tmp_path / "home", written(tmp_path / "code", GREEDY)
    summary = tmp_path / "summary.json"
    with (
        agent(home, "--memory", "1GiB"),
        run_command(
            *("--max-restarts", "0", "--json", str(summary), script), POTLUCK_HOME=str(home)
        ) as run,
    ):
        assert run.finish() != 0, run.text
        assert "it got 4 GiB" not in run.text
        why = r"out of memory: the owner of this machine gives 1 GiB to all jobs"
        assert re.search(why, run.text), run.text
        [problem] = json.loads(summary.read_text())["problems"]
        assert re.search(why, problem)


def test_limits_that_this_machine_can_not_give_end_up_with_a_sentence(tmp_path: Path) -> None:
    for options, said in (
        (("--cpus", "100000"), "--cpus 100000: this machine has"),
        (("--memory", "lots"), "--memory 'lots': write a size"),
        (("--gpus", "0;1"), "--gpus '0;1': write none"),
    ):
        command = [*potluck_command(), "up", "--port", "0", *options]
        variables = {"POTLUCK_HOME": str(tmp_path), "POTLUCK_ALLOW_ROOT": "1"}
        with Command(command, env=variables | {"POTLUCK_DISCOVERY": "static"}) as up:
            assert up.finish() == 2
            assert said in up.text
            assert len(up.lines) == 1, up.text


def test_a_worker_is_in_its_control_group_before_its_script_begins(tmp_path: Path) -> None:
    """By a real group of the kernel, where this test may make one, whatever its controllers are."""
    mounted = cgroups._mounted(Path("/proc/self/mountinfo"))
    if mounted is None or not os.access(mounted, os.W_OK):
        pytest.skip("no control groups of version 2 here that may be written")
    group = mounted / f"potluck-test-{os.getpid()}"
    group.mkdir()
    try:
        limits = json.dumps({"cgroup": str(group), "nice": 1})
        look = "print(open('/proc/self/cgroup').read())"
        command = [sys.executable, "-I", "-S", shim.__file__, str(os.getpid()), limits]
        done = subprocess.run(
            [*command, sys.executable, "-c", look], capture_output=True, text=True, timeout=200
        )
        assert f"0::/{group.name}\n" in done.stdout, done
    finally:
        group.rmdir()


def test_a_worker_that_can_not_be_held_to_its_limits_does_not_run(tmp_path: Path) -> None:
    limits = json.dumps({"cgroup": str(tmp_path / "gone")})
    command = [sys.executable, "-I", "-S", shim.__file__, str(os.getpid()), limits]
    done = subprocess.run(
        [*command, sys.executable, "-c", "print('ran')"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "this worker can't be held to the owner's limits" in done.stderr
    assert done.stdout == ""


def test_variables_of_the_sender_act_after_the_limits(tmp_path: Path) -> None:
    """LD_PRELOAD would run code of the sender in whatever sets the limits or makes the sandbox:
    here in a command that stands for the sandbox."""
    outside = tmp_path / "outside"
    outside.write_text('#!/bin/sh\nenv > outside.txt\nexec "$@"\n')
    outside.chmod(0o755)
    orders = json.dumps({"nice": 1, "sandbox": [str(outside)]})
    given = {shim.GIVEN: json.dumps({"LD_LIBRARY_PATH": "/nowhere", "SENT": "1"})}
    command = [sys.executable, "-I", "-S", shim.__file__, str(os.getpid()), orders]
    look = "import os, signal; print(sorted(os.environ), signal.getsignal(signal.SIGTERM))"
    done = subprocess.run(
        [*command, sys.executable, "-c", look],
        **{"env": {"PATH": os.environ["PATH"]} | given, "cwd": tmp_path},
        **{"capture_output": True, "text": True, "timeout": 60},
    )
    assert done.returncode == 0, done
    names, _, handler = done.stdout.rpartition("] ")
    assert "'LD_LIBRARY_PATH'" in names
    assert "'SENT'" in names
    assert shim.GIVEN not in names
    assert "SIG_DFL" in handler or handler.startswith("0"), "signals work in the script"
    before = (tmp_path / "outside.txt").read_text()
    assert "\nSENT=" not in before
    assert "\nLD_LIBRARY_PATH=" not in before
