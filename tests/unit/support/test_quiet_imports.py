"""Processes of tests import large packages without the garbage collector, which runs as ever before
and after. A package with one of their names, made here, stands for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.quiet_imports import VARIABLE

PACKAGE = "import gc\nimport json.tool\nwas_on = gc.isenabled()\n"


def says(script: str, folder: Path, **variables: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{script}"],
        env={name: text for name, text in os.environ.items() if name != VARIABLE} | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    return run.stdout.split()


INSTALL = "from support.quiet_imports import install; install()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "torch" / "broken.py").write_text("raise OSError('broken')")
    return tmp_path


def test_the_collector_is_off_during_an_import_and_its_objects_are_exempt(folder: Path) -> None:
    script = "import gc, torch\nprint(torch.was_on, gc.isenabled(), gc.get_freeze_count() > 1000)"
    assert says(INSTALL + script, folder) == ["False", "True", "True"]


def test_an_import_within_a_call_exempts_nothing_from_collection(folder: Path) -> None:
    script = """
import gc
def call():
    import torch
    return torch
print(call().was_on, gc.isenabled(), gc.get_freeze_count())
"""
    assert says(INSTALL + script, folder) == ["False", "True", "0"]


def test_after_an_import_that_fails_the_collector_is_on(folder: Path) -> None:
    script = """
import gc, torch
try:
    import torch.broken
except OSError as error:
    print(error, gc.isenabled())
"""
    assert says(INSTALL + script, folder) == ["broken", "True"]


def test_a_collector_that_was_off_stays_off(folder: Path) -> None:
    script = "import gc; gc.disable()\nimport torch\nprint(gc.isenabled(), gc.get_freeze_count())"
    assert says(INSTALL + script, folder) == ["False", "0"]


def test_only_processes_of_tests_have_quiet_imports(folder: Path) -> None:
    script = "import torch\nprint(torch.was_on)"
    assert says(script, folder) == ["True"]
    assert os.environ[VARIABLE], "what pytest's conftest gives to the processes of tests"
