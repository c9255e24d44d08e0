"""Many machines in the simulator: seeded faults, told stories, and proof that it finds bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from potluck._core.cluster.membership import paxos, reachability
from potluck._core.cluster.membership.failure_detector import FailureDetector
from potluck._core.cluster.membership.outbox import StableStorage
from potluck._core.cluster.membership.protocol import MembershipProtocol
from potluck._core.wire.nodes import StableRecord, ViewMember
from support.cluster_sim.__main__ import main, run_world
from support.cluster_sim.faults import KINDS, Fault
from support.cluster_sim.hosts import JOB
from support.cluster_sim.liars import ALL, Attack, LiarWorld
from support.cluster_sim.world import BanWorld, Broken, World

pytestmark = pytest.mark.costly

SEEDS_PER_TEST = 20
NUM_SEEDS = 60
"""Played each time, of each kind of world; others with --long, and 10,000 by the soak."""


def seeds(end: int) -> pytest.MarkDecorator:
    """The first seeds, those from ``NUM_SEEDS`` to ``end`` with --long."""
    firsts = range(0, end, SEEDS_PER_TEST)
    long = [pytest.param(first, marks=pytest.mark.long) for first in firsts if first >= NUM_SEEDS]
    return pytest.mark.parametrize("first", [*range(0, NUM_SEEDS, SEEDS_PER_TEST), *long])


@pytest.mark.parametrize("world", [World, BanWorld, LiarWorld])
def test_each_fault_occurs_several_times_in_the_seeds_that_are_always_played(
    world: Callable[[int], World],
) -> None:
    found = Counter(fault.kind for seed in range(NUM_SEEDS) for fault in world(seed).plan)
    own = {"ban"} if world is LiarWorld else set()  # it bans the liar in any case
    assert found.keys() == KINDS.keys() - own
    assert min(found.values()) >= 4


@seeds(200)
def test_seeds(first: int) -> None:
    num_commits = 0
    for seed in range(first, first + SEEDS_PER_TEST):
        world = World(seed)
        world.run()
        num_commits += world.num_commits
    assert num_commits > 50 * SEEDS_PER_TEST, "the jobs did train meanwhile"


def test_a_seed_is_the_same_world_every_time() -> None:
    worlds = [World(17) for _ in range(2)]
    for world in worlds:
        world.run()
    assert worlds[0].lines == worlds[1].lines
    assert worlds[0].lines != World(18).lines


@seeds(60)
def test_bans_under_cuts_end_in_one_view(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        assert run_world(BanWorld(seed)) == ""


# ---------------------------------------------------------------- liars


@seeds(100)
def test_a_liar_breaks_nothing(first: int) -> None:
    """What must hold in spite of a liar: ``support.cluster_sim.liars``."""
    for seed in range(first, first + SEEDS_PER_TEST):
        assert run_world(LiarWorld(seed)) == ""


@pytest.mark.parametrize(
    "seed", range(4), ids=["outsider", "member", "outsider, cuts", "member, cuts"]
)
@pytest.mark.parametrize("attack", ALL, ids=lambda attack: attack.__name__)
def test_an_attack_again_and_again_breaks_nothing(attack: Attack, seed: int) -> None:
    assert run_world(LiarWorld(seed, attack)) == ""


# ---------------------------------------------------------------- stories


class Story:
    """A cluster of so many hosts, formed and training in peace for ten seconds; then a plan."""

    def __init__(self, num_hosts: int, *faults: Fault, seed: int = 1) -> None:
        self.world = World(seed, faults, num_hosts)
        self.world.begin()
        for fault in faults:
            assert fault.at >= 10
            self.world.queue.at(fault.at, lambda fault=fault: self.world._strike(fault))
        self.until(10)
        view = self.view_of("a")
        assert view is not None
        assert set(view.nodes) == set(self.world.hosts)
        self.order = list(view.nodes)

    def until(self, when: float) -> None:
        self.world.queue.run(when)

    def view_of(self, name: str) -> Any:
        node = self.world.hosts[name].node
        return None if node is None else node.view

    def paused(self, name: str) -> bool:
        node = self.world.hosts[name].node
        return node is not None and bool(node.paused)

    def steps(self, name: str) -> int:
        worker = self.world.hosts[name].worker
        assert worker is not None
        return len(worker.log or ())

    def evicted_after(self, name: str, since: float) -> float:
        """Seconds until a view without ``name``; it must have come."""
        return next(
            at - since
            for at, _, view in self.world.changes
            if at >= since and name not in view.nodes
        )

    def num_views(self, since: float) -> int:
        """How many different views came into use."""
        return len({view.epoch for at, _, view in self.world.changes if at >= since})


def senior_first(num_hosts: int, seed: int = 1) -> list[str]:
    """The hosts of the cluster that ``seed`` makes, the most senior first."""
    return Story(num_hosts, seed=seed).order


def test_three_hosts_form_one_cluster_within_five_seconds() -> None:
    story = Story(3)
    formed = [at for at, _, view in story.world.changes if len(view.nodes) == 3]
    assert formed[0] <= 5
    assert story.steps("a") > 10


def test_a_killed_agent_is_out_in_half_a_second_and_the_others_train_on() -> None:
    leader, *_ = senior_first(3)
    story = Story(3, Fault("kill", 12, 5, (leader,)))
    story.until(14)
    assert story.evicted_after(leader, 12) <= 0.5
    others = sorted(set(story.world.hosts) - {leader})
    before = story.steps(others[0])
    story.until(16)
    assert story.steps(others[0]) > before
    story.until(25)
    assert len(story.view_of(leader).nodes) == 3, "it came back"


def test_a_host_cut_off_is_out_in_three_seconds_and_back_after_the_heal() -> None:
    *_, last = senior_first(3)
    story = Story(3, Fault("isolate", 12, 8, (last,)))
    story.until(19)
    assert 1.5 <= story.evicted_after(last, 12) <= 3
    assert story.paused(last)
    story.until(25)
    assert set(story.view_of(last).nodes) == {"a", "b", "c"}
    assert not story.paused(last)


def test_a_link_that_is_down_for_half_a_second_evicts_nobody() -> None:
    story = Story(3, Fault("isolate", 12, 0.5, ("b",)))
    story.until(25)
    assert story.num_views(since=12) == 0


@pytest.mark.parametrize(("num_hosts", "num_minority"), [(3, 1), (5, 2)])
def test_the_minority_commits_nothing_and_says_so(num_hosts: int, num_minority: int) -> None:
    order = senior_first(num_hosts)
    minority, majority = order[:num_minority], order[num_minority:]  # the leader is cut off
    story = Story(num_hosts, Fault("partition", 12, 10, tuple(minority)))
    story.until(16)
    at_pause = [story.steps(name) for name in minority]
    assert all(story.paused(name) for name in minority)
    before = story.steps(majority[0])
    story.until(21)
    assert [story.steps(name) for name in minority] == at_pause
    assert story.steps(majority[0]) > before
    story.until(27)
    assert set(story.view_of(minority[0]).nodes) == set(order)
    assert abs(story.steps(minority[0]) - story.steps(majority[0])) <= 1, "one history"


def test_of_two_the_leader_goes_on_when_the_other_is_silent() -> None:
    leader, other = senior_first(2)
    story = Story(2, Fault("cut", 12, 8, (leader, other)))
    story.until(19)
    assert story.paused(other)
    assert story.view_of(leader).nodes == (leader,)
    assert story.steps(leader) > story.steps(other)


def test_of_two_the_survivor_goes_on_when_the_leader_dies() -> None:
    leader, other = senior_first(2)
    story = Story(2, Fault("kill", 12, 8, (leader,)))
    before = story.steps(other)
    story.until(16)
    assert story.view_of(other).nodes == (other,)
    assert story.steps(other) > before + 4


def test_of_two_the_other_waits_when_the_leaders_machine_loses_power() -> None:
    """From silence alone it can't know; the leader's disk tells when it is back."""
    leader, other = senior_first(2)
    story = Story(2, Fault("power off", 12, 6, (leader,)))
    story.until(17.5)
    assert story.paused(other)
    story.until(25)
    assert set(story.view_of(other).nodes) == {leader, other}
    assert story.view_of(other).leader == other


@pytest.mark.parametrize("kind", ["cut", "cut one way"])
@pytest.mark.parametrize("pair", [(0, 2), (1, 2), (0, 1)])
def test_a_cut_that_a_third_host_sees_around_does_not_flap(
    kind: str, pair: tuple[int, int]
) -> None:
    order = senior_first(3)
    cut = order[pair[0]], order[pair[1]]
    story = Story(3, Fault(kind, 12, 30, cut))
    story.until(42)
    nodes = story.view_of(order[0]).nodes
    assert order[pair[1]] not in nodes, "the less senior end is out"
    assert len(nodes) == 2
    assert (
        len({v.epoch for at, _, v in story.world.changes if at > 12 and len(v.members) != 2}) == 0
    )
    assert story.num_views(since=12) == 1
    story.until(60)
    assert set(story.view_of(order[0]).nodes) == set(order)


def test_an_agent_stopped_for_a_second_is_not_evicted_for_thirty_it_is_and_comes_back() -> None:
    story = Story(3, Fault("freeze", 12, 1, ("b",)), Fault("freeze", 20, 30, ("c",)))
    story.until(20)
    assert story.num_views(since=12) == 0
    story.until(45)
    assert story.evicted_after("c", 20) <= 3.5
    story.until(60)
    assert set(story.view_of("c").nodes) == {"a", "b", "c"}


def test_loss_and_delay_make_it_slower_only() -> None:
    story = Story(3)
    for wire in story.world.network.wires.values():
        wire.loss, wire.delay_s, wire.jitter_s = 0.01, 0.03, 0.04
    story.until(40)
    assert story.num_views(since=10) == 0


def test_clocks_a_day_apart_have_no_effect() -> None:
    story = Story(3)
    offsets = [host.offset for host in story.world.hosts.values()]
    assert max(offsets) - min(offsets) > 3600
    assert story.num_views(since=5) == 0


def test_a_banned_node_is_out_and_stays_out() -> None:
    story = Story(3, Fault("ban", 12, 1, ("b", "c")))
    story.until(30)
    assert set(story.view_of("a").nodes) == {"a", "b"}
    assert story.view_of("c") is None
    assert all("c" not in view.nodes for at, _, view in story.world.changes if at > 15)


def test_of_two_the_other_goes_on_as_a_fork_when_the_leader_is_banned() -> None:
    leader, other = senior_first(2)
    story = Story(2, Fault("ban", 12, 0, (other, leader)))
    before = story.steps(other)
    story.until(16)
    view = story.view_of(other)
    assert view.nodes == (other,)
    assert view.fork_of, "the leader may have decided the next view already"
    assert not story.paused(other)
    assert story.steps(other) > before + 4, "its worker has kept its state"


def test_all_that_two_bans_leave_go_on_together() -> None:
    """Half of the nodes without the most senior are no majority; the first of them forks, the other
    joins it."""
    first, second, third, last = senior_first(4)
    cut = Fault("partition", 12, 15, (first, second))
    story = Story(4, cut, Fault("ban", 13, 0, (third, first)), Fault("ban", 13, 0, (last, second)))
    before = story.steps(last)
    story.until(20)
    assert story.view_of(third).nodes == story.view_of(last).nodes == (third, last)
    assert story.steps(last) > before + 4
    story.until(32)
    assert story.view_of(third).nodes == (third, last), "also when the banned nodes are back"
    assert story.view_of(first) is None


def test_an_operator_may_order_a_minority_to_go_on_and_it_gives_way_after_the_heal() -> None:
    *_, last = senior_first(3)
    cut = Fault("partition", 12, 15, (last,))
    story = Story(3, cut, Fault("continue alone", 18, 1, (last,)))
    story.until(20)
    fork = story.view_of(last)
    assert fork.nodes == (last,)
    assert fork.fork_of
    story.until(26)
    in_fork = story.steps(last)
    story.until(40)
    assert set(story.view_of(last).nodes) == {"a", "b", "c"}
    assert not story.view_of(last).fork_of
    worker = story.world.hosts[last].worker
    assert worker is not None
    assert "fork" not in worker.branch, "it dropped what it did alone"
    assert in_fork > 0


def test_an_idle_cluster_comes_to_a_smaller_one_with_a_job_when_its_agents_start_again() -> None:
    """They stay apart before: one node that claims to have a job must not get a whole cluster. What
    the documentation tells the user to do helps."""
    world = World(1, [], 4, job=False)
    busy, *idle = world.hosts.values()
    world._split([busy.name], 30)
    world.begin()
    world.queue.run(10)
    assert busy.begin_job()
    world.queue.run(60)
    nodes = [host.node for host in world.hosts.values()]
    views = [node.view.nodes for node in nodes if node is not None and node.view is not None]
    assert [len(view) for view in views] == [1, 3, 3, 3]
    world._crash(idle, 0.5, is_seen=True)
    world.queue.run(70)
    world.check_converged()
    assert busy.node is not None
    assert busy.node.view is not None
    group = busy.node.view.group(JOB)
    assert group is not None
    assert len(group.members) == 4, "and their workers take part in the job"


def test_all_machines_lose_power_and_come_back() -> None:
    story = Story(3, Fault("power cut of all", 12, 1, ("a", "b", "c")))
    epoch = story.view_of("a").epoch
    story.until(25)
    view = story.view_of("a")
    assert set(view.nodes) == {"a", "b", "c"}
    assert view.epoch > epoch


# ---------------------------------------------------------------- bugs that it found

FOUND = {
    2649: "a ban that a crash kept from the disk is no ban",
    108: "a view decided before a ban was known is used after",
    436: "a member that had accepted to leave a node out granted it leases again",
    486: "a node that had resigned from a view was awaited in it",
    1199: "a node left a view for a ban, which nobody else could see",
    1223: "a proposer that completes an older view used it without being in it",
    985: "a member refused to accept again what it had accepted",
    901: "workers with an old state took the place of all that had ended",
    6857: "a node that had gone on alone granted leases to the one it had left out",
    11703: "workers of a first group that had never compared notes began it again on their own",
    2211: "a view that could not be decided any more was offered again for ever",
    1473: "a newcomer that had not received the state went on alone with none",
    41892: "those left by a ban decided in the history that the banned leader went on in",
    42067: "two forks of one history, of the same size and with its job, never merged",
    42416: "a node was awaited in a view, and did not answer since its own epoch was far lower",
}


@pytest.mark.parametrize("seed", FOUND, ids=FOUND.values())
def test_what_it_found(seed: int) -> None:
    World(seed).run()


LIES = {
    3705: "a report of what follows another view stopped all",
    4977: "a proposal after the decision kept its members from the decided view, for ever",
    3885: "what a banned member had said of its vote kept the others from the decided view",
}


@pytest.mark.parametrize("seed", LIES, ids=LIES.values())
def test_what_liars_found(seed: int) -> None:
    assert run_world(LiarWorld(seed)) == ""


LATE_REFUSAL = (
    Fault("cut", 12, 10, ("SENIOR", "b")),
    Fault("cut", 12, 28, ("SENIOR", "c")),
    Fault("kill", 20, 20, ("b",)),
)


def late_refusal() -> list[Fault]:
    """The most senior is cut off; the others go on without it, then one of them dies. When the
    host of the dead answers again, its death must not count: it had agreed to the view that the
    last one goes on in."""
    senior, b, c = senior_first(3)
    names = {"SENIOR": senior, "b": b, "c": c}
    return [
        Fault(f.kind, f.at, f.duration, tuple(names[host] for host in f.hosts))
        for f in LATE_REFUSAL
    ]


def test_a_death_seen_late_is_not_subtracted() -> None:
    story = Story(3, *late_refusal())
    senior, _, last = story.order
    story.until(30)
    assert story.paused(senior)
    assert story.view_of(last).nodes == (last,)


# ---------------------------------------------------------------- it does find bugs


def failures(seeds: range, **options: Any) -> Iterator[str]:
    for seed in seeds:
        try:
            World(seed, **options).run()
        except Broken as error:
            yield str(error)


def first_failure(seeds: range, **options: Any) -> str:
    return next(failures(seeds, **options), "")


def test_it_notices_a_majority_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paxos, reachability):
        monkeypatch.setattr(module, "has_majority", lambda members, acks, dead=(): True)
    found = failures(range(30))
    assert any("two views in epoch" in each or " commits " in each for each in found)


def test_it_notices_that_both_halves_of_an_even_split_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half(members: tuple[ViewMember, ...], acks: set[str], dead: tuple[str, ...] = ()) -> bool:
        living = [member for member in members if member.node not in dead]
        return 2 * sum(member.node in acks for member in living) >= len(living)

    for module in (paxos, reachability):
        monkeypatch.setattr(module, "has_majority", half)
    assert first_failure(range(30))


def test_it_notices_a_node_that_forgets_its_epoch() -> None:
    class Forgetful(MembershipProtocol):
        def __init__(self, me: str, incarnation: int, record: StableRecord, *rest: Any) -> None:
            super().__init__(me, incarnation, StableRecord(), *rest)

    assert "back to" in first_failure(range(10), make_node=Forgetful)


def test_it_notices_an_epoch_used_before_it_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    save = StableStorage.save

    def hasty(self: StableStorage, record: StableRecord, then: Any = ()) -> None:
        if isinstance(then, tuple):
            self._outbox.act(*then)
            then = ()
        save(self, record, then)

    monkeypatch.setattr(StableStorage, "save", hasty)
    assert "not on its disk" in first_failure(range(1))


def test_it_notices_deaths_subtracted_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailureDetector, "has_lease", lambda self, node, now: True)
    with pytest.raises(Broken, match=r"commits step|two views"):
        Story(3, *late_refusal()).until(39)


# ---------------------------------------------------------------- the command


def test_the_soak_names_the_seeds_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "4", "--jobs", "2"]) == 0
    assert "4 of 4 seeds" in capsys.readouterr().out
    assert main(["--show", "3"]) == 0
    assert "nothing wrong" in capsys.readouterr().out
