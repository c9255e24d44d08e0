"""One process makes and ends many process groups, as torchft does whenever its quorum changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "many_groups.py"


@pytest.mark.parametrize(
    "links",
    [
        {},
        {"POTLUCK_USE_SHARED_MEMORY": "0"},
        pytest.param({"POTLUCK_NATIVE": "0"}, marks=pytest.mark.long),
    ],
    ids=["shared memory", "native links", "python links"],
)
@pytest.mark.parametrize("rounds", [15, pytest.param(50, marks=pytest.mark.long)])
def test_many_groups_one_after_the_other_leave_nothing_behind(
    links: dict[str, str], rounds: int, tmp_path: Path
) -> None:
    variables = {"POTLUCK_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(rank), str(tmp_path), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | variables | links,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("nothing is left over" in text for text in said), said
