"""What came of a suite of tests on Gloo and on potluck, and the parts of a page about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Outcomes = dict[str, dict[str, Any]]
"""By test: its ``outcome`` (pass, fail or skip) and the ``reason``."""


def outcomes_of(suite: Path, backend: str, **variables: str) -> Outcomes:
    """Run the script ``suite`` on ``backend``, with these environment variables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        command = [sys.executable, "-W", "ignore", str(suite), backend, str(path)]
        subprocess.run(command, check=True, env=os.environ | variables)
        result: Outcomes = json.loads(path.read_text())
        return result


def passed_and_lost(gloo: Outcomes, potluck: Outcomes) -> tuple[list[str], list[str]]:
    """The tests that Gloo passes, and those among them that potluck does not."""
    passed = [name for name, each in gloo.items() if each["outcome"] == "pass"]
    return passed, [name for name in passed if potluck[name]["outcome"] != "pass"]


def table(gloo: Outcomes, potluck: Outcomes) -> list[str]:
    """How many tests passed, failed and were skipped on each."""
    counts = {
        name: Counter(each["outcome"] for each in outcomes.values())
        for name, outcomes in (("gloo", gloo), ("potluck", potluck))
    }
    rows = [f"| {name} | {n['pass']} | {n['fail']} | {n['skip']} |" for name, n in counts.items()]
    return ["| | passed | failed | skipped |", "|---|---|---|---|", *rows]


def explained(lost: list[str], reasons: Mapping[str, str]) -> list[str]:
    """Each lost test with the reason that is known for it."""
    return [f"- `{name}`: {reasons.get(name, 'unexplained')}" for name in lost] or ["None."]


def skipped(outcomes: Outcomes) -> list[str]:
    """Why tests were skipped, the most frequent reason first."""
    reasons = Counter(each["reason"] for each in outcomes.values() if each["outcome"] == "skip")
    return [f"- {number}: {reason}" for reason, number in reasons.most_common()]
