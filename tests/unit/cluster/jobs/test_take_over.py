"""A leader is lost, with a worker on its machine, at any moment in the life of a job: the next
leader goes on with the workers that are left, and the job ends."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.jobs.dispatcher import JobDispatcher
from potluck._core.cluster.jobs.groups import roster
from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.view import following, objection_to
from potluck._core.types import Member
from potluck._core.wire import jobs
from potluck._core.wire.nodes import JobGroup
from potluck._core.wire.worker_link import Entered, Finished, Ready, WorkerProgress
from support.job_parts import EVE, LEADER, ME, Machine, install, package_of, play, spec, view

NODE_OF = {"0": LEADER, "1": ME, "2": EVE}
PLACES = tuple(jobs.WorkerPlace(worker, node, 0) for worker, node in NODE_OF.items())
GROUP = 4
"""The epoch of the group that the nodes had agreed on under the lost leader."""


def members(names: str) -> tuple[Member, ...]:
    return tuple(Member(name, NODE_OF[name], port=1) for name in names)


class Led:
    """The job as the next leader, ME, leads it. What it wants of the nodes' view, they agree on at
    once, by the rules of views, and the workers that were reported enter the group. ``refusals``
    are the reasons why they did not agree on an announced group."""

    def __init__(self, machine: Machine, all_jobs: JobDispatcher) -> None:
        self.machine, self.all_jobs = machine, all_jobs
        self.refusals: list[str] = []
        self._here: set[str] = set()
        self._entered: set[tuple[str, int]] = set()

    @property
    def group(self) -> JobGroup | None:
        """The job's group in the view."""
        assert self.machine.view is not None
        return self.machine.view.group("job")

    def agree(self) -> None:
        """Have the nodes answer all that the leader asked of them."""
        while wants := [each for each in self.machine.events if isinstance(each, events.WantGroup)]:
            self.machine.events.clear()
            before, want = self.machine.view, wants[-1]
            assert before is not None
            objection = objection_to(want, before)
            if objection:
                self.refusals += [objection] if want.renew else []
                reason = f"{want.reason}: {objection}"
                self.all_jobs.act(events.GroupRefused("job", before.epoch, reason))
            else:
                kept, epoch = before.nodes, before.epoch + 1
                after = following(before, epoch, kept=kept, wanted=[want], reason=want.reason)
                install(self.machine, self.all_jobs, after)
        for member in () if self.group is None else self.group.members:
            entry = (member.worker, self.group.epoch)
            if member.worker in self._here and entry not in self._entered:
                self._entered.add(entry)
                self.happens(Entered(*entry))

    def lose_leader(self) -> None:
        """The nodes that are left agree on a view without the leader's."""
        before = self.machine.view
        assert before is not None
        self.machine.events.clear()
        reason = "leader is silent"
        after = following(before, before.epoch + 1, kept=(ME, EVE), reason=reason)
        install(self.machine, self.all_jobs, after)
        self.agree()

    def report(self, worker: str, attempt: int, *happened: jobs.Event, alive: bool = True) -> None:
        """The node of ``worker`` reports its process, then what happened to it."""
        node, [controller] = NODE_OF[worker], self.all_jobs._controllers.values()
        state = jobs.ProcessState(worker, attempt, controller.world.number, alive)
        self.all_jobs.received(node, jobs.NodeReport("job", (state,)))
        self.happens(*happened)
        self._here.add(worker)
        self.agree()

    def happens(self, *happened: jobs.Event) -> None:
        for event in happened:
            self.all_jobs.received(NODE_OF[event.worker], jobs.WorkerEvent("job", event))
            self.agree()

    def sent(self, kind: type) -> list[tuple[str, object]]:
        return [(node, each) for node, each in self.machine.sent if isinstance(each, kind)]

    async def forms(self, names: str) -> None:
        """Return when the workers ``names`` are the group."""
        async with asyncio.timeout(20):
            while self.group is None or {m.worker for m in self.group.members} != set(names):
                await asyncio.sleep(0)
                self.agree()

    async def ends(self, attempts: dict[str, int]) -> None:
        """All workers that are left finish: the job is over, whatever became of the lost one."""
        for worker, attempt in attempts.items():
            self.happens(Finished(worker), jobs.Exited(worker, 0, attempt))
            self.happens(jobs.OutputEnded(worker, attempt))
        async with asyncio.timeout(20):
            while "job job is over: exit code 0" not in self.machine.notes:
                await asyncio.sleep(0)


