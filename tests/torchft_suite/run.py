"""Runs torchft's own process group tests on Gloo and potluck, and writes docs/torchft-tests.md.

    python tests/torchft_suite/run.py

Each backend has a process of its own. Exits with 1 if a test that Gloo passes fails on potluck and
REASONS has no reason for it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "torchft-tests.md"

REASONS = {
    "process_group_test.ProcessGroupTest.test_gloo_timeout": "it looks for Gloo's words, `timeout "
    "after 10ms`; potluck's error names the rank that did not come within 0.01 s",
}
"""Why a test that Gloo passes is not expected to pass."""

Outcomes = dict[str, dict[str, Any]]


def outcomes_of(backend: str) -> Outcomes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        command = [sys.executable, "-W", "ignore", str(HERE / "suite.py"), backend, str(path)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        result: Outcomes = json.loads(path.read_text())
        return result


def page(gloo: Outcomes, potluck: Outcomes) -> tuple[str, list[str]]:
    """The page, and the unexplained failures."""
    passed = [name for name, each in gloo.items() if each["outcome"] == "pass"]
    lost = [name for name in passed if potluck[name]["outcome"] != "pass"]
    counts = {name: Counter(each["outcome"] for each in outcomes.values())
              for name, outcomes in (("gloo", gloo), ("potluck", potluck))}  # fmt: skip
    skipped = Counter(each["reason"] for each in gloo.values() if each["outcome"] == "skip")
    lines = [
        "# torchft's own tests on potluck",
        "",
        "Written by `make torchft-suite` (`tests/torchft_suite/run.py`). These are the tests in "
        "torchft's package that make a `ProcessGroupGloo`: its process group, its manager "
        "(recovery, healing), LocalSGD and DiLoCo, the lighthouse, the parameter server and the "
        "transport of checkpoints. For potluck, `ProcessGroupPotluck` stands in its place.",
        "",
        f"torchft {importlib.metadata.version('torchft')}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}.",
        "",
        "| | passed | failed | skipped |",
        "|---|---|---|---|",
        *(f"| {name} | {each['pass']} | {each['fail']} | {each['skip']} |"
          for name, each in counts.items()),
        "",
        "## Passed on Gloo, not on potluck",
        "",
        *([f"- `{name}`: {REASONS.get(name, 'unexplained')}" for name in lost] or ["None."]),
        "",
        "## Skipped on both",
        "",
        *(f"- {number}: {reason}" for reason, number in skipped.most_common()),
        "",
    ]  # fmt: skip
    return "\n".join(lines), [name for name in lost if name not in REASONS]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    text, unexplained = page(outcomes_of("gloo"), outcomes_of("potluck"))
    PAGE.write_text(text)
    print(text)
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
