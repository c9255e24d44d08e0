"""Runs torchft's own process group tests on Gloo and potluck, and writes docs/torchft-tests.md.

    python tests/torchft_suite/run.py

Each backend has a process of its own. Exits with 1 if a test that Gloo passes fails on potluck and
REASONS has no reason for it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "torch_suite"))
from comparison import Outcomes, explained, outcomes_of, passed_and_lost, skipped, table

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "torchft-tests.md"

REASONS = {
    "process_group_test.ProcessGroupTest.test_gloo_timeout": "it looks for Gloo's words, `timeout "
    "after 10ms`; potluck's error names the rank that did not come within 0.01 s",
}
"""Why a test that Gloo passes is not expected to pass."""


def page(gloo: Outcomes, potluck: Outcomes) -> tuple[str, list[str]]:
    """The page, and the unexplained failures."""
    _, lost = passed_and_lost(gloo, potluck)
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
        *table(gloo, potluck),
        "",
        "## Passed on Gloo, not on potluck",
        "",
        *explained(lost, REASONS),
        "",
        "## Skipped on both",
        "",
        *skipped(gloo),
        "",
    ]
    return "\n".join(lines), [name for name in lost if name not in REASONS]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    text, unexplained = page(
        outcomes_of(HERE / "suite.py", "gloo", OMP_NUM_THREADS="1"),
        outcomes_of(HERE / "suite.py", "potluck", OMP_NUM_THREADS="1"),
    )
    PAGE.write_text(text)
    print(text)
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
