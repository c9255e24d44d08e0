"""The floors of ARCHITECTURE.md hold, and the contracts that say so do notice a breach."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

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


BREACHES = {
    "Nothing imports upwards": {
        "_core/transport/breach.py": "import potluck._core.engine",
        "_core/transport/other_breach.py": "import potluck._core.metrics",
        "_core/engine/breach.py": "import potluck._core.cluster",
    },
    "The folders of the control plane": {
        "_core/cluster/membership/breach.py": "import potluck._core.cluster.home",
    },
    "The control plane, commits": {"_core/cluster/jobs/groups/breach.py": "import time"},
    "A job's groups are decided below": {
        "_core/cluster/jobs/groups/other_breach.py": "import potluck._core.cluster.jobs.controller",
    },
    "The folders of the data plane": {
        "_core/engine/arrays/breach.py": "import potluck._core.engine.loop"
    },
    "Nothing outside potluck.testing": {"_core/engine/other_breach.py": "import potluck.testing"},
    "The package runs without": {"testing/breach.py": "import support.hosts"},
    "PyTorch is imported only by": {"training/breach.py": "import torch"},
    "scikit-learn is imported only by": {"data/breach.py": "import sklearn"},
    "Plans, codecs and messages": {
        "_core/collectives/breach.py": "import time",
        "_core/wire/breach.py": "from socket import socket",
    },
}
"""By contract, files that break it."""


def test_a_breach_of_each_rule_is_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for breaches in BREACHES.values():
        for module, line in breaches.items():
            (tmp_path / "src" / "potluck" / module).write_text(f"{line}\n")
    run = lint(tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    _, _, report = run.stdout.partition("Broken contracts\n")
    # Each contract's name is underlined.
    _, *parts = re.split(r"^(?=.+\n-{10,}$)", report, flags=re.MULTILINE)
    for contract, breaches in BREACHES.items():
        part = "".join(part for part in parts if part.startswith(contract))
        for module in breaches:
            name = "potluck." + module.removesuffix(".py").replace("/", ".")
            assert f"{name} -> " in part, f"{name} breaks: {contract}\n{report}"
