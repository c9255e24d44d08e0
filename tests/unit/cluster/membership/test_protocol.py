"""One node's decisions, told as stories; the messages of the others are written by hand."""

from __future__ import annotations

import pytest

from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.events import (
    Agreed,
    Announce,
    Away,
    EndGroup,
    NotAgreed,
    Placed,
    Start,
)
from potluck._core.cluster.jobs.groups.roster import JobPolicy, Phase
from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.events import (
    GroupRefused,
    Save,
    Saved,
    Send,
    WantGroup,
)
from potluck._core.cluster.membership.view import following, objection_to
from potluck._core.types import Member
from potluck._core.wire import nodes as wire
from potluck._core.wire.jobs import Exited, WorldSpec
from potluck._core.wire.nodes import JobGroup, StableRecord, View, ViewMember
from potluck._core.wire.worker_link import Entered, Finished, Ready
from support.membership_story import Member3, Story, view, without_b

# ---------------------------------------------------------------- one node


def test_a_node_alone_founds_a_cluster_of_itself_after_a_second() -> None:
    story = Story()
    story.run(0.9)
    assert story.node.view is None
    story.run(0.4)
    assert story.node.view is not None
    assert story.node.view.nodes == ("a",)
    assert story.disk.installed == story.node.view.epoch == 1


def test_or_at_once_when_ordered() -> None:
    story = Story()
    story.tell(events.FoundHistory())
    assert [each.epoch for each in story.installed()] == [1]


def test_on_one_node_a_group_is_agreed_on_in_the_same_turn() -> None:
    """The job of one machine: what ``membership`` announces counts at once, epoch for epoch."""
    story = Story()
    story.tell(events.FoundHistory())
    assert story.node.view is not None
    state, _ = membership.begin(["0", "1"], JobPolicy(), story.node.view.epoch)
    for name in ("0", "1"):
        state, actions = membership.handle(state, Ready(name, port=1, node="a"), 0.0)
    (announce,) = (action for action in actions if isinstance(action, Announce))
    story.tell(WantGroup("job", announce.members, (), announce.reason))
    (installed,) = story.installed()
    group = installed.group("job")
    assert group is not None
    assert (group.epoch, group.members) == (announce.epoch, announce.members)
    assert story.disk.installed == announce.epoch


def test_nothing_is_used_before_it_is_on_disk() -> None:
    story = Story()
    story.slow_disk = True
    (save,) = (action for action in story.tell(events.FoundHistory()) if isinstance(action, Save))
    assert story.installed() == []
    assert save.record.installed == 1
    story.tell(Saved(save.number))
    assert [each.epoch for each in story.installed()] == [1]


def test_after_a_restart_epochs_go_on_where_they_were() -> None:
    story = Story(StableRecord(installed=41), incarnation=2)
    story.tell(events.FoundHistory())
    assert story.node.view is not None
    assert story.node.view.epoch == 42


def test_a_job_that_is_over_leaves_the_view() -> None:
    story = Story()
    story.tell(events.FoundHistory())
    story.tell(WantGroup("job", (Member("0", "a"),), (), "begins"))
    story.tell(events.JobOver("job"))
    assert story.node.view is not None
    assert story.node.view.groups == ()


def test_a_group_with_other_links_that_is_wanted_while_one_is_agreed_on_follows_it() -> None:
    story = Story()
    story.tell(events.FoundHistory())
    members = tuple(Member(name, "a") for name in "012")
    story.tell(WantGroup("job", members, (), "begins"))
    story.slow_disk = True
    kept = ("0", "1", "2")
    (save,) = (
        action
        for action in story.tell(WantGroup("job", members, kept, "lost", renew=True))
        if isinstance(action, Save)
    )
    story.tell(WantGroup("job", members, kept, "cut", renew=True, cut=(("0", "1"),)))
    story.slow_disk = False
    story.tell(Saved(save.number))
    story.run(2.0)
    assert story.node.view is not None
    group = story.node.view.group("job")
    assert group is not None
    assert group.cut == (("0", "1"),)
    epoch = story.node.view.epoch
    story.run(2.0)
    assert story.node.view.epoch == epoch, "nothing more is wanted"


def test_who_does_not_lead_wants_in_vain() -> None:
    (refused,) = Story().tell(WantGroup("job", (Member("0", "a"),), (), "begins"))
    assert refused == GroupRefused("job", 0, "this node does not lead the cluster")


