"""``potluck doctor`` says which engine is in use, in words and as JSON."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from potluck._core import native

POTLUCK = Path(sys.executable).with_name("potluck")


def doctor(*arguments: str, **environment: str) -> str:
    run = subprocess.run(
        [POTLUCK, "doctor", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_without_the_native_core_it_says_why() -> None:
    found = msgspec.json.decode(doctor("--json", POTLUCK_NATIVE="0"))
    assert (found["engine"], found["kernels"], found["tls"]) == ("python", "numpy", "python")
    assert found["reason"] == "switched off by POTLUCK_NATIVE=0"
    assert "engine        Python (switched off by" in doctor(POTLUCK_NATIVE="0")


@pytest.mark.skipif(not native.available, reason=f"no native core: {native.reason}")
def test_with_the_native_core_it_names_the_kernels() -> None:
    found = msgspec.json.decode(doctor("--json"))
    assert found["engine"] == "native"
    assert found["kernels"] == native.core.kernel_sets()[-1]
    assert found["cpu"] == native.core.cpu_features()
    assert found["reason"] == ""
    assert f"engine        {native.describe()}" in doctor()
