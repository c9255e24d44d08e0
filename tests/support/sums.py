"""The training of ``tests/net/scripts/training/sums.py``, whose right answer is known."""

from __future__ import annotations

import re
from pathlib import Path

from potluck.training.sampler import Schedule
from support.commands import Command

TRAINING = Path(__file__).parents[1] / "net" / "scripts" / "training" / "sums.py"
SCHEDULE = Schedule(num_samples=64, batch_size=8, epochs=1_000_000, seed=3)


def right_sum(num_steps: int) -> int:
    """The sum of all samples of the first ``num_steps`` steps, each counted once."""
    total = committed = 0
    for _ in range(num_steps):
        batch = SCHEDULE.batch(committed)
        total += int(SCHEDULE.share(batch, 0, 1).indices.sum())
        committed += batch.size
    return total


def check_sums(run: Command) -> dict[str, str]:
    """All who came to the end counted every sample of every step once; their nodes and hashes."""
    ends = {}
    for line in run.lines:
        found = re.match(r"\[ *\d+ (\S+)\] counted (\d+) in (\d+) steps, (\w+)", line)
        if found is not None:
            assert int(found[2]) == right_sum(int(found[3])), line
            ends[found[1]] = found[4]
    assert len(set(ends.values())) == 1, run.text
    return ends