# ---------------------------------------------------------------- groups of views


def group(names: str, epoch: int = 3, entering: str = "") -> JobGroup:
    members = tuple(Member(f"{name}0", name) for name in names)
    return JobGroup("job", epoch, members, 1, tuple(f"{name}0" for name in entering))


def test_a_node_without_workers_comes_and_goes_unnoticed_by_the_job() -> None:
    before = view("abc", 5, group("ab"))
    gone = following(before, 6, kept="ab", reason="c is silent")
    assert gone.groups == before.groups
    back = following(gone, 7, kept="ab", joining=[("c", 2)], reason="c joins")
    assert back.groups == before.groups
    assert back.members[-1] == ViewMember("c", 2, 7)


def test_a_group_goes_on_without_the_workers_of_a_lost_node() -> None:
    after = following(view("abc", 5, group("abc")), 6, kept="ac", reason="b is silent")
    (left,) = after.groups
    assert (left.epoch, [m.worker for m in left.members]) == (6, ["a0", "c0"])


def test_a_first_group_does_not_go_on_without_one_that_is_known_to_hold_its_state() -> None:
    story = Story()
    story.tell(events.FoundHistory())
    members = (Member("a0", "a"), Member("a1", "a"))
    story.tell(WantGroup("job", members, (), "begins"))
    assert story.node.view is not None
    first = story.node.view.groups[0]
    assert first.entering == ("a0", "a1")
    story.tell(WantGroup("job", members, ("a0", "a1"), "all hold the state"))
    (settled,) = story.node.view.groups
    assert settled.entering == ()
    assert settled.epoch == first.epoch, "training does not notice"
    assert story.node.view.epoch == first.epoch + 1


@pytest.mark.parametrize("entering", ["", "c"])
def test_a_group_that_lost_all_its_state_stays_on_record(entering: str) -> None:
    before = view("abc", 5, group("ab" + entering, entering=entering))
    after = following(before, 6, kept="c", reason="a and b are silent")
    assert after.groups == before.groups


OBJECTIONS = [
    ("a worker stays", "ab", ("a0",), False, ""),
    ("none stays", "c", (), False, "no worker of its group"),
    ("none stays and all have ended", "c", (), True, ""),
    ("who stays was on a node that is out", "c", ("d0",), False, "no worker of its group"),
    ("its node is not in the view", "ax", ("a0",), False, "x is not in"),
]


@pytest.mark.parametrize(
    ("names", "kept", "fresh", "wanted"),
    [row[1:] for row in OBJECTIONS],
    ids=[row[0] for row in OBJECTIONS],
)
def test_which_group_may_follow(
    names: str, kept: tuple[str, ...], fresh: bool, wanted: str
) -> None:
    members = tuple(Member(f"{name}1", name) for name in names)
    want = WantGroup("job", members, kept, "", fresh)
    objection = objection_to(want, view("abc", 5, group("abd")))
    assert objection.startswith(wanted) if not wanted else wanted in objection
    assert bool(objection) == bool(wanted)


# ---------------------------------------------------------------- votes


def test_a_member_does_not_leave_out_whom_it_hears() -> None:
    answer = Member3().propose("ab")
    assert isinstance(answer, wire.Rejected)
    assert answer.reason == "I hear c"


def test_it_does_once_its_lease_is_over() -> None:
    story = Member3()
    story.beats(8, who="a")
    answer = story.propose("ab")
    assert answer == wire.Accepted((6, "a"))
    assert story.disk.histories[-1].accepted is not None, "on disk before it says so"


def test_it_does_when_the_proposer_knows_the_death_and_it_is_silent_here_as_well() -> None:
    """A proposer that only says so can't have a member left out that is heard by the others."""
    story = Member3()
    answer = story.propose("ab", dead=("c",))
    assert isinstance(answer, wire.Rejected)
    assert answer.reason == "I hear c"
    story.beats(3, who="a")
    assert story.propose("ab", 7, dead=("c",)) == wire.Accepted((7, "a"))


def test_who_was_accepted_to_be_left_out_gets_no_lease() -> None:
    story = Member3()
    story.beats(3, who="a")
    story.propose("ab", dead=("c",))
    story.sent.clear()
    story.beats(1)
    (beat,) = story.messages(wire.Heartbeat, "c")
    assert isinstance(beat, wire.Heartbeat)
    assert beat.echo > 0
    assert not beat.lease


