"""Runs torch's own backend tests on Gloo and on potluck, and writes docs/torch-backend-tests.md.

    python tests/torch_suite/run.py

Each backend has a process of its own. Exits with 1 if potluck passes less than 95% of what Gloo
passes, or if a test fails for which REASONS has no reason.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

import torch
from comparison import Outcomes, explained, outcomes_of, passed_and_lost, skipped, table

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "torch-backend-tests.md"
REACH = 0.95

REASONS = {
    "test_ddp_logging_data_cpu": "it expects DDP's log to name the backend `gloo`; it names "
    "`potluck`, which is right",
}
"""Why a test that Gloo passes is not expected to pass."""


def page(gloo: Outcomes, potluck: Outcomes) -> tuple[str, float, list[str]]:
    """The page, the part of Gloo's passes that potluck passes too, and the unexplained failures."""
    passed, lost = passed_and_lost(gloo, potluck)
    share = 1 - len(lost) / len(passed)
    lines = [
        "# torch's own backend tests on potluck",
        "",
        "Written by `make torch-suite` (`tests/torch_suite/run.py`). The tests are "
        "`DistributedTest` of `torch.testing._internal.distributed.distributed_test`, the "
        "base that torch runs on Gloo, NCCL and MPI, on 4 ranks of one machine.",
        "",
        "Many of them look at the backend's *name*: under a third-party name they are skipped, "
        "whatever the backend can do. So they are told `gloo`, and where torch would build its "
        "`ProcessGroupGloo`, potluck's group is built (`tests/torch_suite/pose.py`). With one "
        "exception: torch asks for profiler events with tensor shapes from a list of its own "
        "backends only; that list is left as it is for third-party ones. potluck's operations are "
        "in profiles too, without shapes.",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}.",
        "",
        *table(gloo, potluck),
        "",
        f"**{len(passed) - len(lost)} of the {len(passed)} tests that Gloo passes here pass on "
        f"potluck: {share:.1%}.**",
        "",
        "## Passed on Gloo, not on potluck",
        "",
        *explained(lost, REASONS),
        "",
        "## Skipped on Gloo too, so not run",
        "",
        *skipped(gloo),
        "",
    ]
    return "\n".join(lines), share, [name for name in lost if name not in REASONS]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    text, share, unexplained = page(
        *(outcomes_of(HERE / "suite.py", name) for name in ("gloo", "potluck"))
    )
    PAGE.write_text(text)
    print(text)
    return int(share < REACH or bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
