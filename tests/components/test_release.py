"""The release workflow, which was never run: its form by GitHub's published schema, and what
cibuildwheel reads from pyproject.toml."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.components import ROOT, environment

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
PACKAGES = ("cibuildwheel==4.3.5", "check-jsonschema==0.39.0")


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder with cibuildwheel and check-jsonschema."""
    return environment("release", *PACKAGES).parent


def checked(programs: Path, workflow: Path) -> subprocess.CompletedProcess[str]:
    command = [
        programs / "check-jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
        workflow,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_workflow_has_githubs_form(programs: Path, tmp_path: Path) -> None:
    done = checked(programs, WORKFLOW)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOW.read_text().replace("runs-on:", "run-on:"))
    assert checked(programs, wrong).returncode == 1


@pytest.mark.parametrize(
    ("platform", "arch", "suffix"),
    [
        ("macos", "arm64", "macosx_arm64"),
        ("macos", "x86_64", "macosx_x86_64"),
        ("windows", "AMD64", "win_amd64"),
    ],
)
def test_cibuildwheel_builds_the_pythons_that_are_supported(
    programs: Path, platform: str, arch: str, suffix: str
) -> None:
    assert PACKAGES[0] in WORKFLOW.read_text()
    wanted = [f"--platform={platform}", f"--archs={arch}", "--print-build-identifiers"]
    command = [programs / "cibuildwheel", *wanted, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"cp{each}-{suffix}" for each in ("311", "312", "313")]
