"""A job on two machines alone, the network between which is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gossiping import AGAIN_S, TRAINING, cut, ends, goes_on
from support.machines import by_seniority, cluster_of, first_to_say, form, marks

pytestmark = [pytest.mark.needs_root_netns, pytest.mark.timeout(300)]


@pytest.mark.parametrize("starter", ["the one that stays", "the one that leaves"])
def test_a_job_on_two_machines_alone_that_do_not_reach_each_other_goes_on_with_one(
    starter: str, tmp_path: Path
) -> None:
    """Their agents talk by way of a third, which gives no workers. A job of the two can't spare the
    link, so the one that came last leaves the cluster, as when the link is cut while the job runs.
    It comes back once the network is mended, and a job that it started is told there again."""
    with cluster_of(3, tmp_path / "homes") as trio:
        form(*trio)
        leader, stays, leaves = by_seniority(trio)
        assert leader.runs("pause").returncode == 0
        since = marks(trio)
        cut(stays, leaves)
        # Whoever notices it first talks by way of the third, so that the other one may not notice.
        first = first_to_say(" is reached by others, not from here", stays, leaves, since=since)
        first.says(" is heard, and hears me", since=since[first])
        stop, begins = tmp_path / "stop", stays if starter == "the one that stays" else leaves
        with begins.run(TRAINING, stop) as run:
            if begins is stays:
                goes_on(run, "none", 5, since=0, within_s=AGAIN_S, count=1)
            else:
                run.when("potluck: this machine: ", AGAIN_S, since=0)  # paused, or left out
            since_then = run.mark
            cut(stays, leaves, on=False)
            if begins is leaves:
                run.when("potluck: this machine: goes on in epoch ", AGAIN_S, since=since_then)
            goes_on(run, "none", 5, since=since_then, within_s=AGAIN_S, count=2)
            ends(run, stop, 2)
