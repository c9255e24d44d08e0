"""Workers that are forked from a process with torch are what executed workers are to an agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.quiet_imports import ZYGOTE
from support.zygote import Forked, Zygote, popen

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

pytestmark = [
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
    return popen(
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
    zygote: Zygote, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygote.path))
    monkeypatch.setenv("ONLY_HERE", "1")
    worker = start(script, "end")
    assert isinstance(worker, Forked)
    out, err = read(worker)
    assert out == (
        f"__main__ ['{script}', 'end'] {script.parent} yes True\nTrue None {script.parent}\n"
    )
    assert err == ""
    assert worker.wait() == 7


def test_an_error_of_the_script_is_shown_as_python_shows_it(
    zygote: Zygote, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygote.path))
    worker = start(script, "raise")
    own = subprocess.run(
        [sys.executable, str(script), "raise"],
        capture_output=True,
        text=True,
        env=os.environ | {"ASKED": "yes"},
    )
    assert read(worker)[1] == own.stderr
    assert worker.wait() == own.returncode == 1


def test_a_worker_can_be_killed_at_once_with_its_group(
    zygote: Zygote, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygote.path))
    workers = [start(script, "wait") for _ in range(20)]
    for worker in workers:
        os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        assert worker.wait() == -signal.SIGKILL
        read(worker)


def test_a_worker_ends_with_its_agent(
    zygote: Zygote, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygote.path))
    worker = start(script, "wait")
    worker.stdout.read(8)
    worker._socket.close()  # what the end of an agent's process does
    read(worker)  # until the pipes' other ends are closed


@pytest.mark.parametrize("orders", ['{"nice": 5}', '{"sandbox": ["bwrap"]}'])
def test_a_worker_with_limits_is_executed(
    orders: str, zygote: Zygote, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE, str(zygote.path))
    worker = start(script, "end", orders=orders)
    assert isinstance(worker, subprocess.Popen)
    read(worker)
    worker.wait()
