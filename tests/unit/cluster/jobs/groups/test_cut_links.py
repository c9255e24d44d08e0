"""Members that can't reach each other while others reach both."""

from __future__ import annotations

import msgspec

from potluck._core.cluster.jobs.group_agreement import GroupAgreement
from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.events import (
    Action,
    Agreed,
    Announce,
    Away,
    EndGroup,
    Event,
    Placed,
    SendProbe,
    Severed,
    Tick,
)
from potluck._core.cluster.jobs.groups.roster import JobPolicy, Phase
from potluck._core.cluster.membership.view import spared
from potluck._core.types import Member
from potluck._core.wire.format import MAX_PAIRS
from potluck._core.wire.jobs import Exited, WorldSpec
from potluck._core.wire.nodes import JobGroup
from potluck._core.wire.worker_link import Entered, Finished, Lost, Mended, ProbeReply, Ready
from support import stories


class Story(stories.Story):
    """A story of which all actions so far are kept."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self.so_far: list[Action] = []

    def tell(self, *events: Event, at: float | None = None) -> tuple[Action, ...]:
        self.so_far += super().tell(*events, at=at)
        return self.did

    def conclude(self) -> None:
        """Time passes until an inquiry has ended."""
        while (due := self.state.next_wakeup()) is not None:
            self.tell(Tick(), at=max(due, self.now))

    @property
    def announced(self) -> Announce:
        """The last group."""
        return [action for action in self.so_far if isinstance(action, Announce)][-1]

    @property
    def ended(self) -> list[EndGroup]:
        """All groups that were ended."""
        return [action for action in self.so_far if isinstance(action, EndGroup)]


def ready(name: str, after_epoch: int = 0) -> Ready:
    return Ready(name, after_epoch, 5000 + int(name), node=f"node {name}", host="127.0.0.1")


def training(num_workers: int) -> Story:
    story = Story(num_workers)
    story.tell(*(ready(str(index)) for index in range(num_workers)))
    enter(story)
    return story


def enter(story: Story) -> None:
    group = story.state.newest_group
    assert group is not None
    story.tell(*(Entered(name, group.epoch) for name in group.members))


def unreachable(name: str, rank: int, epoch: int) -> Lost:
    return Lost(name, epoch, rank, certain=True, cause="no link", unreachable=(rank,))


def told_by(name: str, rank: int, epoch: int) -> Lost:
    """What a member says that another one has told of its failure."""
    return Lost(name, epoch, rank, certain=True, cause="told")


def cut(story: Story, at: float, epoch: int, *pairs: tuple[int, int]) -> None:
    """The first of each pair can't make its link; all others hear of that."""
    lost = dict(pairs)
    for rank in range(len(story.state.workers)):
        if rank in lost:
            story.tell(unreachable(str(rank), lost[rank], epoch), at=at)
        else:
            story.tell(told_by(str(rank), pairs[0][1], epoch), at=at)
    story.conclude()


def test_a_pair_without_a_link_stays_and_the_next_group_knows_of_it() -> None:
    story = training(3)
    cut(story, 5.0, 1, (1, 2))
    (probe,) = (action for action in story.so_far if isinstance(action, SendProbe))
    assert probe.to == ("1", "2"), "worker 0 was the first to report"
    (over,) = story.ended
    assert over.reason == (
        "workers 1 and 2 can't reach each other: the group goes on without a link between them"
    )
    assert story.announced.cut == (("1", "2"),)
    assert [member.worker for member in story.announced.members] == ["0", "1", "2"]
    enter(story)
    assert story.state.inquiry is None
    assert {worker.phase for worker in story.state.workers} == {Phase.MEMBER}


def test_what_a_member_was_told_by_another_one_is_no_pair() -> None:
    story = training(3)
    story.tell(told_by("0", 2, 1), told_by("1", 2, 1), ProbeReply("2", 1), at=5.0)
    story.conclude()
    assert story.announced.cut == ()