@dataclass(frozen=True)
class Moment:
    """A moment in the life of a job at which its leader is lost.

    ``group`` is the group on record (empty: none), ``entering`` those of it that were not known to
    hold the job's state; ``entered`` have entered it, ``trained`` have committed a step in it.
    ``restarted`` was being started again after the group had formed."""

    what: str
    group: str = "012"
    entering: str = ""
    entered: str = ""
    trained: str = ""
    restarted: str = ""


MOMENTS = (
    Moment("before any group was announced", group=""),
    Moment("a group was announced and not agreed on", group="01", entered="01"),
    Moment("the first group was agreed on, and none had entered it", entering="012"),
    Moment("some had entered the first group", entering="012", entered="1"),
    Moment("all had entered the first group", entering="012", entered="012"),
    Moment("the first group had trained", entering="012", entered="012", trained="012"),
    Moment("all were known to hold the state", entered="012", trained="012"),
    Moment("a newcomer was entering", entering="2", entered="01", trained="01"),
    Moment("all but the lost one were entering", entering="12", entered="012", trained="012"),
    Moment("a member was being started again", entered="01", trained="01", restarted="2"),
    Moment("a member of the first group was being started again", entering="012", restarted="2"),
)


async def under_another_leader(
    machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore, folder: Path, moment: Moment
) -> Led:
    """ME at ``moment``, in the view of the leader that is lost then."""
    package = await package_of(code_store, folder)
    install(machine, all_jobs, view(LEADER, ME, EVE))
    world = jobs.WorldSpec(members=("0", "1", "2"))
    all_jobs.received(LEADER, jobs.Order(spec(package, LEADER), PLACES, world))
    if moment.group:
        origin = GROUP if moment.entering == moment.group else GROUP - 1
        group = JobGroup("job", GROUP, members(moment.group), origin, tuple(moment.entering))
        install(machine, all_jobs, view(LEADER, ME, EVE, epoch=GROUP, groups=(group,)))
    return Led(machine, all_jobs)


def reported(moment: Moment, worker: str) -> list[jobs.Event]:
    """What the node of ``worker`` reports to the next leader, apart from its process."""
    ready = Ready(worker, port=2 if worker in moment.restarted else 1, node=NODE_OF[worker])
    found: list[jobs.Event] = [ready]
    if worker in moment.entered:
        found.append(Entered(worker, GROUP))
    if worker in moment.trained:
        found.insert(0, WorkerProgress(worker, GROUP, 5))
    return found


