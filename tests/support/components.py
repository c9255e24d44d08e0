"""What tests/components needs beside the development environment: programs of the system, and
packages in environments of their own below build/components, made once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from potluck._core.system import is_root

ROOT = Path(__file__).parents[2]
_INSTALL_S = 1200


def program(name: str, package: str) -> str:
    """The path of the program ``name``. Without it, Debian's ``package`` is installed, where that
    can be done without asking (root and apt); else the test skips, and says why."""
    found = shutil.which(name)
    if found is None and is_root() and shutil.which("apt-get"):
        command = ["apt-get", "-qq", "install", "--no-install-recommends", "-y", package]
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        for each in (["apt-get", "-qq", "update"], command):
            subprocess.run(each, env=quiet, capture_output=True, timeout=_INSTALL_S)
        found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here: apt-get install {package}")
    return found


def environment(name: str, *packages: str) -> Path:
    """The Python of an environment that has ``packages`` and all that this one has, potluck among
    it, which stays as it is. If they can't be installed the test skips, and says why."""
    folder = ROOT / "build" / "components" / name
    python, stamp = folder / "bin" / "python", folder / "holds"
    wanted = "\n".join([sys.executable, *packages])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_S)
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    if done.returncode:
        pytest.skip(f"{' '.join(packages)} can't be installed here: {done.stderr[-500:]}")
    own = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"]
    # Behind what was just installed: versions that these packages ask for go before this one's.
    (Path(own) / "beside.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    )
    stamp.write_text(wanted)
    return python
