"""What training on three hosts makes of faults, with figures: minutes, so only with --long. That a
job gets through each of these is tested in ``test_jobs.py``, too."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.clusters import found_cluster
from support.commands import Command
from support.figures import Figures
from support.machines import PSK, Machine, cluster_of, form, leader_of
from support.sums import TRAINING, right_sum

pytestmark = [pytest.mark.needs_root_netns, pytest.mark.long, pytest.mark.timeout(400)]

WRONG = "the sum of all samples is wrong by"
COMMITS_S, LEADER_COMMITS_S, CUT_COMMITS_S = 2.0, 5.0, 5.0


class Story:
    """A job on all hosts of a cluster that are up, from the machine ``starter``."""

    def __init__(self, run: Command, stop: Path) -> None:
        self.run = run
        self._stop = stop

    def commits(self, num_hosts: int, *, since: int) -> float:
        """When the first step of a group of so many was committed, of lines after ``since``."""
        return self.run.when(f"of {num_hosts}", since=since)

    def commits_after(self, event: Callable[[], object], num_hosts: int) -> float:
        """Seconds from the beginning of ``event`` to the first step of a group of so many."""
        since, began = self.run.mark, time.monotonic()
        event()
        return self.commits(num_hosts, since=since) - began

    def goes_on(self, num_hosts: int, num_steps: int = 5) -> None:
        """So many steps more, in a group of so many."""
        for _ in range(num_steps):
            self.commits(num_hosts, since=self.run.mark)

    def ends(self, num_finished: int) -> int:
        """All who are in end after the same step, with the same state; by how much the sum of all
        samples differs from that of every sample of every step, counted once."""
        self._stop.touch()
        assert self.run.finish() == 0, self.run.text
        found = re.findall(r"counted (\d+) in (\d+) steps, (\w+)", self.run.text)
        assert len(found) == num_finished, self.run.text
        assert len(set(found)) == 1, "the hashes of all are equal"
        return abs(int(found[0][0]) - right_sum(int(found[0][1])))


@contextmanager
def training(starter: Machine, folder: Path, num_hosts: int) -> Iterator[Story]:
    stop = folder / "stop"
    with starter.run(TRAINING, stop) as run:
        run.wait_for(f"step 5 of {num_hosts}")
        yield Story(run, stop)


def test_agents_with_their_workers_are_killed_and_a_host_is_cut_off(
    figures: Figures, tmp_path: Path
) -> None:
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        leader = leader_of(machines)
        starter, other = (each for each in machines if each is not leader)
        with training(starter, tmp_path, 3) as story:
            fault = "SIGKILL of a node's agent and workers, while training"
            seconds = story.commits_after(other.kill, 2)
            figures.take(fault, "the others commit again after", seconds, asked=COMMITS_S)
            seconds = story.commits_after(other.start, 3)
            figures.take(fault, "in again, from the start of its agent, after", seconds)
            story.goes_on(3)

            fault = "a host is cut off (link down), while training"
            seconds = story.commits_after(other.cut, 2)
            figures.take(fault, "the others commit again after", seconds, asked=CUT_COMMITS_S)
            seconds = story.commits_after(other.heal, 3)
            figures.take(fault, "all three commit after the heal", seconds)
            story.goes_on(3)

            fault = "SIGKILL of the leader's agent and workers, while training"
            seconds = story.commits_after(leader.kill, 2)
            figures.take(fault, "the others commit again after", seconds, asked=LEADER_COMMITS_S)
            story.goes_on(2)
            figures.take(fault, WRONG, story.ends(2), asked=0, unit="")


def test_a_new_secret_and_a_ban_while_training(figures: Figures, tmp_path: Path) -> None:
    with cluster_of(3, tmp_path / "homes", psk="") as machines:
        found_cluster(*(each.home for each in machines), psk=bytes.fromhex(PSK))
        form(*machines)
        # The founder bans another machine, if it can one that does not lead the cluster.
        starter, others = machines[0], machines[1:]
        other = next(each for each in others if each is not leader_of(machines))
        with training(starter, tmp_path, 3) as story:
            views = sum(each.command.text.count("epoch ") for each in machines)
            rotated = starter.runs("rotate")
            assert rotated.returncode == 0, rotated.stderr
            assert "3 of 3 machines have it" in rotated.stdout
            story.goes_on(3, 20)
            changes = sum(each.command.text.count("epoch ") for each in machines) - views
            fault = "`potluck rotate` while training"
            figures.take(fault, "views changed:", changes, asked=0, unit="")
            since, began = story.run.mark, time.monotonic()
            assert starter.runs("ban", other.node, "--yes").returncode == 0
            seconds = story.commits(2, since=since) - began
            fault = "`potluck ban` of a node while training"
            figures.take(fault, "the others commit again after", seconds)
            story.goes_on(2, 10)
            fault = "`potluck rotate` and `ban` while training"
            figures.take(fault, WRONG, story.ends(2), asked=0, unit="")


def test_twenty_joins_and_leaves_in_a_row(figures: Figures, tmp_path: Path) -> None:
    """Ten times a host leaves (its agent is killed) and comes in again, leaders too."""
    with cluster_of(3, tmp_path / "homes") as machines:
        form(*machines)
        starter = machines[1]
        took = []
        with training(starter, tmp_path, 3) as story:
            for number in range(10):
                guest = (machines[0], machines[2])[number % 2]
                since = story.run.mark
                guest.kill()
                story.commits(2, since=since)
                took.append(story.commits_after(guest.start, 3))
                story.goes_on(3)
            wrong = story.ends(3)
        fault = "20 joins and leaves in a row, while training"
        figures.take(fault, WRONG, wrong, asked=0, unit="")
        figures.take(fault, "in again, from the start of its agent, after at most", max(took))
        for each in machines:
            assert not each.left_over(), "only the agents are left"