@pytest.mark.parametrize("first", ["1", "2"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.what)
def test_an_elastic_job_goes_on_without_the_worker_of_the_lost_leader(
    moment: Moment, first: str, tmp_path: Path
) -> None:
    """``first`` is the worker whose node reports first."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        led = await under_another_leader(machine, all_jobs, code_store, tmp_path / "code", moment)
        led.lose_leader()
        for worker in sorted("12", key=lambda worker: worker != first):
            led.report(worker, int(worker in moment.restarted), *reported(moment, worker))
        [controller] = all_jobs._controllers.values()
        await led.forms("12")
        assert controller.state.worker("0").phase is roster.Phase.AWAY
        assert len(led.refusals) <= 1, "it is not asked for over and over"
        assert led.group is not None
        assert {each.worker: each.port for each in led.group.members} == {
            worker: 2 if worker in moment.restarted else 1 for worker in "12"
        }
        await led.ends({"1": 0, "2": int("2" in moment.restarted)})

    play(tmp_path, story)


@pytest.mark.parametrize("group", ["", "012"], ids=["before its ranks met", "after that"])
@pytest.mark.parametrize("entering", ["", "012"], ids=["known", "not known"])
def test_a_fixed_world_that_lost_a_member_with_the_leader_starts_again(
    group: str, entering: str, tmp_path: Path
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        moment = Moment("", group=group, entering=entering if group else "")
        led = await under_another_leader(machine, all_jobs, code_store, tmp_path / "code", moment)
        world = jobs.WorldSpec(members=("0", "1", "2"), is_fixed=True)
        known = all_jobs.runners["job"].spec
        all_jobs.received(LEADER, jobs.Order(known, PLACES, world))
        led.lose_leader()
        ended = [(node, each.workers) for node, each in led.sent(jobs.SignalWorkers)]  # type: ignore[attr-defined]
        assert ended == [(ME, ("1",)), (EVE, ("2",))]
        for worker in "12":
            led.report(worker, 0, Ready(worker, port=1, is_fixed=True))
        for worker in "12":
            led.happens(jobs.Exited(worker, -signal.SIGTERM, 0))
        [controller] = all_jobs._controllers.values()
        assert controller.world == msgspec.structs.replace(
            controller.world, number=1, members=("1", "2"), is_fixed=True
        )
        started = [(node, each.worker, each.attempt) for node, each in led.sent(jobs.StartWorker)]  # type: ignore[attr-defined]
        assert started == [(ME, "1", 1), (EVE, "2", 1)]
        for worker in "12":
            led.report(worker, 1, Ready(worker, port=3, is_fixed=True))
        await led.forms("12")
        await led.ends({"1": 1, "2": 1})

    play(tmp_path, story)


def test_a_job_whose_state_was_lost_with_the_leader_waits_for_it_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = roster.JobPolicy(wait_s=0.05, agree_again_s=0.01)
    monkeypatch.setattr(roster, "_LEAST_AGREE_S", 0.05)
    monkeypatch.setattr(roster.JobPolicy, "of", lambda spec: policy)
    moment = Moment("none that is left holds the state", entering="12", entered="012")

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        led = await under_another_leader(machine, all_jobs, code_store, tmp_path / "code", moment)
        led.lose_leader()
        for worker in "12":
            led.report(worker, 0, *reported(moment, worker))
        [controller] = all_jobs._controllers.values()
        async with asyncio.timeout(20):
            while controller.state.failure is None:
                await asyncio.sleep(0)
                led.agree()
        assert len(led.refusals) == 5
        lines = [each for each in machine.notes if each.startswith("job job: epoch")]
        assert len(lines) == 1, "it says so once"
        assert controller.state.failure.text.endswith(
            "agreed on no group of worker 1, 2 for 0.05 s: leader is silent: no worker of its "
            "group of epoch 4 is left to say what was committed; their nodes may still go on: "
            "worker 0 on leader"
        )
        for worker in "12":
            led.happens(jobs.Exited(worker, 1, 0), jobs.OutputEnded(worker, 0))
        async with asyncio.timeout(20):
            while "job job is over: exit code 1" not in machine.notes:
                await asyncio.sleep(0)

    play(tmp_path, story)


def test_the_next_leader_goes_on_ending_a_job_that_was_to_end(tmp_path: Path) -> None:
    """It was cancelled from a machine which may be gone, too: nobody says so again."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        one = spec(await package_of(code_store, tmp_path / "code"), LEADER)
        install(machine, all_jobs, view(LEADER, ME, EVE))
        all_jobs.received(LEADER, jobs.Order(one, PLACES, interrupts=2))
        install(machine, all_jobs, view(ME, EVE, epoch=5))
        orders = [each for _, each in machine.sent if isinstance(each, jobs.Order)]
        assert orders[-1].interrupts == 2
        [controller] = all_jobs._controllers.values()
        assert controller.num_interrupts == 2
        assert controller.state.stopping

    play(tmp_path, story)
