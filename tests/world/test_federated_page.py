"""The snippets of docs/federated.md, run as the one script that the page says they are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import snippets as snippets_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "federated.md"
HAS_ACCOUNTING = importlib.util.find_spec("dp_accounting") is not None
SNIPPETS = snippets_of("federated.md")


def test_every_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = [each for each in SNIPPETS if HAS_ACCOUNTING or "DifferentialPrivacy" not in each]
    exec(compile("\n".join(snippets), str(PAGE), "exec"), {"__name__": "page"})
    assert ("epsilon 5.89\n" in capsys.readouterr().out) == HAS_ACCOUNTING


def test_the_example_learns_digits() -> None:
    pytest.importorskip("sklearn", reason="pip install 'potluck[sklearn]'")
    script = str(ROOT / "examples" / "federated_server.py")
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy 0." in done.stdout
