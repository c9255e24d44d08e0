"""Machines that go: killed, stopped, cut off, for a moment or for good. Agents only, no job.

All rows share one network, and most of them the agents of the row before: each begins by having
those up that it needs (``form``), in one view.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from support.figures import Figures
from support.hosts import Network
from support.machines import (
    Machine,
    agreed,
    first_to_say,
    form,
    machines,
    marks,
    one_history,
)

pytestmark = pytest.mark.needs_root_netns

EVICTED_S, HEALED_S, NOTICED_S = 3.0, 5.0, 0.5
SUSPECTED_S = 3.5
"""Longer than any silence that is only suspected."""


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Five machines, none of them up before the first test."""
    root = tmp_path_factory.mktemp("machines")
    with Network(5) as network, machines(network, root) as made:
        yield made


Members = Callable[[int], list[Machine]]


@pytest.fixture
def members_of(five: list[Machine], request: pytest.FixtureRequest) -> Members:
    """``members_of(n)``: the first n of the five in one view, the others down; the leader first.

    What the agents learnt of late heartbeats while others started is forgotten before they go on:
    with --long wholly, else as far as there is time.
    """
    is_long = request.config.getoption("--long")
    settle_s = 6.0 if is_long else 1.0

    def get(number: int) -> list[Machine]:
        up = [each for each in five if each.is_up]
        is_changed = len(up) != number
        for each in reversed(up[number:]):  # one by one: the dead at once must not be a majority
            each.kill()
            up.remove(each)
            agreed(*up)
        form(*five[:number])
        if is_changed or is_long:
            five[0].changes_nothing(settle_s, since=five[0].mark)
        leader = five[0].leader
        return sorted(five[:number], key=lambda each: each.id != leader)

    return get


def test_three_agents_form_a_cluster(five: list[Machine], figures: Figures) -> None:
    took = form(*five[:3])
    figures.take("three hosts with `potluck up`, all ways", "in one view after", took, asked=5.0)


def test_a_cable_out_for_half_a_second_and_an_agent_stopped_for_one_change_nothing(
    members_of: Members, figures: Figures
) -> None:
    members = members_of(3)
    bob, carl = members[1:]
    since = marks(members)
    carl.host.link(up=False)
    carl.changes_nothing(0.5, since=since[carl])
    carl.host.link(up=True)
    carl.changes_nothing(SUSPECTED_S, since=since[carl])
    bob.signal(signal.SIGSTOP)
    carl.changes_nothing(1.0, since=since[carl])
    bob.signal(signal.SIGCONT)
    carl.changes_nothing(SUSPECTED_S, since=since[carl])
    changes = len([view for each in members for view in each.views_since(since[each])])
    figures.take("link down 0.5 s and up", "views changed:", changes, asked=0, unit="")
    figures.take("agent stopped (SIGSTOP) for 1 s", "views changed:", changes, asked=0, unit="")


@pytest.mark.parametrize("who", ["an agent", "the leader's agent"])
def test_a_killed_agent_is_out_at_once(members_of: Members, figures: Figures, who: str) -> None:
    leader, *members = members_of(3)
    victim = members[0] if who == "an agent" else leader
    others = [each for each in (leader, *members) if each is not victim]
    since = marks(others)
    killed = victim.kill()
    noticed = agreed(*others, since=since) - killed
    figures.take(f"SIGKILL of {who}", "out of the view after", noticed, asked=NOTICED_S)
    took = form(leader, *members)
    figures.take(f"SIGKILL of {who}", "in again after its start", took, asked=HEALED_S)


@pytest.mark.parametrize(
    "way", ["link down", pytest.param("blackhole routes", marks=pytest.mark.long)]
)
def test_a_host_that_is_cut_off_is_evicted_pauses_and_comes_back(
    members_of: Members, figures: Figures, way: str
) -> None:
    ada, bob, carl = members_of(3)
    before, since, began = ada.epoch, marks([ada, bob, carl]), time.monotonic()
    cut(carl, way, on=True)
    evicted = agreed(ada, bob, since=since) - began
    paused = carl.says("paused: ", since=since[carl]) - began
    since, healing = marks([ada, bob, carl]), time.monotonic()
    cut(carl, way, on=False)
    healed = agreed(ada, bob, carl, since=since) - healing
    fault = f"host cut off ({way})"
    figures.take(fault, "evicted after", evicted, asked=EVICTED_S)
    figures.take(fault, "it says that it pauses after", paused)
    figures.take(fault, "all in one view after the heal", healed, asked=HEALED_S)
    one_history(ada, bob, carl, after=before)


def cut(machine: Machine, way: str, *, on: bool) -> None:
    if way == "link down":
        machine.host.link(up=not on)
    else:
        machine.host.routes(not on)


