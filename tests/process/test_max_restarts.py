"""``torchrun --max-restarts``: a worker is killed, torchrun starts the world again, the script goes
on from its own checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.commands import Command

SCRIPT = Path(__file__).parent / "scripts" / "resumes.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytest.importorskip("torch")


@pytest.mark.parametrize(
    "init_method", ["env://", pytest.param("potluck://", marks=pytest.mark.long)]
)
def test_a_killed_worker_costs_one_restart_and_no_step(tmp_path: Path, init_method: str) -> None:
    """The survivor hears of the loss at once: torchrun need not kill it after a time-out."""
    arguments = ["--max-restarts", "2", str(SCRIPT), str(tmp_path), init_method]
    with Command([*TORCHRUN, *arguments]) as run:
        assert run.finish() == 0, run.text
    begun = re.findall(r"rank (\d), restart (\d): begins at step (\d)", run.text)
    assert sorted(begun) == [("0", "0", "0"), ("0", "1", "3"), ("1", "0", "0"), ("1", "1", "3")]
    ended = re.findall(r"rank (\d), restart (\d): ends at step 8 with norm ([\d.]+)", run.text)
    assert sorted(each[:2] for each in ended) == [("0", "1"), ("1", "1")]
    assert len({norm for *_, norm in ended}) == 1
