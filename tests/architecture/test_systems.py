"""potluck imports on macOS and Windows, and says on Windows what can't work there.

A process that lacks what the other system lacks stands for that system: its Python would do
other things inside, so this shows potluck's own branches and no more (docs/portability.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

OTHER = """
import asyncio, importlib.metadata, multiprocessing, os, select, signal, socket, sys
import numpy, psutil, prometheus_client, rich.console, rich.live
import cryptography.x509, ml_dtypes, msgspec, safetensors.numpy, spake2, typer.testing, zeroconf
import zeroconf.asyncio
from pydantic import AfterValidator, TypeAdapter  # typer loads these when it reads arguments
from cryptography.hazmat.primitives.asymmetric import ed25519

lacking = {
    os: ["memfd_create", "sched_getaffinity", "pidfd_open", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"],
}
if "%s" == "win32":
    lacking[os] += ["killpg", "geteuid", "waitid", "sysconf", "getloadavg", "O_NONBLOCK"]
    lacking[signal] = ["SIGHUP", "SIGKILL", "SIGPIPE", "SIGCONT", "SIGSTOP"]
    lacking[select] = ["poll", "epoll"]
    lacking[socket] = ["AF_UNIX"]
    sys.modules["fcntl"] = None
for module, names in lacking.items():
    for name in names:
        delattr(module, name)
sys.platform = "%s"

BORROWED = ("torch", "mlx", "mpi4py", "sklearn")  # they look at sys.platform themselves
sys.modules |= dict.fromkeys(BORROWED)

from pathlib import Path
import potluck
root = Path(potluck.__file__).parent
for path in sorted(root.rglob("*.py")):
    if path.name != "shim.py":  # a script
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        try:
            importlib.import_module(module)
        except ImportError as error:
            cause = error.__cause__ or error
            assert isinstance(cause, ImportError) and cause.name.split(".")[0] in BORROWED, module
"""


WINDOWS = """
import json, pathlib
from potluck._core.cluster.home.keyfile import read_private
from potluck._core.system import wait_ready
from potluck.cli.main import app
from potluck.errors import ConfigurationError

def command(*words):
    run = typer.testing.CliRunner().invoke(app, words)
    return run.exit_code, run.stderr

def waited():
    one, other = socket.socketpair(socket.AddressFamily(1))  # AF_UNIX, hidden above
    yield wait_ready(one.fileno(), write=False, timeout_s=0.01)
    yield wait_ready(one.fileno(), write=True, timeout_s=10.0)
    other.send(b"x")
    yield wait_ready(one.fileno(), write=False, timeout_s=10.0)

def refusal():
    try:
        read_private(pathlib.Path("key"), "the key")
    except ConfigurationError as error:
        return str(error)

found = {"run": command("run", "train.py"), "doctor": command("doctor")}
print(json.dumps(found | {"waited": list(waited()), "refusal": refusal()}))
"""


def on(system: str, then: str = "") -> subprocess.CompletedProcess[str]:
    script = OTHER.replace("%s", system) + then
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )


@pytest.fixture(scope="module")
def windows() -> dict[str, Any]:
    """What one process did that lacks what Windows lacks."""
    run = on("win32", WINDOWS)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_every_module_imports_on_darwin() -> None:
    run = on("darwin")
    assert run.returncode == 0, run.stderr


def test_every_module_imports_on_windows(windows: dict[str, Any]) -> None:
    assert windows


def test_a_command_that_windows_has_no_means_for_says_so_and_doctor_runs(
    windows: dict[str, Any],
) -> None:
    code, text = windows["run"]
    assert code == 2
    assert text.startswith("potluck: potluck run does not work on Windows: potluck needs POSIX")
    assert "WSL 2" in text.splitlines()[0]
    assert windows["doctor"][0] == 0


def test_waiting_for_a_socket_works_with_select_alone(windows: dict[str, Any]) -> None:
    assert windows["waited"] == [False, True, True]


def test_a_key_is_not_read_where_its_owner_is_not_known(windows: dict[str, Any]) -> None:
    assert windows["refusal"].startswith(
        "a file that only its owner can read does not work on Windows"
    )
