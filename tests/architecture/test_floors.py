"""The floors of ARCHITECTURE.md hold, and the contracts that say so do notice a breach."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# An editable install's finder goes before PYTHONPATH; without it the folder's own copy is read.
LINT = (
    "import sys\n"
    "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
    "from importlinter.cli import lint_imports_command\n"
    "lint_imports_command(['--no-logo', '--no-cache'])\n"
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=folder,
        env={"PYTHONPATH": str(folder / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_nothing_imports_upwards() -> None:
    run = lint(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("transport/breach.py", "import potluck.engine", "Nothing imports upwards"),
        ("transport/breach.py", "import potluck.metrics", "Nothing imports upwards"),
        ("engine/breach.py", "import potluck.cluster", "Nothing imports upwards"),
        (
            "cluster/membership/breach.py",
            "import potluck.cluster.home",
            "The folders of the",
        ),
        ("cluster/jobs/groups/breach.py", "import time", "The control plane, commits"),
        (
            "cluster/jobs/groups/breach.py",
            "import potluck.cluster.jobs.controller",
            "A job's groups are decided below",
        ),
        ("engine/arrays/breach.py", "import potluck.engine.loop", "The folders of the data plane"),
        ("engine/breach.py", "import potluck.testing", "imports it"),
        ("testing/breach.py", "import support.hosts", "The package runs without"),
        ("training/breach.py", "import torch", "PyTorch is imported only by"),
        ("collectives/breach.py", "import time", "Plans, codecs and messages"),
        ("wire/breach.py", "from socket import socket", "Plans, codecs and messages"),
    ],
)
def test_a_breach_of_each_rule_is_found(
    tmp_path: Path, module: str, line: str, contract: str
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    (tmp_path / "src" / "potluck" / module).write_text(f"{line}\n")
    run = lint(tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    broken = [text for text in run.stdout.splitlines() if " BROKEN" in text]
    assert any(contract in text for text in broken), run.stdout
