"""Processes that are forked from one with torch are what executed ones are."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.commands import process_ends
from support.forked import Popen
from support.quiet_imports import ZYGOTE

SCRIPT = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["ASKED"], "torch" in sys.modules)
print(os.getpid() == os.getpgid(0) == os.getsid(0), os.environ.get("ONLY_HERE"), sys.path[0])
sys.stdout.flush()
if sys.argv[1] == "raise":
    raise ValueError("a mistake")
if sys.argv[1] == "wait":
    import signal
    signal.pause()
sys.exit(7)
"""

ENDING = """
import atexit, os, sys, threading, time

class Kept:
    def __del__(self, write=os.write):
        write(1, b"apart\\n")

kept = Kept()
import potluck, torch
potluck.kept_by_test = Kept()
atexit.register(print, "exits")
threading.Thread(target=lambda: [time.sleep(0.1), print("through")]).start()
"""

pytestmark = [
    pytest.mark.costly,  # a zygote imports torch, and another the command line
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces and PDEATHSIG are Linux's"),
    pytest.mark.skipif(find_spec("torch") is None, reason="the zygote imports torch"),
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(script: Path, *words: str, orders: str = "{}", **options: Any) -> Any:
    shim = [sys.executable, "-I", "-S", "shim.py", "1", orders]
    environment = {k: v for k, v in os.environ.items() if k != "ONLY_HERE"}
    return Popen(
        [*shim, sys.executable, str(script), *words],
        env=environment | {"ASKED": "yes", "POTLUCK_GIVEN": "{}"},
        cwd=script.parent,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        | options,
        start_new_session=True,
    )


def read(worker: Any) -> tuple[str, str]:
    with worker.stdout, worker.stderr:
        return worker.stdout.read().decode(), worker.stderr.read().decode()


def test_a_forked_worker_is_the_script_with_its_own_session_and_environment(
    zygotes: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygotes))
    monkeypatch.setenv("ONLY_HERE", "1")
    worker = start(script, "end")
    assert worker.is_forked
    out, err = read(worker)
    assert out == (
        f"__main__ ['{script}', 'end'] {script.parent} yes True\nTrue None {script.parent}\n"
    )
    assert err == ""
    assert worker.wait() == 7


def test_an_error_of_the_script_is_shown_as_python_shows_it(
    zygotes: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygotes))
    worker = start(script, "raise")
    own = subprocess.run(
        [sys.executable, str(script), "raise"],
        capture_output=True,
        text=True,
        env=os.environ | {"ASKED": "yes"},
    )
    assert read(worker)[1] == own.stderr
    assert worker.wait() == own.returncode == 1


@pytest.mark.parametrize(("rank", "last"), [("0", "apart\n" * 2), ("1", "")])
def test_of_a_world_rank_0_takes_its_modules_apart_and_all_end_alike_else(
    rank: str, last: str, zygotes: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygotes))
    monkeypatch.setenv("RANK", rank)
    for ending, code, said in (("sys.exit(7)", 7, ""), ("1 / 0", 1, "ZeroDivision"), ("0", 0, "")):
        script.write_text(ENDING + ending)
        worker = start(script)
        out, err = read(worker)
        assert (out, worker.wait()) == (f"through\nexits\n{last}", code)
        assert said in err


def test_a_worker_that_has_ended_can_be_opened_until_somebody_waits_for_it(
    zygotes: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any child. Else the agent would take the end of a quick script for a fault of its own."""
    monkeypatch.setenv(ZYGOTE, str(zygotes))
    worker = start(script, "end")
    read(worker)
    assert process_ends(worker.pid)
    os.close(os.pidfd_open(worker.pid))
    assert worker.wait() == 7


def test_a_worker_can_be_killed_at_once_with_its_group(
    zygotes: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygotes))
    workers = [start(script, "wait") for _ in range(20)]
    for worker in workers:
        os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        assert worker.wait() == -signal.SIGKILL
        read(worker)


def test_a_worker_ends_with_its_agent(
    zygotes: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygotes))
    worker = start(script, "wait")
    worker.stdout.read(8)
    worker._socket.shutdown(socket.SHUT_WR)  # what the end of an agent's process does
    assert worker.wait() == -signal.SIGKILL
    read(worker)


@pytest.mark.parametrize("orders", ['{"nice": 5}', '{"sandbox": ["bwrap"]}'])
def test_a_worker_with_limits_is_executed(
    orders: str, zygotes: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygotes))
    worker = start(script, "end", orders=orders)
    assert not worker.is_forked
    read(worker)
    worker.wait()


def test_what_a_test_starts_is_what_python_runs(
    zygotes: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts, texts and modules, with options, input, limits, ignored signals and a directory."""
    (script.parent / "module.py").write_text("import asked")
    (script.parent / "asked.py").write_text(ASKED)
    monkeypatch.setenv("PYTHONPATH", str(script.parent / "path"))
    python = [sys.executable]
    commands: list[list[str]] = [
        [*python, str(script.parent / "asked.py"), "one", "two"],
        [*python, "-W", "ignore", "-u", "asked.py"],
        [*python, "-c", ASKED, "-c"],
        [*python, "-m", "module", "word"],
        [*python, "-c", "1 / 0"],
        [*python, "-c", "def"],
        [*python, "-m", "missing"],
        [*python, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
        [*python, "-c", "raise KeyboardInterrupt"],
        [*python, "-c", "import atexit; atexit.register(print, 'last'); raise SystemExit('words')"],
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN), os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        executed = [outcome_of(command, script.parent, is_forked=False) for command in commands]
        monkeypatch.setenv(ZYGOTE, str(zygotes))
        forked = [outcome_of(command, script.parent, is_forked=True) for command in commands]
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        os.umask(before[1])
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    for command, one, other in zip(commands, executed, forked, strict=True):
        assert one == other, command


ASKED = """
import os, resource, signal, sys, __main__
limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
ignored = [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
print(__name__, sorted(__main__.__dict__), sys.argv, sys.orig_argv, sys.path, os.getcwd())
print(sys.warnoptions, sys.stdin.read(), sys.stdout.line_buffering, sys.stdout.write_through)
print([each.encoding + each.errors for each in (sys.stdin, sys.stdout, sys.stderr)])
print(ignored, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD))
print(signal.pthread_sigmask(0, []), os.nice(0), os.sched_getaffinity(0), oct(os.umask(0)))
print([resource.getrlimit(limit) for limit in limits], os.listdir("/proc/self/fd"))
print(os.getpid() == os.getsid(0) == os.getpgid(0), open("/proc/self/cgroup").read())
print(sorted(os.environ.items()), file=sys.stderr)
"""


def outcome_of(command: list[str], folder: Path, *, is_forked: bool) -> tuple[int, str, str]:
    with Popen(
        command,
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != ZYGOTE} | {"ASKED": "yes"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        out, err = process.communicate("what it reads", timeout=100)
    assert process.is_forked == is_forked
    return process.returncode, out, err
