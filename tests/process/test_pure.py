"""Without the native core everything holds, too: the conformance suites in another process.

The engines that are written in Python run in both configurations; here they also compute in Python,
and what the native core would have done falls back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITES = ["test_communicators.py", "test_codecs.py", "test_links.py"]
WORLDS = "inproc-2 or tls-3 or shm-2 or tls+shm-2 or test_links"


def test_the_conformance_suites_pass_without_the_native_core() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", WORLDS]
        + [f"tests/conformance/{suite}" for suite in SUITES],
        cwd=ROOT,
        env={**os.environ, "POTLUCK_NATIVE": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    last = run.stdout.strip().splitlines()[-1]
    assert "failed" not in last, last
    assert int(last.split(" passed")[0].split()[-1]) > 100, last
