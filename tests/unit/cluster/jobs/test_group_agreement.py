"""What the nodes agree on when workers go and come: stories of membership, of the agreement about
its groups and of the rules of views together."""

from __future__ import annotations

from potluck._core.cluster.jobs.group_agreement import GroupAgreement
from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.events import Announce, Away, Event, Placed, Severed, Tick
from potluck._core.cluster.jobs.groups.roster import JobPolicy, Phase
from potluck._core.cluster.membership.events import WantGroup
from potluck._core.cluster.membership.view import following, objection_to
from potluck._core.wire.jobs import Exited
from potluck._core.wire.nodes import JobGroup, View, ViewMember
from potluck._core.wire.worker_link import Entered, Lost, ProbeReply, Ready, WorkerProgress

SIGKILL = 9


class Job:
    """A job with worker 0 on node n0, and so on; node L leads, without a worker. The nodes answer
    at once; ``refusals`` are the reasons why they did not agree, of the last ``tell``."""

    def __init__(self, names: str) -> None:
        self.now, self.names = 0.0, names
        nodes = ("L", *(f"n{name}" for name in names))
        members = tuple(ViewMember(node, 1, number) for number, node in enumerate(nodes, 1))
        self.view = View("history", 1, members)
        self.state, _ = membership.begin(names, JobPolicy(), 1)
        self.groups = GroupAgreement("job", None)
        self.refusals: list[str] = []

    @property
    def group(self) -> JobGroup:
        found = self.view.group("job")
        assert found is not None
        return found

    @property
    def members(self) -> str:
        """Of the group that the nodes have agreed on, in rank order."""
        return "".join(member.worker for member in self.group.members)

    def tell(self, *events: Event | WorkerProgress) -> None:
        """Handle ``events`` as the leader does, and what follows."""
        self.refusals = []
        for event in events:
            if isinstance(event, Exited):
                self.groups.ended(event.worker)
            if not isinstance(event, WorkerProgress):
                self._handle(event)
            if isinstance(event, Entered | WorkerProgress):
                self.groups.take(event, self.state.worker(event.worker).joined)

    def _handle(self, event: Event) -> None:
        self.state, actions = membership.handle(self.state, event, self.now)
        for action in actions:
            if isinstance(action, Announce):
                self._announced(action)

    def _announced(self, action: Announce) -> None:
        want = self.groups.announced(action, (), ())
        objection = objection_to(want, self.view)
        if objection:
            self.refusals.append(objection)
            refused = self.groups.refused(self.view.epoch, objection)
            assert refused is not None
            self._handle(refused)
        else:
            self._install(self.view.nodes, [want])

    def _install(self, kept: tuple[str, ...], wanted: list[WantGroup]) -> None:
        self.view = following(self.view, self.view.epoch + 1, kept=kept, wanted=wanted, reason="x")
        if (group := self.view.group("job")) is not None:
            for event in self.groups.installed(group, "x")[0]:
                self._handle(event)

    def again(self) -> None:
        """It is time to announce what was refused."""
        self.now += 0.5
        self.tell(Tick())

    def leaves(self, *names: str) -> None:
        """The nodes of these workers are left out of the view."""
        self.refusals = []
        gone = {f"n{name}" for name in names}
        self._install(tuple(node for node in self.view.nodes if node not in gone), [])
        self.groups.away(names)
        self.tell(Away(names, "silent"))

    def comes(self, *names: str) -> None:
        """The nodes of these workers are in the view again."""
        epoch = self.view.epoch + 1
        joining = [(f"n{name}", 2) for name in names]
        self.view = following(self.view, epoch, kept=self.view.nodes, joining=joining, reason="x")

    def ready(self, name: str, after: int = 0, port: int = 1) -> Ready:
        return Ready(name, after, port, node=f"n{name}")

    def trains(self) -> None:
        """All members enter the group, and hold its state."""
        for name in self.members:
            self.tell(Entered(name, self.group.epoch), WorkerProgress(name, self.group.epoch, 5))
        want = self.groups.want_all_hold()
        if want is not None:
            self._install(self.view.nodes, [want])
        assert self.group.entering == ()


def training(names: str) -> Job:
    job = Job(names)
    job.tell(*(job.ready(name) for name in names))
    assert job.group.entering == tuple(names)
    job.trains()
    return job


