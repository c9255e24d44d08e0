"""The wheels of `make wheels`, installed where there is no compiler: what is in them, that training
runs from them, on x86-64 and in QEMU's emulation of aarch64."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from potluck._core.version import VERSION
from support.components import ROOT
from support.emulated import EmulatedDebian
from support.wheels import wheels_of

WAIT_S = 600
ARCHITECTURES = ("x86_64", "aarch64")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_wheel_has_the_package_its_core_and_licences_and_nothing_else(
    arch: str,
) -> None:
    assert wheels_of(arch)
    for path in wheels_of(arch):
        assert f"manylinux_2_28_{arch}" in path.name
        assert path.stat().st_size <= 6 << 20
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            core = [each for each in names if each.endswith(".so")]
            assert len(core) == 1
            content = archive.read(core[0])
        assert {each.split("/")[0] for each in names} == {"potluck", f"potluck-{VERSION}.dist-info"}
        licences = {Path(each).name for each in names if "/licenses/L" in each}
        assert licences == {"LICENSE-MIT", "LICENSE-APACHE", "LICENSE-OPENSSL"}
        assert b".symtab" not in content
        assert b"libssl.so" not in content
        assert b"libcrypto.so" not in content


def test_a_wheel_trains_where_no_compiler_is(tmp_path: Path) -> None:
    here = f"cp3{sys.version_info.minor}"
    [wheel] = [each for each in wheels_of("x86_64") if f"-{here}-{here}-" in each.name]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=WAIT_S)
    python = tmp_path / "venv/bin/python"
    # Besides the wheel and what it declares: torch and scikit-learn, which the example uses.
    torch = f"torch=={version('torch')}"
    env = {**os.environ, "PATH": str(tmp_path / "venv/bin"), "HOME": str(tmp_path)}
    pip = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    learn = f"scikit-learn=={version('scikit-learn')}"
    subprocess.run([*pip, wheel, torch, learn], check=True, timeout=WAIT_S, env=env)
    done = subprocess.run(
        [python.with_name("potluck"), "run", "-n", "2", ROOT / "examples/digits.py"],
        cwd=tmp_path,
        env=env | {"POTLUCK_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    doctor = subprocess.run(
        [python.with_name("potluck"), "doctor", "--json"], env=env, capture_output=True, text=True
    )
    assert '"openssl"' in doctor.stdout, doctor.stdout + doctor.stderr


SUM = """
import numpy as np
import potluck

ctx = potluck.init()
print("has", ctx.all_reduce(np.full(1_000_000, ctx.rank + 1, np.float32))[-1], flush=True)
ctx.close()
"""


def test_the_wheel_of_the_stable_abi_runs_on_newer_pythons(tmp_path: Path) -> None:
    wheels = [each for each in wheels_of("x86_64") if "-cp312-abi3-" in each.name]
    built = sorted(ROOT.glob("build/wheels/python-3.1[2-9]/bin/python"))
    if not wheels or not built:
        pytest.skip("no CPython 3.12 or later with headers is here, so that wheel was not built")
    for number, newer in enumerate(built):
        folder = tmp_path / str(number)
        subprocess.run([newer.resolve(), "-m", "venv", folder], check=True, timeout=WAIT_S)
        (folder / "sum.py").write_text(SUM)
        python = folder / "bin/python"
        env = {**os.environ, "PATH": str(folder / "bin"), "POTLUCK_HOME": str(folder / "home")}
        pip = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", wheels[0]]
        subprocess.run(pip, check=True, timeout=WAIT_S, env=env)
        for words in (("run", "-n", "2", "sum.py"), ("doctor", "--json")):
            done = subprocess.run(
                [python.with_name("potluck"), *words],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.count("has 3.0") == 2 or '"tls": "openssl"' in done.stdout


# QEMU has no ioctl for a link's speed, and psutil fails by that.
NO_SPEED = """
import psutil._psutil_linux as calls

calls.net_if_duplex_speed = lambda name: (calls.DUPLEX_UNKNOWN, 0)
"""


def test_the_wheel_for_aarch64_runs_in_emulation(tmp_path: Path) -> None:
    """With the Python of Debian's packages, and what the wheel declares from PyPI."""
    debian = EmulatedDebian.made("arm64")
    [wheel] = [each for each in wheels_of("aarch64") if "-cp311-cp311-" in each.name]
    site = debian.root / "root/site"
    shutil.rmtree(site, ignore_errors=True)
    # By this machine's pip: an emulated one takes ten minutes. It unpacks, and runs nothing.
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
    wanted = ["--only-binary=:all:", "--python-version=3.11", *platforms, f"--target={site}"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *wanted, wheel]
    subprocess.run(pip, check=True, timeout=WAIT_S)
    (site / "sitecustomize.py").write_text(NO_SPEED)
    (debian.root / "root/sum.py").write_text(SUM)
    potluck = ("python3", "/root/site/bin/potluck")
    # QEMU refuses to map shared memory twice (mremap of no bytes), so workers use links.
    variables = {"PYTHONPATH": "/root/site", "POTLUCK_USE_SHARED_MEMORY": "no"}
    done = debian.run(*potluck, "run", "-n", "2", "/root/sum.py", timeout_s=WAIT_S, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("has 3.0") == 2, done.stdout
    doctor = debian.run(*potluck, "doctor", "--json", timeout_s=WAIT_S, env=variables)
    assert '"tls": "openssl"' in doctor.stdout, doctor.stdout + doctor.stderr
