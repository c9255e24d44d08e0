"""``potluck run`` on a cluster of hosts: workers on all of them, from any of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from potluck.testing.clusters import ClusterOfHosts
from potluck.testing.commands import Command
from potluck.training.sampler import Schedule

pytestmark = pytest.mark.needs_root_netns

TRAINING = Path(__file__).parent / "scripts" / "training" / "sums.py"
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


def test_a_job_runs_on_all_hosts_and_leaves_nothing(tmp_path: Path) -> None:
    with ClusterOfHosts(3, tmp_path / "homes") as cluster:
        _, bob, carl = cluster.up()
        summary_file = tmp_path / "summary.json"
        with bob.run("--json", summary_file, TRAINING, tmp_path / "stop") as run:
            run.wait_for("step 5 of 3")
            [job] = carl.status()["jobs"]
            assert {worker["node"] for worker in job["workers"]} == {"ada", "bob", "carl"}
            assert "sums-" in carl.runs("status").stdout
            (tmp_path / "stop").touch()
            assert run.finish() == 0, run.text
            assert check_sums(run).keys() == {"ada", "bob", "carl"}
        summary = json.loads(summary_file.read_text())
        assert [worker["finished"] for worker in summary["workers"]] == [True] * 3
        for machine in cluster.machines:
            assert machine.host.pids() == [machine.command.process.pid], "only the agent is left"
        assert carl.status()["jobs"] == []
