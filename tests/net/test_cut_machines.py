"""Two machines do not reach each other at all; both reach a third, by way of which they talk."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from support.figures import Figures
from support.gossiping import (
    AGAIN_S,
    TRAINING,
    cut,
    ends,
    falls,
    goes_on,
    goes_on_without_the_link,
    losses,
)
from support.machines import cluster_of, form, leader_of, marks

pytestmark = [pytest.mark.needs_root_netns, pytest.mark.timeout(300)]


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
