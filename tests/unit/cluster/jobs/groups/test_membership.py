"""Membership, told as stories: what happens, at what time, and what is done about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.events import (
    Announce,
    EndGroup,
    EndWorkers,
    Interrupted,
    Kill,
    Note,
    SendProbe,
    Start,
    Tick,
)
from potluck._core.cluster.jobs.groups.roster import JobPolicy, Phase, name_exit
from potluck._core.types import Member
from potluck._core.wire import jobs, peers
from potluck._core.wire.format import PREFIX_BYTES
from potluck._core.wire.jobs import Disconnected, Exited, Stalled, WorldSpec
from potluck._core.wire.nodes import JobGroup
from potluck._core.wire.worker_link import Entered, Failed, Finished, Lost, ProbeReply, Ready
from support import stories

SIGKILL, SIGINT, SIGSEGV = 9, 2, 11


class Story(stories.Story):
    """A story of an elastic job."""

    @property
    def group(self) -> tuple[int, str]:
        """The newest group as (epoch, names in rank order)."""
        assert self.state.newest_group is not None
        return self.state.newest_group.epoch, " ".join(self.state.newest_group.members)

    def enter(self, *names: str) -> None:
        """All of ``names`` (default: all members) install the newest group."""
        group = self.state.newest_group
        assert group is not None
        self.tell(*(Entered(name, group.epoch) for name in names or group.members))


def ready(name: str, after_epoch: int = 0, port: int = 0) -> Ready:
    return Ready(name, after_epoch, port or 5000 + int(name), node="node", host="127.0.0.1")


def training(num_workers: int, policy: JobPolicy | None = None) -> Story:
    """A story that begins with all workers in the first group."""
    story = Story(num_workers, policy)
    story.tell(*(ready(str(index)) for index in range(num_workers)))
    story.enter()
    return story


# The beginning.


def test_a_job_starts_every_worker() -> None:
    story = Story(3)
    assert [(action.worker, action.attempt) for action in story.all(Start)] == [
        ("0", 0),
        ("1", 0),
        ("2", 0),
    ]


def test_the_first_group_waits_for_every_worker() -> None:
    story = Story(3)
    assert story.tell(ready("2"), ready("0")) == ()
    story.tell(ready("1"))
    announced = story.only(Announce)
    assert announced.epoch == 1
    assert [member.worker for member in announced.members] == ["0", "1", "2"]
    assert announced.members[1].port == 5001
    assert announced.joined == ("0", "1", "2")
    assert announced.reason == "all workers are ready"


def test_the_first_group_does_not_begin_with_fewer_than_min_workers() -> None:
    story = Story(3, JobPolicy(min_workers=2, wait_s=60))
    story.tell(ready("0"))
    story.tell(Tick(), at=60.0)
    assert not story.did
    assert story.state.next_wakeup() is None, "nothing changes until another worker is ready"
    story.tell(ready("2"), at=90.0)
    assert story.group == (1, "0 2")
    assert "worker 1 is not ready after 60 s and comes in later" in story.only(Announce).reason


def test_ranks_follow_numbers_not_letters() -> None:
    story = training(11)
    assert story.group == (1, "0 1 2 3 4 5 6 7 8 9 10")


def test_ranks_follow_the_ring_of_nodes_and_the_most_senior_stays_the_first() -> None:
    story = Story(4)
    story.state = replace(story.state, ring=("a", "c", "b", "d"))
    for name, node in zip("0123", "bacd", strict=True):
        story.tell(Ready(name, node=node))
    assert story.group == (1, "0 3 1 2"), "b, d, a, c"


def test_the_epoch_goes_on_from_the_highest_one_ever_used() -> None:
    state, _ = membership.begin(["0"], JobPolicy(), epoch=41)
    _, actions = membership.handle(state, ready("0"), 0.0)
    assert [action.epoch for action in actions if isinstance(action, Announce)] == [42]


def test_a_worker_killed_before_the_first_view_is_started_again_and_waited_for() -> None:
    story = Story(2)
    story.tell(ready("0"), Exited("1", -SIGKILL))
    assert story.only(Start).worker == "1"
    assert not story.all(Announce)
    story.tell(ready("1"))
    assert story.group == (1, "0 1")


def test_a_worker_that_ends_well_without_ever_joining_is_not_waited_for() -> None:
    story = Story(2)
    story.tell(ready("0"), Exited("1", 0))
    assert story.group == (1, "0")


def test_scripts_that_never_join_run_to_their_own_ends() -> None:
    story = Story(2)
    story.tell(Exited("0", 0))
    assert not story.state.over
    story.tell(Exited("1", 0))
    assert story.state.over
    assert story.state.exit_code == 0


def test_a_script_that_was_killed_and_then_ran_to_its_end_is_no_failure() -> None:
    story = Story(2)
    story.tell(Exited("1", -SIGKILL), Exited("0", 0), Exited("1", 0))
    assert story.state.over
    assert story.state.exit_code == 0


# A death.


def test_a_killed_worker_is_out_at_once_and_started_again() -> None:
    story = training(4)
    story.tell(Exited("2", -SIGKILL), at=10.0)
    ended, announced, start = story.did
    assert ended == EndGroup(1, "2", True, ("0", "1", "3"), "worker 2 killed by SIGKILL (9)")
    assert isinstance(announced, Announce)
    assert announced.epoch == 2
    assert [member.worker for member in announced.members] == ["0", "1", "3"]
    assert announced.joined == ()
    assert "killed by SIGKILL (9)" in announced.reason
    assert start == Start("2", 1, "restart 1 of 3")


def test_a_restarted_worker_comes_back_as_the_most_junior() -> None:
    story = training(4)
    story.tell(Exited("0", -SIGKILL))
    assert story.group == (2, "1 2 3")
    story.enter()
    story.tell(ready("0", port=6000))
    assert story.group == (3, "1 2 3 0")
    announced = story.only(Announce)
    assert announced.joined == ("0",)
    assert announced.members[3].port == 6000
    assert announced.reason == "worker 0 comes in"
    assert not story.all(EndGroup), "nobody is torn out of a step for a newcomer"


def test_a_newcomer_waits_until_all_have_entered_the_present_view() -> None:
    story = training(3)
    story.tell(Exited("2", -SIGKILL))
    story.enter("0")
    story.tell(ready("2"))
    assert story.group == (2, "0 1")
    story.tell(Entered("1", 2))
    assert story.group == (3, "0 1 2")


def test_what_a_node_tells_of_its_workers_is_an_event_as_it_comes_off_the_wire() -> None:
    story = training(3)
    told = (ProbeReply("2", 1), Lost("0", 1, rank=1, cause="silent"), Exited("1", -SIGKILL))
    for event in told:
        data = peers.MESSAGE.encode(jobs.WorkerEvent("job", event))
        message = peers.MESSAGE.decode(data[PREFIX_BYTES:])
        assert isinstance(message, jobs.WorkerEvent)
        story.tell(message.event)
    assert story.group == (2, "0 2")


def test_two_deaths_in_a_row_give_two_views() -> None:
    story = training(4)
    story.tell(Exited("1", -SIGKILL), Exited("3", -SIGKILL))
    assert story.group == (3, "0 2")
    first, second = story.all(EndGroup)
    assert (first.epoch, first.worker, first.to) == (1, "1", ("0", "2", "3"))
    assert (second.epoch, second.worker, second.to) == (2, "3", ("0", "2"))


def test_a_newcomer_that_dies_on_its_way_in_disturbs_no_working_group() -> None:
    story = training(2)
    story.tell(Exited("1", -SIGKILL))
    story.enter()
    story.tell(ready("1"))
    assert story.group == (3, "0 1")
    story.tell(Exited("1", -SIGKILL))
    assert story.group == (4, "0")
    assert story.state.group(2) is not None, "worker 0 still trains in epoch 2"
    assert story.only(EndGroup).worker == "1", "which epoch 2 does not have"


def test_a_worker_that_dies_in_its_group_is_started_again_at_once_each_time() -> None:
    story = training(2, JobPolicy(max_restarts=3, backoff_s=1.0))
    for attempt in (1, 2, 3):
        story.tell(Exited("1", -SIGKILL))
        assert story.only(Start).attempt == attempt
        story.enter()
        story.tell(ready("1"))
        story.enter()


def test_restarts_that_lead_nowhere_wait_longer_each_time_and_end() -> None:
    story = training(2, JobPolicy(max_restarts=4, backoff_s=1.0))
    for attempt, delay in enumerate((0.0, 0.0, 1.0, 2.0), start=1):
        died_at = story.now
        story.tell(Exited("1", -SIGSEGV))
        if delay:
            assert not story.all(Start)
            assert story.state.next_wakeup() == died_at + delay
            story.tell(Tick(), at=died_at + delay / 2)
            assert not story.all(Start)
            story.tell(Tick(), at=died_at + delay)
        assert story.only(Start).attempt == attempt
    story.tell(Exited("1", -SIGSEGV))
    assert not story.all(Start)
    assert story.phase("1") is Phase.GONE
    assert "not started again after 4 restarts" in story.only(Note).reason
    assert story.group[1] == "0"
    story.tell(Finished("0"), Exited("0", 0))
    assert story.state.over
    assert story.state.exit_code == 0


def test_when_all_are_killed_all_are_started_and_waited_for_again() -> None:
    story = training(3)
    story.tell(*(Exited(name, -SIGKILL) for name in "012"))
    assert [action.worker for action in story.all(Start)] == ["0", "1", "2"]
    story.tell(ready("2"), ready("1"))
    assert not story.all(Announce)
    story.tell(ready("0"))
    assert story.group[1] == "0 1 2"
    assert story.group[0] > 1


def test_when_nobody_is_left_the_job_fails_with_the_signal() -> None:
    story = training(1, JobPolicy(max_restarts=0))
    story.tell(Exited("0", -SIGKILL))
    assert story.state.over
    assert story.state.exit_code == 128 + SIGKILL


def test_with_fewer_than_min_workers_the_job_fails() -> None:
    story = training(3, JobPolicy(max_restarts=0, min_workers=3))
    story.tell(Exited("1", -SIGKILL))
    stopped = story.only(EndWorkers)
    assert stopped.workers == ("0", "2")
    assert not story.all(Announce)
    story.tell(Exited("0", -15), Exited("2", -15))
    assert story.state.over
    assert story.state.exit_code == 128 + SIGKILL


def test_a_member_that_leaves_with_exit_code_0_is_not_waited_for() -> None:
    story = training(2)
    story.tell(Exited("1", 0))
    assert "without saying that it had finished" in story.only(EndGroup).reason
    assert story.group == (2, "0")


def test_a_member_that_hangs_up_is_put_out_and_killed() -> None:
    story = training(2)
    story.tell(Disconnected("1"))
    assert story.only(Kill).workers == ("1",)
    assert story.group == (2, "0")
    story.tell(Exited("1", -SIGKILL))
    assert story.only(Start).worker == "1"


# Silence.


def test_a_stopped_worker_is_found_by_probing_and_comes_back() -> None:
    story = training(4, JobPolicy(probe_timeout_s=1.0))
    story.tell(Lost("2", 1, rank=1, cause="rank 1 was silent for 5 s"), at=100.0)
    probe = story.only(SendProbe)
    assert probe.to == ("0", "1", "3")
    assert "rank 1 was silent for 5 s" in probe.reason
    story.tell(ProbeReply("0", probe.probe), ProbeReply("3", probe.probe), at=100.1)
    assert story.did == ()
    assert story.state.next_wakeup() == 101.0
    story.tell(Tick(), at=101.0)
    assert story.group == (2, "0 2 3")
    ended = story.only(EndGroup)
    assert (ended.epoch, ended.worker, ended.certain) == (1, "1", False)
    assert ended.to == ("0", "1", "2", "3"), "the evicted worker is told, for when it wakes up"
    assert "no sign of life" in ended.reason
    assert story.phase("1") is Phase.EVICTED
    story.enter()
    story.tell(ready("1", after_epoch=1))
    assert story.group == (3, "0 2 3 1")


def test_a_member_whose_process_stands_still_is_out_at_once_and_comes_back() -> None:
    story = training(3)
    story.tell(Stalled("1", "worker 1 stands still: its process 7 is stopped"), at=10.0)
    assert story.group == (2, "0 2")
    ended = story.only(EndGroup)
    assert (ended.worker, ended.certain, ended.to) == ("1", False, ("0", "1", "2"))
    assert ended.reason == "worker 1 stands still: its process 7 is stopped"
    story.enter()
    story.tell(ready("1", after_epoch=1))
    assert story.group == (3, "0 2 1")


def test_an_evicted_worker_comes_back_by_what_it_says_not_by_what_its_node_repeats() -> None:
    """A node says again what its workers said last whenever the view changes."""
    story = training(3)
    story.tell(Stalled("1", "worker 1 stands still"), at=10.0)
    story.enter()
    story.tell(ready("1"), Entered("1", 1))
    assert story.phase("1") is Phase.EVICTED
    story.tell(ready("1", after_epoch=1))
    assert story.group == (3, "0 2 1")


def test_a_worker_in_no_group_may_stand_still() -> None:
    story = Story(2)
    story.tell(ready("0"))
    assert story.tell(Stalled("1", "worker 1 stands still")) == ()
    assert story.phase("1") is Phase.STARTING


def test_an_evicted_worker_that_reports_a_loss_is_a_newcomer() -> None:
    story = training(3)
    story.tell(Lost("0", 1, rank=1), at=0.0)
    story.tell(ProbeReply("2", 1), at=0.1)
    story.tell(Tick(), at=1.0)
    story.enter()
    story.tell(Lost("1", 1, rank=0, certain=True), at=20.0)
    assert story.group == (3, "0 2 1")


def test_in_a_ring_everybody_blames_a_neighbour_and_only_the_culprit_is_evicted() -> None:
    story = training(4, JobPolicy(grace_s=0.3))
    # 2 hangs in its own code but its control thread answers; 3 waits for 2, 0 for 3, 1 for 0.
    story.tell(Lost("3", 1, rank=2), Lost("0", 1, rank=3), at=5.0)
    story.tell(Lost("1", 1, rank=0), ProbeReply("2", 1), at=5.1)
    assert story.state.next_wakeup() == pytest.approx(5.4)
    story.tell(Tick(), at=5.4)
    assert story.group == (2, "0 1 3")
    assert "worker 2 did not take part" in story.only(EndGroup).reason


def test_a_blamed_worker_that_is_blocked_itself_is_innocent() -> None:
    story = training(3)
    # 0 waits for 1, 1 (not yet at its deadline) waits for 2, and 2 does not take part.
    story.tell(Lost("0", 1, rank=1), at=5.0)
    story.tell(ProbeReply("1", 1, blocked=True), ProbeReply("2", 1, blocked=False), at=5.1)
    story.tell(Tick(), at=5.5)
    assert story.group == (2, "0 1")


def test_when_nobody_is_to_blame_the_same_members_go_on_in_a_new_epoch() -> None:
    story = training(3)
    story.tell(Lost("0", 1, rank=1), Lost("1", 1, rank=2), Lost("2", 1, rank=0), at=1.0)
    story.tell(Tick(), at=1.3)
    assert story.group == (2, "0 1 2")
    assert story.only(Announce).joined == ()
    assert story.only(EndGroup) == EndGroup(
        1, "", True, ("0", "1", "2"), "its links failed and nobody is to blame"
    )


def joining() -> Story:
    """Workers 0 and 1 are in epoch 2, and worker 2, which was killed, comes back in epoch 3."""
    story = training(3)
    story.tell(Exited("2", -SIGKILL), at=1.0)
    story.enter()
    story.tell(Tick(), at=10.0)
    story.tell(ready("2"), at=11.0)
    assert story.group == (3, "0 1 2")
    return story


@pytest.mark.parametrize("first", ["1", "2"])
def test_a_worker_that_a_peer_has_left_for_the_next_group_follows_it(first: str) -> None:
    """Worker 0 waited for 1 in a call of epoch 2, when 1 went on to epoch 3."""
    story = joining()
    story.enter(first)
    story.tell(Lost("0", 2, rank=1, certain=True, cause="it left the group"), at=11.1)
    assert not story.all(EndGroup)
    assert not story.all(SendProbe)
    assert story.state.inquiry is None
    story.tell(Tick(), at=20.0)
    assert not story.all(EndGroup)
    assert story.group == (3, "0 1 2")


def test_the_report_of_a_peer_that_left_may_come_before_the_entry() -> None:
    story = joining()
    story.tell(Lost("0", 2, rank=1, certain=True, cause="it left the group"), at=11.1)
    assert story.state.inquiry is not None
    story.enter("1")
    assert story.state.inquiry is None


def test_a_silent_or_unreachable_peer_is_inquired_into_while_a_worker_joins() -> None:
    for report in (
        Lost("0", 2, rank=1),
        Lost("0", 2, rank=1, certain=True, unreachable=(1,)),
    ):
        story = joining()
        story.enter("2")
        story.tell(report, at=11.1)
        assert story.state.inquiry is not None


def test_a_broken_link_between_living_workers_evicts_nobody() -> None:
    story = training(3)
    story.tell(Lost("0", 1, rank=1, certain=True), at=1.0)
    story.tell(ProbeReply("1", 1), ProbeReply("2", 1), at=1.01)
    story.tell(Tick(), at=1.4)
    assert story.group == (2, "0 1 2")


def test_a_report_that_arrives_before_the_exit_it_is_about_changes_nothing() -> None:
    story = training(3)
    story.tell(Lost("0", 1, rank=2, certain=True), at=1.0)
    story.tell(Exited("2", -SIGKILL), at=1.001)
    assert story.group == (2, "0 1")
    story.tell(ProbeReply("1", 1), Tick(), at=1.01)
    story.enter()
    story.tell(Tick(), at=60.0)
    assert story.group == (2, "0 1"), "the inquiry ended with the view that answered it"
    assert story.state.inquiry is None


def test_a_report_about_a_view_already_replaced_is_ignored() -> None:
    story = training(3)
    story.tell(Exited("2", -SIGKILL))
    assert story.tell(Lost("0", 1, rank=2, certain=True)) == ()
    assert story.tell(Lost("1", 1, rank=0), Tick()) == ()


def test_a_silent_worker_is_still_found_when_another_dies_meanwhile() -> None:
    story = training(4)
    story.tell(Lost("0", 1, rank=1), at=1.0)
    story.tell(Exited("3", -SIGKILL), ProbeReply("2", 1), at=1.5)
    assert story.group == (2, "0 1 2")
    story.tell(Tick(), at=2.0)
    assert story.group == (3, "0 2")


def test_a_loss_in_the_old_group_while_a_newcomer_waits_sends_all_to_the_newer_view() -> None:
    story = training(3)
    story.tell(Exited("2", -SIGKILL))
    story.enter()
    story.tell(ready("2"))
    assert story.group == (3, "0 1 2")
    story.tell(Lost("0", 2, rank=1, certain=True), at=1.0)
    story.tell(ProbeReply("1", 1), ProbeReply("2", 1), at=1.1)
    story.tell(Tick(), at=1.5)
    assert story.group == (3, "0 1 2"), "no other view is needed"
    assert (story.only(EndGroup).epoch, story.only(EndGroup).to) == (2, ("0", "1"))


def test_members_in_a_long_step_are_not_evicted_because_a_newcomer_is_impatient() -> None:
    story = training(3)
    story.tell(Exited("2", -SIGKILL))
    story.enter()
    story.tell(ready("2"), Entered("2", 3))
    story.tell(Lost("2", 3, rank=0), at=40.0)
    story.tell(ProbeReply("0", 1), ProbeReply("1", 1), at=40.1)
    story.tell(Tick(), at=40.5)
    assert story.group == (4, "0 1 2")
    assert story.state.group(2) is not None, "their group is not touched"
    assert story.only(EndGroup).epoch == 3


def test_a_member_that_hangs_between_two_groups_is_evicted() -> None:
    story = training(3)
    story.tell(Exited("2", -SIGKILL))
    story.enter()
    story.tell(ready("2"), Entered("2", 3), Entered("0", 3))
    story.tell(Lost("2", 3, rank=1), Lost("0", 3, rank=1), ProbeReply("1", 1), at=40.0)
    story.tell(Tick(), at=40.5)
    assert story.group == (4, "0 2")


def test_when_the_agent_was_late_itself_nobody_is_evicted_for_it() -> None:
    story = training(2)
    story.tell(Lost("0", 1, rank=1), at=1.0)
    story.tell(Tick(), at=31.0)
    assert "late itself" in story.only(Note).reason
    assert story.state.next_wakeup() == 32.0
    story.tell(ProbeReply("1", 1), at=31.1)
    story.tell(Tick(), at=31.1 + 0.3)
    assert story.group == (2, "0"), "it answers, but it is blamed and not blocked"


def test_blaming_somebody_who_has_finished_ends_the_group_at_once() -> None:
    story = training(3)
    story.tell(Finished("1"))
    story.tell(Lost("0", 1, rank=1, certain=True))
    assert story.group == (2, "0 2")
    assert not story.all(SendProbe)


def test_a_member_that_asks_for_a_view_without_a_reason_gets_a_new_epoch() -> None:
    story = training(2)
    story.tell(ready("0", after_epoch=1), at=1.0)
    story.tell(ProbeReply("1", 1, blocked=True), at=1.1)
    story.tell(Tick(), at=1.5)
    assert story.group == (2, "0 1")


def test_a_member_that_asks_for_a_view_it_was_sent_already_changes_nothing() -> None:
    story = training(2)
    assert story.tell(ready("0", after_epoch=0)) == ()


def test_an_answer_to_an_old_probe_means_nothing() -> None:
    story = training(2)
    assert story.tell(ProbeReply("1", 7)) == ()
    story.tell(Lost("0", 1, rank=1), ProbeReply("1", 99))
    assert story.state.inquiry is not None
    assert story.state.inquiry.waiting == {"1"}


def test_a_rank_that_does_not_exist_is_nobody() -> None:
    story = training(2)
    story.tell(Lost("0", 1, rank=17))
    assert story.state.inquiry is not None
    assert story.state.inquiry.reports[0].blamed is None


# Failures.


def test_code_that_raises_fails_the_job_with_its_exit_code() -> None:
    story = training(3)
    story.tell(Failed("1", "ValueError: bad batch"))
    stopped = story.only(EndWorkers)
    assert stopped == EndWorkers(("0", "1", "2"), 0, "ValueError: bad batch")
    story.tell(Exited("0", 1), Exited("1", 7), Exited("2", -15))
    assert story.state.over
    assert story.state.exit_code == 7
    assert story.state.failure is not None
    assert story.state.failure.worker == "1"


def test_the_first_failure_counts() -> None:
    story = training(2)
    story.tell(Exited("1", 3))
    assert "exited with code 3" in story.only(EndWorkers).reason
    story.tell(Failed("0", "RemoteError"), Exited("0", 4))
    assert story.state.exit_code == 3


def test_a_failure_that_follows_another_gives_way_to_it() -> None:
    story = training(2)
    story.tell(Failed("0", "rank 1 failed", secondary=True))
    story.tell(Failed("1", "ZeroDivisionError"), Exited("0", 1), Exited("1", 5))
    assert story.state.failure is not None
    assert story.state.failure.worker == "1"
    assert story.state.exit_code == 5


def test_an_exit_explains_the_failures_that_followed_it() -> None:
    story = training(2)
    story.tell(Failed("0", "lost rank 1", secondary=True), Exited("1", 3), Exited("0", 1))
    assert story.state.exit_code == 3


def test_a_failing_worker_that_is_killed_while_stopping_still_fails_the_job() -> None:
    story = training(1)
    story.tell(Failed("0", "boom"), Exited("0", -15))
    assert story.state.over
    assert story.state.exit_code == 1


@pytest.mark.parametrize("code", [1, -15])
def test_what_its_node_knows_of_a_failing_worker_is_told_also_if_it_was_killed_meanwhile(
    code: int,
) -> None:
    story = training(1)
    story.tell(Failed("0", "MemoryError"), Exited("0", code, reason="out of memory"))
    assert story.state.failure is not None
    assert story.state.failure.text == "MemoryError; out of memory"
    assert story.state.exit_code == 1


def test_a_failed_job_starts_nobody_and_lets_nobody_in() -> None:
    story = training(3)
    story.tell(Exited("2", -SIGKILL), Exited("2", -SIGKILL))
    story.tell(Exited("1", 1))
    assert story.tell(ready("2"), Exited("2", -SIGKILL), Tick(), at=99.0) == ()
    story.tell(Exited("0", -15))
    assert story.state.over


# The end.


def test_workers_that_finish_end_the_job_well() -> None:
    story = training(2)
    story.tell(Finished("0"), Finished("1"))
    story.tell(Exited("0", 0), Exited("1", 0))
    assert story.did == ()
    assert story.state.over
    assert story.state.exit_code == 0


def test_a_newcomer_still_starting_when_the_others_finish_is_stopped() -> None:
    story = training(3)
    story.tell(Exited("2", -SIGKILL))
    story.enter()
    story.tell(Finished("0"))
    assert story.tell(ready("2")) == (), "it would come in for nothing"
    story.tell(Finished("1"))
    assert story.only(EndWorkers).workers == ("2",)
    story.tell(Exited("2", -15), Exited("0", 0), Exited("1", 0))
    assert story.state.over
    assert story.state.exit_code == 0


def test_a_newcomer_let_in_as_the_others_finish_does_not_train_on_alone() -> None:
    """It was announced, but all others had done their last step in the group before."""
    story = training(3)
    story.tell(Exited("2", -SIGKILL))
    story.enter()
    story.tell(ready("2"))
    assert story.group[1] == "0 1 2"
    story.tell(Finished("0"))
    assert not story.all(EndWorkers), "worker 1 may still enter the group, with the state"
    story.tell(Finished("1"))
    assert story.only(EndWorkers).workers == ("2",)
    story.tell(Exited("2", -15), Exited("0", 0), Exited("1", 0))
    assert (story.state.over, story.state.exit_code) == (True, 0)


def test_a_newcomer_that_entered_with_others_goes_on_when_they_have_finished() -> None:
    story = training(2)
    story.tell(Exited("1", -SIGKILL))
    story.enter()
    story.tell(ready("1"))
    story.enter()
    story.tell(Finished("0"))
    assert not story.all(EndWorkers), "it has the job's state, and its own last step to do"


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_worker_started_again_at_the_end_is_stopped_under_any_leader(is_taken_over: bool) -> None:
    story = training(3)
    if is_taken_over:
        members = tuple(Member(name, "node", port=1) for name in story.names)
        group, world = JobGroup("job", 1, members), WorldSpec(members=tuple(story.names))
        story.state = membership.take_over(story.names, JobPolicy(), 1, group, world)
        story.enter()
    story.tell(Exited("2", -SIGKILL))
    story.enter()
    story.tell(Finished("0"), Finished("1"))
    assert story.only(EndWorkers).workers == ("2",)
    story.tell(ready("2"), Exited("0", 0), Exited("1", 0))
    assert not story.all(Announce)
    story.tell(Exited("2", -15))
    assert (story.state.over, story.state.failure) == (True, None)


def test_what_a_newcomer_raises_when_it_is_stopped_at_the_end_fails_nothing() -> None:
    story = training(3)
    story.tell(Exited("2", -SIGKILL))
    story.enter()
    story.tell(Finished("0"), ready("2"), Finished("1"))
    assert story.only(EndWorkers).workers == ("2",)
    story.tell(Failed("2", "RemoteError: the job ends", secondary=True), Exited("2", 1))
    story.tell(Exited("0", 0), Exited("1", 0))
    assert story.state.over
    assert story.state.exit_code == 0


def test_a_restart_that_waits_when_the_others_finish_is_dropped() -> None:
    story = training(2, JobPolicy(backoff_s=10.0))
    story.tell(Exited("1", -SIGKILL), ready("1"), Exited("1", -SIGKILL), Exited("1", -SIGKILL))
    assert story.phase("1") is Phase.WAITING
    story.tell(Finished("0"), Exited("0", 0))
    assert story.state.over


def test_a_worker_killed_after_others_finished_is_not_started_again() -> None:
    story = training(3)
    story.tell(Finished("0"), Exited("1", -SIGKILL))
    assert not story.all(Start)
    assert "others have finished" in story.only(EndGroup).reason
    assert story.group == (2, "2")


def test_a_worker_killed_at_its_very_end_is_a_failure() -> None:
    story = training(2)
    story.tell(Finished("0"), Exited("0", -SIGSEGV))
    assert not story.all(Start)
    story.tell(Finished("1"), Exited("1", 0))
    assert story.state.exit_code == 128 + SIGSEGV


def test_an_interrupt_is_passed_on_and_a_second_one_kills() -> None:
    story = training(2)
    story.tell(Finished("0"), Interrupted(SIGINT))
    assert story.only(EndWorkers).workers == ("0", "1")
    assert story.only(EndWorkers).signal == SIGINT
    story.tell(Interrupted(SIGINT))
    assert story.only(Kill).workers == ("0", "1")
    story.tell(Exited("0", -SIGKILL), Exited("1", 1))
    assert story.state.over
    assert story.state.exit_code == 130


def test_news_from_the_dead_is_ignored() -> None:
    story = training(2, JobPolicy(max_restarts=0))
    story.tell(Exited("1", -SIGKILL))
    before = story.state
    late = (
        ready("1"),
        Lost("1", 2, rank=0),
        Finished("1"),
        Failed("1", "too late"),
        Disconnected("1"),
        Exited("1", 1),
    )
    assert story.tell(*late) == ()
    assert story.state == before


def test_handling_does_not_change_the_state_it_was_given() -> None:
    story = training(2)
    before = story.state
    membership.handle(before, Exited("1", -SIGKILL), 1.0)
    assert before == replace(before)
    assert before.worker("1").phase is Phase.MEMBER


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "killed by SIGKILL (9)"),
        (-99, "killed by signal 99"),
    ],
)
def test_exits_are_named(code: int, words: str) -> None:
    assert name_exit(code) == words


def test_an_unknown_worker_is_a_bug_not_an_event() -> None:
    with pytest.raises(KeyError):
        training(1).tell(Finished("17"))
