"""The network between two of three machines is cut, each of which still reaches the third."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support.commands import Command
from support.figures import Figures
from support.machines import Machine, by_seniority, cluster_of, first_to_say, form, leader_of, marks

pytestmark = [pytest.mark.needs_root_netns, pytest.mark.timeout(300)]

TRAINING = Path(__file__).parent / "scripts" / "training" / "gossip.py"
PEER_TIMEOUT_S = "8"
"""After which an operation, and the making of a link, is given up."""
AGAIN_S = 60.0
NOTE = r"potluck: workers \d and \d can't reach each other: the group goes on without"


def round_of(count: int, line: str, cut: str) -> float | None:
    """The loss that a line tells of a round of so many ranks with these links cut."""
    told = re.search(rf"of {count}, cut: {cut}, loss ([\d.]+)", line)
    return None if told is None else float(told[1])


def losses(run: Command, cut: str, *, since: int, count: int = 3) -> list[float]:
    """Of the rounds of ``count`` ranks with these links cut, in lines after ``since``."""
    told = (round_of(count, line, cut) for line in run.lines[since:])
    return [loss for loss in told if loss is not None]


def goes_on(
    run: Command, cut: str, num_rounds: int, *, since: int, within_s: float, count: int = 3
) -> float:
    """Wait for so many rounds of ``count`` ranks with these links cut; when the first of them
    ended."""

    def is_it(line: str) -> bool:
        return round_of(count, line, cut) is not None

    first = run.when(is_it, within_s, since=since)
    deadline = time.monotonic() + within_s
    while len(losses(run, cut, since=since, count=count)) < count * num_rounds:
        run.when(is_it, deadline - time.monotonic(), since=run.mark)
    return first


def falls(found: list[float]) -> bool:
    """Whether the last losses are below the first."""
    return sum(found[-6:]) < sum(found[:6])


def ends(run: Command, stop: Path, count: int = 3) -> None:
    stop.touch()
    assert run.finish() == 0, run.text
    hashes = re.findall(r"ended, (\w+)", run.text)
    assert len(hashes) == count, run.text
    assert len(set(hashes)) == 1, "all ended with the mean of all"


@pytest.mark.parametrize("pair", [(1, 2), (0, 2)], ids=["two others", "with the starter"])
def test_gossip_goes_on_when_a_firewall_keeps_the_workers_of_two_machines_apart(
    pair: tuple[int, int], tmp_path: Path, figures: Figures
) -> None:
    with cluster_of(3, tmp_path / "homes", POTLUCK_PEER_TIMEOUT_S=PEER_TIMEOUT_S) as trio:
        form(*trio)
        a, b = (trio[index] for index in pair)
        fault = "a firewall between the workers of two of three hosts"
        goes_on_without_the_link(trio, partial(keep_apart, a, b), fault, tmp_path, figures)


@pytest.mark.parametrize("leads", [False, True], ids=["two others", "with the leader"])
def test_gossip_goes_on_when_two_machines_do_not_reach_each_other_at_all(
    leads: bool, tmp_path: Path, figures: Figures
) -> None:
    """With deadlines of 30 s: the agents notice it, and talk by way of the third."""
    with cluster_of(3, tmp_path / "homes") as trio:
        form(*trio)
        leader = leader_of(trio)
        others = [each for each in trio if each is not leader]
        a, b = (leader, others[0]) if leads else others
        since, everybody = marks(trio), frozenset(each.id for each in trio)
        fault = "no packet between two of three hosts"
        goes_on_without_the_link(trio, partial(cut, a, b), fault, tmp_path, figures)
        for each in trio:
            views = [nodes for _, nodes in each.views_since(since[each])]
            assert set(views) == {everybody}, "no machine left the cluster"


def test_another_machine_relays_when_the_one_that_does_has_died(
    tmp_path: Path, figures: Figures
) -> None:
    """Of four machines two do not reach each other: their agents talk by way of a third, the one
    with the least id. Its cable is pulled; the fourth takes its place."""
    with cluster_of(4, tmp_path / "homes") as four:
        form(*four)
        relay, a, b, starter = sorted(four, key=lambda each: each.node)
        stop = tmp_path / "stop"
        with starter.run(TRAINING, stop) as run:
            goes_on(run, "none", 3, since=0, within_s=AGAIN_S, count=4)
            since = run.mark
            cut(a, b)
            goes_on(run, r"\d-\d", 10, since=since, within_s=AGAIN_S, count=4)
            left = (a, b, starter)
            before, since, began = marks(left), run.mark, time.monotonic()
            relay.cut()
            first = goes_on(run, r"\d-\d", 10, since=since, within_s=AGAIN_S)
            fault = "no packet between two of four hosts, and the one that relays is dead"
            figures.take(fault, "the first round of the three others after", first - began)
            assert falls(losses(run, r"\d-\d", since=since))
            views = [nodes for each in left for _, nodes in each.views_since(before[each])]
            assert set(views) == {frozenset(each.id for each in left)}, "only the dead one left"
            since = run.mark
            cut(a, b, on=False)
            goes_on(run, "none", 5, since=since, within_s=AGAIN_S)
            ends(run, stop)


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


def goes_on_without_the_link(
    trio: list[Machine], cut: Callable[..., None], fault: str, folder: Path, figures: Figures
) -> None:
    """A training on all of ``trio`` goes on, with all and a falling loss, after ``cut()``, says so
    once, and uses the link again after ``cut(on=False)``."""
    stop = folder / "stop"
    with trio[0].run(TRAINING, stop) as run:
        goes_on(run, "none", 5, since=0, within_s=AGAIN_S)
        since, began = run.mark, time.monotonic()
        cut()
        first = goes_on(run, r"\d-\d", 15, since=since, within_s=AGAIN_S)
        figures.take(fault, "the first round without the link after", first - began)
        assert falls(losses(run, r"\d-\d", since=since))
        told = [line for line in run.lines if re.match(NOTE, line)]
        assert len(told) == 1, run.text
        since, began = run.mark, time.monotonic()
        cut(on=False)
        first = goes_on(run, "none", 5, since=since, within_s=AGAIN_S)
        figures.take(fault, "the first round with it after the heal", first - began)
        ends(run, stop)


def keep_apart(a: Machine, b: Machine, *, on: bool = True) -> None:
    """Let a firewall drop what the workers of one send to those of the other."""
    for here, there in itertools.permutations((a, b)):
        here.host.drop_workers(there.host, on=on)


def cut(a: Machine, b: Machine, *, on: bool = True) -> None:
    """Lose all that one of the two sends to the other."""
    for here, there in itertools.permutations((a, b)):
        here.host.blackhole(there.host, on=on)