def test_a_first_group_that_nobody_had_entered_goes_on_without_the_machine_that_left() -> None:
    """The two can't reach each other, and one machine leaves: nothing was committed."""
    job = Job("01")
    job.tell(job.ready("0"), job.ready("1"))
    job.tell(Severed(frozenset({("0", "1")})))
    before = job.group
    job.leaves("1")
    assert job.refusals == []
    assert job.members == "0"
    assert job.group.origin == before.origin
    job.trains()
    job.comes("1")
    job.tell(job.ready("1"))
    assert (job.members, job.group.entering) == ("01", ("1",))


def test_a_member_that_a_short_pause_kept_from_entering_gets_another_group() -> None:
    job = Job("01")
    job.tell(job.ready("0"), job.ready("1"))
    before = job.group
    job.tell(Entered("1", before.epoch), job.ready("0", after=before.epoch), ProbeReply("1", 1))
    for _ in range(2):
        job.again()
    assert (job.members, job.refusals) == ("01", [])
    assert job.group.epoch > before.epoch
    job.trains()


def test_a_member_evicted_before_anybody_had_entered_the_first_group_is_not_waited_for() -> None:
    job = Job("01")
    job.tell(job.ready("0"), job.ready("1"))
    job.tell(Lost("0", job.group.epoch, 1, certain=False))
    job.now += 1.0
    job.tell(Tick())
    assert job.state.worker("1").phase is Phase.EVICTED
    assert (job.members, job.refusals) == ("0", [])


def test_the_only_worker_comes_back_with_its_state_when_its_machine_does() -> None:
    job = training("0")
    before = job.group
    job.leaves("0")
    assert job.group == before, "it stays on record"
    job.comes("0")
    job.tell(job.ready("0", after=before.epoch))
    assert job.refusals == []
    assert (job.group.origin, job.group.entering) == (before.origin, ())
    assert job.group.epoch > before.epoch


def test_it_may_be_in_its_group_still_when_its_machine_reports_it() -> None:
    job = training("0")
    before = job.group
    job.leaves("0")
    job.comes("0")
    job.tell(job.ready("0"), Entered("0", before.epoch))
    job.again()
    assert job.refusals == []
    assert (job.group.origin, job.group.entering) == (before.origin, ())


def test_a_worker_that_was_started_again_is_never_taken_for_the_holder_that_it_was() -> None:
    """Worker 1, which is cut off, may go on with the state."""
    job = training("01")
    before = job.group
    job.tell(Exited("0", -SIGKILL))
    assert job.members == "1"
    job.leaves("1")
    for _ in range(3):
        job.tell(job.ready("0", port=2))
        job.again()
        assert len(job.refusals) <= 1
    assert job.members == "1"
    job.comes("1")
    job.tell(job.ready("1", after=before.epoch + 1))
    job.again()
    assert (sorted(job.members), job.group.entering) == (["0", "1"], ("0",))
    assert job.group.origin == before.origin


def test_a_holder_whose_machine_came_back_without_it_is_gone_and_all_begin_afresh() -> None:
    job = training("0")
    before = job.group
    job.leaves("0")
    job.comes("0")
    job.groups.ended("0")
    job.tell(Placed("0"), job.ready("0", port=2))
    assert job.refusals == []
    assert job.group.origin == job.group.epoch > before.epoch


def test_a_job_that_the_nodes_agree_on_no_group_of_says_so_once_and_fails_in_the_end() -> None:
    job = training("01")
    job.tell(Exited("0", -SIGKILL))
    job.trains()
    job.tell(job.ready("0", port=2))
    job.trains()
    job.tell(Exited("0", -SIGKILL))
    job.leaves("1")
    job.tell(job.ready("0", port=3))
    assert len(job.refusals) == 1
    for _ in range(118):
        job.again()
        assert job.state.failure is None
    job.again()
    assert job.state.failure is not None
    assert job.state.failure.text == (
        "the machines agreed on no group of worker 0 for 60 s: no worker of its group of epoch "
        f"{job.group.epoch} is left to say what was committed; their nodes may still go on: "
        "worker 1 on n1"
    )
    assert job.state.exit_code == 1
    job.tell(Exited("0", 1))
    assert job.state.over, "no machine that is away is waited for"