def test_it_accepts_nothing_older_than_it_promised() -> None:
    story = Member3()
    story.hear("c", wire.Prepare("L", 5, (9, "c")))
    answer = story.propose("ab", 6, dead=("c",))
    assert isinstance(answer, wire.Rejected)
    assert answer.promised == (9, "c")


def test_it_says_what_it_accepted_when_it_promises_again() -> None:
    story = Member3()
    story.beats(3, who="a")
    story.propose("ab", dead=("c",))
    story.hear("c", wire.Prepare("L", 5, (9, "c")))
    promise = story.sent[-1].message
    assert isinstance(promise, wire.Promise)
    assert promise.accepted is not None
    assert promise.accepted.view.nodes == ("a", "b")


def test_who_proposes_from_an_older_view_is_told_the_newer() -> None:
    story = Member3()
    story.hear("c", wire.Prepare("L", 4, (9, "c")))
    assert story.sent[-1] == Send("c", wire.Decided(view("abc")))


def test_a_view_without_it_means_it_is_out_and_asks_to_come_in() -> None:
    story = Member3()
    six = View("L", 6, without_b(), reason="b is silent")
    story.use(six)
    did = story.hear("a", wire.Decided(six))
    (leave,) = (action for action in did if isinstance(action, events.Leave))
    assert "without this node: b is silent" in leave.reason
    assert story.node.wants == "L"
    story.hear("a", wire.Decided(view("abc")))
    assert story.node.view is None, "an epoch never comes back"


def test_it_vows_not_to_use_a_seat_that_it_was_asked_about() -> None:
    story = Member3()
    six = View("L", 6, without_b())
    story.use(six)
    story.hear("a", wire.Decided(six))
    seven = View("L", 7, (*without_b(), ViewMember("b", 1, 7)))
    story.use(seven)
    story.hear("a", wire.RecoveryRequest("L", 7))
    assert isinstance(story.sent[-1].message, wire.RecoveryReport)
    story.hear("a", wire.Decided(seven))
    assert story.node.view is None
    eight = View("L", 8, (*without_b(), ViewMember("b", 1, 8)))
    story.use(eight)
    story.hear("a", wire.Decided(eight))
    assert story.node.view == eight


def test_a_ban_is_obeyed_until_it_is_taken_back() -> None:
    story = Member3()
    story.tell(events.Barred(frozenset("c")))
    answer = story.propose("abc", 6)
    assert isinstance(answer, wire.Rejected)
    assert answer.reason == "c is banned"
    heard = len(story.sent)
    story.hear("c", wire.Prepare("L", 5, (9, "c")))
    assert len(story.sent) == heard, "no answer for the banned"
    story.tell(events.Barred(frozenset()))
    story.hear("c", wire.Prepare("L", 5, (9, "c")))
    assert len(story.sent) > heard


def test_a_junior_bans_all_others_and_goes_on() -> None:
    """A third of a view without its most senior member could decide nothing by itself; the ban is
    the operator's word that nothing of the others counts."""
    story = Member3()
    assert story.node.view is not None
    assert story.node.view.leader == "a"
    story.tell(events.Barred(frozenset("ac")))
    for _ in range(100):
        story.now = story.node.next_wakeup()
        story.tell(events.Tick())
        if story.node.view is not None and story.node.view.nodes == ("b",):
            break
    assert story.node.view is not None
    assert story.node.view.nodes == ("b",)
    assert not story.node.paused


# ---------------------------------------------------------------- membership under views


class Job:
    """Workers 0, 1 and 2, all members of epoch 1."""

    def __init__(self) -> None:
        self.state, _ = membership.begin("012", JobPolicy())
        self.now = 0.0
        for name in "012":
            self.tell(Ready(name, Member(name, f"node{name}", port=1)))
        self.tell(*(Entered(name, 1) for name in "012"))

    def tell(self, *told: object) -> list[object]:
        did: list[object] = []
        for event in told:
            self.state, actions = membership.handle(self.state, event, self.now)  # type: ignore[arg-type]
            did += actions
        return did


def test_a_group_is_agreed_on_in_a_higher_epoch() -> None:
    job = Job()
    job.tell(Agreed(7, ("0", "1", "2"), announced=1))
    assert job.state.newest_group is not None
    assert job.state.newest_group.epoch == job.state.epoch == 7
    job.tell(*(Entered(name, 7) for name in "012"))
    assert {worker.joined for worker in job.state.workers} == {7}