def test_a_member_that_does_not_answer_is_evicted_not_spared() -> None:
    story = training(3)
    story.tell(unreachable("0", 2, 1), told_by("1", 2, 1), at=5.0)
    story.conclude()
    assert story.state.worker("2").phase is Phase.EVICTED
    assert story.announced.cut == ()
    assert not story.state.cut


def test_a_second_pair_is_added_to_the_first() -> None:
    story = training(4)
    cut(story, 5.0, 1, (0, 1))
    enter(story)
    cut(story, 9.0, 2, (2, 3))
    assert story.announced.cut == (("0", "1"), ("2", "3"))


def test_links_that_do_not_connect_all_are_tried_again() -> None:
    story = training(3)
    cut(story, 5.0, 1, (0, 2))
    enter(story)
    cut(story, 9.0, 2, (1, 2))
    assert story.announced.epoch == 3
    assert story.announced.cut == ()
    assert "do not connect all members, so all are tried again" in story.ended[-1].reason
    two = training(2)
    cut(two, 5.0, 1, (0, 1))
    assert two.announced.cut == ()


def test_a_link_that_works_again_brings_a_new_group_between_two_steps() -> None:
    story = training(3)
    cut(story, 5.0, 1, (0, 2))
    enter(story)
    num_ended = len(story.ended)
    story.tell(Mended("2", 2, 0), at=30.0)
    assert story.announced.epoch == 3
    assert story.announced.cut == ()
    assert story.announced.reason == "worker 2 reaches worker 0 again"
    assert len(story.ended) == num_ended, "the old group works until all go over"
    story.tell(Mended("2", 2, 0), Mended("0", 3, 2), Mended("0", 3, 17))
    assert story.announced.epoch == 3, "what is known already changes nothing"


def test_a_worker_that_dies_takes_its_pair_with_it_until_it_is_back() -> None:
    story = training(4)
    cut(story, 5.0, 1, (0, 3))
    enter(story)
    story.tell(Exited("3", -9), at=8.0)
    assert story.announced.cut == ()
    story.tell(ready("3"))
    enter(story)
    assert story.announced.cut == (("0", "3"),), "until one of the two has reached the other"


def test_the_one_worker_that_reached_both_dies_and_all_links_are_tried() -> None:
    story = training(3)
    cut(story, 5.0, 1, (0, 1))
    story.tell(Exited("2", -9), at=8.0)
    assert [member.worker for member in story.announced.members] == ["0", "1"]
    assert story.announced.cut == ()


def test_a_new_leader_takes_the_pairs_over_from_the_view() -> None:
    members = tuple(Member(str(index), f"node {index}") for index in range(3))
    group = JobGroup("job", 7, members, cut=(("0", "1"),))
    state = membership.take_over("012", JobPolicy(), 7, group, WorldSpec(members=("0", "1", "2")))
    assert state.cut == {("0", "1")}
    state, _ = membership.handle(state, Agreed(9, ("0", "1", "2")), 0.0)
    told = [Entered(name, 9) for name in "012"]
    for event in [*told, Exited("2", -9)]:
        state, actions = membership.handle(state, event, 1.0)
    assert [action.cut for action in actions if isinstance(action, Announce)] == [()]


def test_a_group_that_loses_nodes_spares_what_its_other_members_can_do_without() -> None:
    pairs = (("0", "1"), ("2", "3"))
    assert spared(pairs, ["0", "1", "2", "3"]) == pairs
    assert spared(pairs, ["0", "2", "3"]) == (("2", "3"),)
    assert spared(pairs, ["0", "1"]) == ()


def test_what_agents_know_of_the_network_ends_a_group_at_once() -> None:
    story = training(3)
    story.tell(Severed(frozenset({("2", "1")})), at=5.0)
    assert story.announced.cut == (("1", "2"),)
    (over,) = story.ended
    assert over.to == ("0", "1", "2")
    assert "workers 1 and 2 can't reach each other" in over.reason
    enter(story)
    num_ended = len(story.ended)
    story.tell(Severed(frozenset({("1", "2"), ("1", "7")})))
    assert len(story.ended) == num_ended, "nothing is new, and there is no worker 7"
    story.tell(Severed(frozenset()))
    assert story.announced.cut == ()
    assert story.announced.reason == "workers 1 and 2 reach each other again"
    assert len(story.ended) == num_ended


