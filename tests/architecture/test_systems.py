"""potluck imports on macOS and Windows, and says on Windows what can't work there.

A process that lacks what the other system lacks stands for that system: its Python would do
other things inside, so this shows potluck's own branches and no more (docs/portability.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def on(system: str, then: str = "") -> subprocess.CompletedProcess[str]:
    script = OTHER.replace("%s", system) + then
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_every_module_imports(system: str) -> None:
    run = on(system)
    assert run.returncode == 0, run.stderr


def test_a_command_that_windows_has_no_means_for_says_so_and_doctor_runs() -> None:
    asked = """
from potluck.cli.main import app
run = typer.testing.CliRunner().invoke(app, ["run", "train.py"])
print(run.exit_code, run.stderr)
run = typer.testing.CliRunner().invoke(app, ["doctor"])
print(run.exit_code)
"""
    run = on("win32", asked)
    assert run.returncode == 0, run.stderr
    first, *_, last = run.stdout.splitlines()
    assert first.startswith("2 potluck: potluck run does not work on Windows: potluck needs POSIX")
    assert "WSL 2" in first
    assert last == "0"


def test_waiting_for_a_socket_works_with_select_alone() -> None:
    asked = """
from potluck._core.system import wait_ready
one, other = socket.socketpair(socket.AddressFamily(1))  # AF_UNIX, hidden above
assert not wait_ready(one.fileno(), write=False, timeout_s=0.01)
assert wait_ready(one.fileno(), write=True, timeout_s=10.0)
other.send(b"x")
assert wait_ready(one.fileno(), write=False, timeout_s=10.0)
"""
    run = on("win32", asked)
    assert run.returncode == 0, run.stderr


def test_a_key_is_not_read_where_its_owner_is_not_known(tmp_path: Path) -> None:
    asked = f"""
import pathlib
from potluck._core.cluster.home.keyfile import read_private
read_private(pathlib.Path({str(tmp_path)!r}, "key"), "the key")
"""
    run = on("win32", asked)
    assert "ConfigurationError: a file that only its owner can read does not work on Windows" in (
        run.stderr
    )