def test_the_nodes_go_on_without_a_worker_and_it_comes_back() -> None:
    job = Job()
    job.tell(Agreed(4, ("0", "2"), reason="node1 is silent"))
    assert job.state.worker("1").phase is Phase.AWAY
    assert job.state.newest_group is not None
    assert job.state.newest_group.members == ("0", "2")
    assert job.tell(Entered("0", 4), Entered("2", 4)) == []
    (announce,) = job.tell(Ready("1", Member("1", "node1", port=2), 1))
    assert isinstance(announce, Announce)
    assert (announce.epoch, announce.joined) == (5, ("1",))


def test_a_group_that_is_not_agreed_on_is_announced_again_after_a_moment() -> None:
    job = Job()
    job.tell(NotAgreed(1, 9, "another node leads"))
    assert job.state.newest_group is None
    wakeup = job.state.next_wakeup()
    assert wakeup == 0.5
    job.now = wakeup
    (announce,) = job.tell(events.Tick())
    assert isinstance(announce, Announce)
    assert announce.epoch == 10
    assert announce.reason == "another node leads"


def test_the_next_leader_takes_the_job_over_in_the_same_order() -> None:
    members = tuple(Member(name, f"node{name}", port=1) for name in ("2", "0"))
    group, world = JobGroup("job", 6, members), WorldSpec(members=("0", "1", "2"))
    state = membership.take_over("012", JobPolicy(), 6, group, world)
    assert [worker.name for worker in state.having(Phase.MEMBER)] == ["2", "0"]
    assert state.worker("1").phase is Phase.AWAY
    for event in (Entered("2", 6), Entered("0", 6)):
        state, _ = membership.handle(state, event, 0.0)
    state, actions = membership.handle(state, Ready("1", Member("1", "node1", port=1)), 0.0)
    (announce,) = actions
    assert isinstance(announce, Announce)
    assert (announce.epoch, [m.worker for m in announce.members]) == (7, ["2", "0", "1"])


def test_a_group_that_does_not_work_is_renewed_with_the_same_members() -> None:
    story = Story()
    story.tell(events.FoundHistory())
    members = (Member("a0", "a"), Member("a1", "a"))
    story.tell(WantGroup("job", members, (), "begins"))
    assert story.node.view is not None
    (first,) = story.node.view.groups
    story.tell(WantGroup("job", members, ("a0", "a1"), "its links failed", renew=True))
    (renewed,) = story.node.view.groups
    assert (renewed.members, renewed.origin) == (members, first.origin)
    assert renewed.epoch == first.epoch + 1


# ---------------------------------------------------------------- nodes that go and come


def test_workers_of_a_lost_node_are_away_and_started_when_it_is_back_without_them() -> None:
    job = Job()
    did = job.tell(Away(("1",), "node1 left"))
    assert [type(action) for action in did] == [EndGroup, Announce]
    assert job.state.worker("1").phase is Phase.AWAY
    (start,) = job.tell(Placed("1"))
    assert start == Start("1", 1, "its node is back")
    assert job.state.worker("1").restarts == 0, "its code did nothing wrong"


def test_a_newcomers_worker_is_started_and_comes_in() -> None:
    job = Job()
    (start,) = job.tell(Placed("3"))
    assert start == Start("3", 0, "its node came in")
    (announce,) = job.tell(Ready("3", Member("3", "node3", port=1)))
    assert isinstance(announce, Announce)
    assert [member.worker for member in announce.members] == ["0", "1", "2", "3"]


def test_a_job_that_ends_waits_for_no_node_that_is_away() -> None:
    job = Job()
    job.tell(Away(("1",), "node1 left"))
    job.tell(Exited("0", 0), Exited("2", 0))
    assert job.state.over
    assert job.state.exit_code == 0


def test_nor_does_one_that_never_used_potluck() -> None:
    state, _ = membership.begin("01", JobPolicy())
    for event in (Exited("0", 0), Away(("1",), "node1 left")):
        state, _ = membership.handle(state, event, 0.0)
    assert state.over


def test_nobody_is_placed_in_a_job_that_winds_up() -> None:
    job = Job()
    job.tell(Finished("0"))
    assert job.tell(Placed("3")) == []