def test_an_agent_that_is_stopped_for_long_is_evicted_and_comes_back(
    members_of: Members, figures: Figures, request: pytest.FixtureRequest
) -> None:
    """30 s with --long, else until a second after its eviction: it is out by then either way."""
    ada, bob, carl = members_of(3)
    is_long = request.config.getoption("--long")
    before, since = ada.epoch, marks([ada, bob, carl])
    stopped = carl.signal(signal.SIGSTOP)
    evicted = agreed(ada, bob, since=since) - stopped
    ada.changes_nothing(30.0 - evicted if is_long else 1.0, since=ada.mark)
    since = marks([ada, bob, carl])
    continued = carl.signal(signal.SIGCONT)
    back = agreed(ada, bob, carl, since=since) - continued
    fault = f"agent stopped (SIGSTOP) for {'30 s' if is_long else 'some seconds'}"
    figures.take(fault, "evicted after", evicted, asked=EVICTED_S)
    figures.take(fault, "back after SIGCONT", back, asked=HEALED_S)
    one_history(ada, bob, carl, after=before)


def test_links_broken_for_some_change_no_view(
    members_of: Members, figures: Figures, request: pytest.FixtureRequest
) -> None:
    """A to C cut, while B sees both; watched for 30 s with --long."""
    ada, bob, carl = members_of(3)
    both = ((ada, carl), (carl, ada))
    hold = 30.0 if request.config.getoption("--long") else 12.0  # a member would be out by then
    fault = f"A-C cut while B sees both, for {hold:g} s"
    holes((ada, bob, carl), figures, fault, both, hold)


@pytest.mark.long
def test_one_way_loss_changes_no_view(members_of: Members, figures: Figures) -> None:
    ada, bob, carl = members_of(3)
    holes((ada, bob, carl), figures, "one-way loss for 30 s", ((carl, ada),), 30.0)


def holes(
    members: Sequence[Machine],
    figures: Figures,
    fault: str,
    pairs: Sequence[tuple[Machine, Machine]],
    seconds: float,
) -> None:
    """Between some nothing passes for a time: they talk by way of the third, and all stay."""
    ada, _, carl = members
    before, since, began = ada.epoch, marks(members), time.monotonic()
    for sender, receiver in pairs:
        sender.host.blackhole(receiver.host)
    try:
        # Whoever notices it first talks by way of the third, so that the other one may not notice.
        first = first_to_say(" is reached by others, not from here", ada, carl, since=since)
        again = first.says(" is heard, and hears me", since=since[first])
        ada.changes_nothing(began + seconds - time.monotonic(), since=since[ada])
    finally:
        for sender, receiver in pairs:
            sender.host.blackhole(receiver.host, on=False)
    ada.changes_nothing(SUSPECTED_S, since=since[ada])
    changes = {view for each in members for view in each.views_since(since[each])}
    figures.take(fault, "they hear each other by way of the third after", again - began)
    figures.take(fault, "views changed:", len(changes), asked=0, unit="")
    assert ada.epoch == before


@pytest.mark.parametrize(
    "num_minority",
    [pytest.param(1, id="2/1"), pytest.param(2, id="3/2", marks=pytest.mark.long)],
)
def test_the_minority_of_a_partition_pauses_and_one_history_is_left(
    members_of: Members, figures: Figures, num_minority: int
) -> None:
    members = members_of(2 * num_minority + 1)
    minority, majority = members[:num_minority], members[num_minority:]  # with the leader
    before, since, began = members[0].epoch, marks(members), time.monotonic()
    network = members[0].host.network
    network.partition([each.host for each in majority], [each.host for each in minority])
    evicted = agreed(*majority, since=since) - began
    paused = max(each.says("paused: ", since=since[each]) for each in minority) - began
    shown = minority[0].cluster()
    assert shown["paused"]
    assert shown["epoch"] == before, "a minority agrees on nothing"
    since, healing = marks(members), time.monotonic()
    network.heal()
    healed = agreed(*members, since=since) - healing
    fault = f"partition {len(majority)}/{len(minority)}, the leader in the minority"
    figures.take(fault, "the majority goes on after", evicted, asked=HEALED_S)
    figures.take(fault, "the minority says that it pauses after", paused)
    figures.take(fault, "healed after", healed, asked=HEALED_S)
    one_history(*members, after=before)


def test_of_two_nodes_the_survivor_of_a_death_goes_on(
    members_of: Members, figures: Figures
) -> None:
    leader, other = members_of(2)
    since = marks([other])
    killed = leader.kill()
    noticed = other.sees(other, since=since[other]) - killed
    assert not other.cluster()["paused"]
    figures.take("two nodes, the leader's agent dies", "goes on alone", noticed, asked=NOTICED_S)


def test_of_two_nodes_that_are_cut_apart_the_leaders_side_goes_on(
    members_of: Members, figures: Figures
) -> None:
    leader, other = members_of(2)
    before, since, began = leader.epoch, marks([leader, other]), time.monotonic()
    other.host.link(up=False)
    alone = leader.sees(leader, since=since[leader]) - began
    paused = other.says("paused: ", since=since[other]) - began
    assert other.epoch == before
    since, healing = marks([leader, other]), time.monotonic()
    other.host.link(up=True)
    healed = agreed(leader, other, since=since) - healing
    fault = "two nodes, cut apart (silence)"
    figures.take(fault, "the leader's side goes on after", alone, asked=EVICTED_S)
    figures.take(fault, "the other says that it pauses after", paused)
    figures.take(fault, "healed after", healed, asked=HEALED_S)
    one_history(leader, other, after=before)