def test_a_job_that_begins_while_agents_can_not_reach_each_other_spares_the_pair_at_once() -> None:
    story = Story(3)
    story.tell(Severed(frozenset({("0", "2")})))
    story.tell(*(ready(str(index)) for index in range(3)))
    assert story.announced.cut == (("0", "2"),)
    assert not story.ended


def test_a_worker_may_find_the_link_before_the_agents_do() -> None:
    story = training(3)
    story.tell(Severed(frozenset({("0", "2")})), at=5.0)
    enter(story)
    story.tell(Mended("0", 2, 2))
    assert story.announced.cut == ()
    enter(story)
    story.tell(Severed(frozenset({("0", "2")})))
    assert story.announced.cut == (), "the agents say nothing new"


def test_a_group_that_is_ended_while_the_nodes_agree_on_it_is_ended_again() -> None:
    """In the epoch that they agreed on, in which its workers are."""
    story = Story(3)
    story.tell(*(ready(str(index)) for index in range(3)))
    first, members = story.announced, ("0", "1", "2")
    story.tell(Severed(frozenset({("0", "1")})))
    assert (first.cut, first.members) == ((), story.announced.members)
    story.tell(Agreed(20, members, first.epoch))
    over = story.only(EndGroup)
    assert (over.epoch, over.worker, over.to) == (20, "", members)
    story.tell(Agreed(21, members, story.announced.epoch))
    assert [group.epoch for group in story.state.groups] == [21]
    assert story.announced.cut == (("0", "1"),)


def test_the_nodes_agree_on_the_group_that_spares_the_pair_not_on_the_one_before() -> None:
    members = tuple(Member(name, f"node {name}") for name in "012")
    agreement = GroupAgreement("job", JobGroup("job", 4, members))
    pairs = (("0", "1"),)
    for action in (Announce(5, members, (), "lost"), Announce(6, members, (), "cut", cut=pairs)):
        agreement.announced(action, (), ())
    (event,), _ = agreement.installed(JobGroup("job", 7, members), "lost")
    assert event == Agreed(7, ("0", "1", "2"), 5)
    (event,), _ = agreement.installed(JobGroup("job", 8, members, cut=pairs), "cut")
    assert event == Agreed(8, ("0", "1", "2"), 6)


def test_a_pair_of_which_one_has_finished_ends_no_group() -> None:
    story = training(4)
    story.tell(Severed(frozenset({("0", "1")})), at=5.0)
    enter(story)
    num_ended = len(story.ended)
    story.tell(Finished("3"))
    story.tell(Severed(frozenset({("0", "1"), ("2", "3")})))
    assert len(story.ended) == num_ended
    assert ("0", "1") in story.state.cut, "what is known of the others stays"


def test_a_pair_outside_of_the_group_that_works_again_brings_no_new_group() -> None:
    story = training(3)
    story.tell(Severed(frozenset({("1", "2")})), at=5.0)
    enter(story)
    story.tell(Away(("2",), "its node left"))
    enter(story)
    epoch = story.announced.epoch
    story.tell(Severed(frozenset()))
    assert story.announced.epoch == epoch
    story.tell(Placed("2"), ready("2"))
    assert story.announced.cut == ()


def test_a_view_has_room_for_a_bounded_number_of_pairs() -> None:
    """Nodes refuse a view with more."""
    names = [str(index) for index in range(67)]
    pairs = [(a, b) for a in names[:33] for b in names[33:66]]
    assert spared(pairs[:MAX_PAIRS], names)
    assert len(pairs) > MAX_PAIRS
    assert spared(pairs, names) == ()


def test_a_fixed_world_is_left_alone() -> None:
    story = Story(3)
    fixed = [msgspec.structs.replace(ready(str(index)), is_fixed=True) for index in range(3)]
    story.tell(*fixed)
    enter(story)
    story.tell(Severed(frozenset({("0", "2")})), at=5.0)
    assert not story.ended
    assert story.announced.cut == ()
