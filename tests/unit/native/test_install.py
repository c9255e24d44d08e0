"""Installing without a compiler gives a wheel without the extension, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]


def test_without_a_compiler_the_install_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    build = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    run = subprocess.run(
        [*build, "--disable-pip-version-check", "-w", str(tmp_path), str(ROOT)],
        env={**os.environ, "CC": "/bin/false", "CXX": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "installed without its native core" in run.stdout + run.stderr
    [wheel] = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    names = ZipFile(wheel).namelist()
    assert "potluck/_core/native.py" in names
    assert [name for name in names if name.endswith((".so", ".pyd"))] == []
