"""Fixed worlds, told as stories: who is lost, what ends, what is started again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.events import (
    Agreed,
    Announce,
    Away,
    BeginWorld,
    EndWorkers,
    EndWorld,
    Event,
    Kill,
    Placed,
    Start,
    Tick,
)
from potluck._core.cluster.jobs.groups.roster import JobPolicy, Phase
from potluck._core.types import Member
from potluck._core.wire.jobs import Exited, ProcessState, Stalled, WorldSpec
from potluck._core.wire.nodes import JobGroup
from potluck._core.wire.worker_link import Entered, Failed, Finished, Ready
from support import stories

SIGTERM, SIGKILL = 15, 9


class Story(stories.Story):
    """A story of a fixed world."""

    @property
    def started(self) -> list[str]:
        return [action.worker for action in self.did if isinstance(action, Start)]

    def stopped(self) -> None:
        """All that were asked to end have ended."""
        names = [worker.name for worker in self.state.having(Phase.STOPPING)]
        self.tell(*(Exited(name, -SIGTERM) for name in names))

    def meet(self) -> None:
        """All members of the present world become ready, and enter its group."""
        self.tell(*(ready(name) for name in self.state.world.members))
        announced = self.only(Announce)
        names = tuple(member.worker for member in announced.members)
        assert names == self.state.world.members, "RANK is the place in the group"
        self.tell(*(Entered(name, announced.epoch) for name in names))


def ready(name: str) -> Ready:
    return Ready(name, port=1, node="node", is_fixed=True)


def training(num_workers: int, policy: JobPolicy | None = None) -> Story:
    story = Story(num_workers, policy)
    story.meet()
    return story


def test_a_killed_member_ends_the_world_and_all_start_as_the_next() -> None:
    story = training(3)
    story.tell(Exited("1", -SIGKILL))
    ended = story.only(EndWorld)
    assert ended.workers == ("0", "2")
    assert ended.lost == ("1",)
    assert ended.reason == (
        "worker 1 killed by SIGKILL (9): the script can't go on without it, so all workers start "
        "again (restart 1 of 3)"
    )
    assert not story.started, "the others' processes still run"
    story.tell(Exited("0", -SIGTERM))
    assert not story.started
    story.tell(Exited("2", -SIGTERM))
    begun = story.only(BeginWorld)
    assert (begun.number, begun.members) == (1, ("0", "1", "2"))
    assert story.started == ["0", "1", "2"]
    assert not any(action.alone for action in story.all(Start))
    story.meet()


def test_who_dies_before_the_ranks_met_starts_again_alone() -> None:
    story = Story(3)
    story.tell(ready("0"), ready("2"), Exited("1", -SIGKILL))
    assert story.started == ["1"]
    assert not story.all(EndWorld)
    story.tell(ready("1"))
    assert len(story.only(Announce).members) == 3


def test_a_machine_that_leaves_before_the_ranks_met_ends_the_world_at_once() -> None:
    story = Story(3)
    story.tell(ready("0"), ready("1"), Away(("2",), "carl is silent"))
    assert story.only(EndWorld).workers == ("0", "1")
    story.stopped()
    assert story.only(BeginWorld).members == ("0", "1")
    assert story.state.world.restarts == 0, "a machine that leaves is nobody's fault"
    story.meet()


def test_failures_of_survivors_count_as_consequences_whichever_is_told_first() -> None:
    story = training(3)
    story.tell(Failed("0", "connection closed by peer", secondary=True), Exited("0", 1))
    assert not story.did, "it may follow from a loss that is not known yet"
    story.tell(Exited("1", -SIGKILL))
    assert story.only(EndWorld).workers == ("2",)
    story.tell(Failed("2", "connection closed by peer", secondary=True))
    story.tell(Exited("2", 1))
    assert story.started == ["0", "1", "2"]
    assert story.state.failure is None


def test_a_script_that_raises_fails_the_job_also_if_the_others_words_come_first() -> None:
    story = training(2)
    story.tell(Failed("0", "connection closed by peer", secondary=True))
    story.tell(Failed("1", "ValueError: no such file"))
    assert story.only(EndWorkers).reason == "ValueError: no such file"
    story.tell(Exited("1", 1), Exited("0", 1))
    assert story.state.over
    assert story.state.exit_code == 1
    assert not story.all(EndWorld)


def test_an_exit_without_a_word_fails_the_job_if_no_loss_explains_it() -> None:
    story = training(2)
    story.tell(Finished("0"), Exited("0", 3))
    assert not story.did
    story.tell(Tick(), at=story.state.next_wakeup())
    assert story.only(EndWorkers).workers == ("1",)
    story.tell(Exited("1", -SIGTERM))
    assert story.state.over
    assert story.state.exit_code == 3


def test_an_exit_code_counts_when_all_have_said_that_they_finished() -> None:
    """By `sys.exit(3)` at the end of a script, of which the interpreter's exit hooks don't know."""
    story = training(2)
    story.tell(Finished("0"), Finished("1"), Exited("0", 3), Exited("1", 0))
    assert not story.state.over
    story.tell(Tick(), at=story.state.next_wakeup())
    assert story.state.over
    assert story.state.exit_code == 3


def test_connections_that_failed_though_nobody_died_start_the_world_again() -> None:
    story = training(2)
    story.tell(
        Failed("0", "lost rank 1", secondary=True), Failed("1", "lost rank 0", secondary=True)
    )
    story.tell(Tick(), at=story.state.next_wakeup())
    assert "lost its connections" in story.only(EndWorld).reason
    assert story.state.world.restarts == 1


def test_a_member_that_stands_still_is_ended_with_the_world() -> None:
    story = training(2)
    story.tell(Stalled("1", "worker 1 stands still"))
    assert story.only(EndWorld).workers == ("0", "1")


def test_deaths_are_limited_and_the_job_then_fails_with_the_signal() -> None:
    story = training(2, JobPolicy(max_restarts=1))
    story.tell(Exited("0", -SIGKILL))
    story.stopped()
    story.meet()
    story.tell(Exited("1", -SIGKILL))
    assert "not started again after 1 restarts" in story.only(EndWorkers).reason
    story.tell(Exited("0", -SIGTERM))
    assert (story.state.over, story.state.exit_code) == (True, 128 + SIGKILL)


def test_on_loss_fail() -> None:
    story = training(2, JobPolicy(restarts_worlds=False))
    story.tell(Exited("0", -SIGKILL))
    assert story.only(EndWorkers).workers == ("1",)
    assert story.state.failure is not None
    assert story.state.failure.code == 128 + SIGKILL


def test_a_machine_that_comes_back_waits_for_the_next_start() -> None:
    story = training(2)
    story.tell(Away(("1",), "bob is silent"))
    story.stopped()
    assert story.only(BeginWorld).members == ("0",)
    story.meet()
    story.tell(ProcessState("1", 0, 0, True))
    assert story.only(Kill).workers == ("1",), "its process is of the world before"
    story.tell(Exited("1", -SIGKILL))
    story.tell(Placed("2"))
    assert not story.started
    story.tell(Exited("0", -SIGKILL))
    assert story.only(BeginWorld).members == ("0", "1", "2")


def test_a_world_waits_for_machines_if_too_few_workers_are_left() -> None:
    story = training(2, JobPolicy(min_workers=2, wait_s=30))
    story.tell(Away(("1",), "bob is silent"))
    story.stopped()
    assert not story.started
    story.tell(Placed("1"), at=10)
    assert story.started == ["0", "1"]


def test_it_does_not_wait_for_them_for_ever() -> None:
    story = training(2, JobPolicy(min_workers=2, wait_s=30))
    story.tell(Away(("1",), "bob is silent"))
    story.stopped()
    story.tell(Tick(), at=story.state.next_wakeup())
    assert story.state.over
    assert "1 of at least 2 workers can be started" in story.state.failure.text


def test_workers_that_keep_dying_are_left_out_of_the_first_world_after_the_wait() -> None:
    story = Story(3, JobPolicy(max_restarts=100, wait_s=60))
    story.tell(ready("0"), ready("1"))
    for second in range(3, 60, 3):
        story.tell(Exited("2", -SIGKILL), Tick(), at=float(second))
        story.tell(Tick(), at=story.state.next_wakeup())
        if story.all(EndWorld):
            break
    else:
        story.tell(Tick(), at=61.0)
    assert story.only(EndWorld).lost == ("2",)
    story.stopped()
    assert story.only(BeginWorld).members == ("0", "1")


def test_a_slow_worker_is_waited_for() -> None:
    story = Story(2)
    story.tell(ready("0"))
    story.tell(Tick(), at=600.0)
    assert not story.did


def test_an_elastic_job_begins_with_those_that_are_ready_and_takes_the_others_in() -> None:
    story = Story(4, JobPolicy(max_restarts=100))
    elastic = [Ready(name, port=1) for name in story.names]
    story.tell(*elastic[:3])
    story.tell(Exited("3", -SIGKILL), at=30.0)
    story.tell(Tick(), at=60.0)
    assert [member.worker for member in story.only(Announce).members] == ["0", "1", "2"]
    story.tell(*(Entered(name, 1) for name in "012"))
    story.tell(elastic[3])
    assert story.only(Announce).joined == ("3",)


def context(num_workers: int, policy: JobPolicy | None = None) -> Story:
    """A job whose workers have contexts, so that it may be elastic."""
    story = Story(num_workers, policy)
    story.tell(*(Ready(name, port=1, node="node") for name in story.names))
    epoch = story.only(Announce).epoch
    story.tell(*(Entered(name, epoch) for name in story.names))
    return story


def gave_up(name: str) -> Failed:
    return Failed(name, "PeerLost: lost rank 1", secondary=True, gave_up=True)


@pytest.mark.parametrize("is_told_first", ["the loss", "the failure"])
def test_a_script_that_ends_at_its_first_loss_is_not_elastic(is_told_first: str) -> None:
    story = context(3)
    events = [Exited("1", -SIGKILL), gave_up("0")]
    story.tell(*(events if is_told_first == "the loss" else reversed(events)))
    assert "the script can't go on without it, so all workers start again (restart 1 of 3)" in (
        story.only(EndWorld).reason
    )
    story.tell(gave_up("2"), Exited("0", 1), Exited("2", 1))
    if story.phase("1") is Phase.STOPPING:
        story.tell(Exited("1", -SIGTERM))
    assert story.only(BeginWorld).members == ("0", "1", "2")
    assert {action.worker for action in story.all(Start)} == {"0", "1", "2"}
    assert story.state.failure is None
    assert story.state.world.restarts == 1
    story.meet()


def test_a_script_that_turns_out_not_to_be_elastic_keeps_the_order_of_its_ranks() -> None:
    """The ranks of an elastic job follow the ring of its nodes, not the names of its workers."""
    story = Story(3)
    story.state = replace(story.state, ring=("ada", "carl", "bob"))
    for name, node in zip(story.names, ("ada", "bob", "carl"), strict=True):
        story.tell(Ready(name, port=1, node=node))
    announced = story.only(Announce)
    assert [member.worker for member in announced.members] == ["0", "2", "1"]
    story.tell(*(Entered(name, announced.epoch) for name in story.names))
    story.tell(gave_up("0"))
    assert not story.all(EndWorld), "the loss that explains the failure is not told yet"
    story.tell(Exited("2", -SIGKILL))
    assert "(restart 1 of 3)" in story.only(EndWorld).reason


def test_a_context_s_script_that_loses_a_machine_starts_again_without_counting_it() -> None:
    story = context(2)
    story.tell(Away(("1",), "bob is silent"), gave_up("0"))
    story.tell(Exited("0", 1))
    assert story.only(BeginWorld).members == ("0",)
    assert story.state.world.restarts == 0


def test_a_context_s_script_fails_if_others_have_finished_or_its_loss_is_to_fail_it() -> None:
    story = context(2)
    story.tell(Finished("1"), Exited("1", 0), gave_up("0"), Exited("0", 1))
    assert (story.state.over, story.state.exit_code) == (True, 1)
    story = context(2, JobPolicy(restarts_worlds=False))
    story.tell(Exited("1", -SIGKILL), gave_up("0"))
    assert "by --on-loss fail" in story.state.failure.text


def test_what_a_node_repeats_of_an_earlier_process_changes_nothing() -> None:
    story = training(2)
    story.tell(Exited("1", -SIGKILL, 0))
    story.stopped()
    story.tell(Exited("1", -SIGKILL, 0), Exited("0", -SIGTERM, 0))
    assert not story.did
    story.meet()


def test_another_leader_goes_on_with_the_world_if_all_of_it_is_there() -> None:
    world = WorldSpec(4, ("0", "1"), 2, is_fixed=True)
    members = tuple(Member(name, "node", port=1) for name in "01")
    group = JobGroup("job", 9, members, world=4)
    state = membership.take_over("01", JobPolicy(), 9, group, world)
    story = Story(2)
    story.state = state
    story.tell(Tick(), ProcessState("0", 7, 4, True), ProcessState("1", 7, 4, True))
    assert not story.did
    story.tell(Exited("0", -SIGKILL, 7))
    story.stopped()
    assert story.only(BeginWorld).number == 5
    assert {action.attempt for action in story.all(Start)} == {8}, "known to no node yet"


def test_another_leader_ends_a_world_that_lost_members_with_the_leader() -> None:
    world = WorldSpec(4, ("0", "1"), 2, is_fixed=True)
    group = JobGroup("job", 9, (Member("1", "node", port=1),), world=4)
    state = membership.take_over("01", JobPolicy(), 9, group, world)
    story = Story(2)
    story.state = state
    story.tell(Away(("0",), "ada has ended"))
    assert story.only(EndWorld).workers == ("1",)
    story.stopped()
    assert story.only(BeginWorld).members == ("1",)


def test_a_view_that_shrank_ends_the_world() -> None:
    story = training(3)
    story.tell(Agreed(7, ("0", "1"), reason="carl is silent"), Away(("2",), "carl left"))
    assert story.only(EndWorld).workers == ("0", "1")
    assert story.phase("2") is Phase.AWAY


def test_random_losses_never_leave_two_worlds_and_always_train_again() -> None:
    """Deaths, lost machines and returns in any order: at most one process of each worker, all of
    one world, and in the end all workers that have a machine train together."""
    for seed in range(100):
        check_random_losses(seed)


def check_random_losses(seed: int) -> None:
    chance = random.Random(seed)
    story = Story(chance.randint(1, 5), JobPolicy(max_restarts=10_000))
    alive = dict.fromkeys(story.names, 0)  # the world of each running process
    is_ready: set[str] = set()
    away: set[str] = set()

    def carry_out() -> None:
        for action in story.did:
            match action:
                case Start(name):
                    assert name not in alive, "it runs already"
                    alive[name] = story.state.world.number
                    is_ready.discard(name)
                case Announce(members=members):
                    worlds = {alive[member.worker] for member in members}
                    assert worlds == {story.state.world.number}
                case EndWorld(workers=names) | Kill(workers=names):
                    ending.update(name for name in names if name in alive)
                case _:
                    pass

    def tell(event: Event) -> None:
        story.tell(event)
        carry_out()

    def exits(name: str, code: int) -> None:
        del alive[name]
        ending.discard(name)
        tell(Exited(name, code))

    ending: set[str] = set()
    for _ in range(200):
        story.now += 0.5
        reachable = sorted(set(alive) - away)
        match chance.randrange(8):
            case 0 if reachable:
                exits(chance.choice(reachable), -SIGKILL)
            case 1 if len(away) < len(story.names) - 1:
                name = chance.choice(sorted(set(story.names) - away))
                away.add(name)
                tell(Away((name,), f"the machine of {name} is silent"))
            case 2 if away:
                name = chance.choice(sorted(away))
                away.discard(name)
                if name in alive:
                    attempt = story.state.worker(name).attempt
                    tell(ProcessState(name, attempt, alive[name], True))
                else:
                    tell(Placed(name))
            case 3 | 4 if set(ending) - away:
                exits(chance.choice(sorted(ending - away)), -SIGTERM)
            case _ if set(reachable) - ending:
                name = chance.choice(sorted(set(reachable) - ending))
                tell(ready(name))
        tell(Tick())
    for name in sorted(away):
        tell(ProcessState(name, 0, alive[name], True) if name in alive else Placed(name))
    for _ in range(50):
        story.now += 2.0
        for name in sorted(ending):
            exits(name, -SIGTERM)
        tell(Tick())
        for name in sorted(alive):
            tell(ready(name))
    assert story.state.newest_group is not None, f"seed {seed}: no world trains"
    assert story.state.newest_group.members == story.state.world.members
    assert set(alive) == set(story.state.world.members)


@pytest.mark.parametrize("code", [1, -SIGKILL])
def test_an_old_process_on_a_machine_that_was_away_ends_without_harm(code: int) -> None:
    story = training(3)
    story.tell(Away(("2",), "carl is silent"))
    story.stopped()
    story.meet()
    story.tell(Exited("2", code, 0), Tick())
    assert not story.all(EndWorkers), "its links failed when it was cut off"
    assert not story.started
    assert story.phase("2") is Phase.SPARE


def test_a_worker_that_ends_before_the_ranks_met_fails_the_job() -> None:
    story = Story(3)
    story.tell(Exited("0", 0), ready("1"))
    reason = "worker 0 ended before it called init_process_group: no rank may"
    assert story.only(EndWorkers).reason == reason
    story.tell(Exited("1", -SIGTERM), Exited("2", -SIGTERM))
    assert (story.state.over, story.state.exit_code) == (True, 1)


def test_nobody_wakes_up_for_a_slow_worker_over_and_over() -> None:
    story = Story(2)
    story.tell(ready("0"))
    story.tell(Tick(), at=600.0)
    assert story.state.next_wakeup() is None


def test_a_world_meets_again_after_its_group_was_destroyed() -> None:
    story = training(2)
    first = story.state.epoch
    story.tell(Finished("0"), ready("0"))
    assert not story.all(Announce), "worker 1 is in the first group"
    story.tell(ready("1"))
    assert not story.all(Announce), "what is told again of the first group changes nothing"
    story.tell(Finished("1"), ready("1"))
    again = story.only(Announce)
    assert again.epoch == first + 1
    assert [member.worker for member in again.members] == ["0", "1"]
    story.tell(Entered("0", again.epoch), Entered("1", again.epoch))
    story.tell(Exited("0", -SIGKILL))
    assert story.only(EndWorld).workers == ("1",)


def test_a_world_does_not_wait_for_a_member_that_has_ended() -> None:
    story = training(2)
    story.tell(Finished("0"), Exited("0", 0), Finished("1"), ready("1"))
    assert "worker 0 has ended" in story.only(EndWorkers).reason


def test_a_world_that_meets_again_is_ended_by_a_loss() -> None:
    story = training(3)
    story.tell(Finished("0"), ready("0"))
    story.tell(Exited("0", -SIGKILL))
    assert story.only(EndWorld).workers == ("1", "2")
    story.stopped()
    story.meet()
