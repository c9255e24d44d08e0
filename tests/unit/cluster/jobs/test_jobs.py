"""Who may make a node run something: the leader of its own view, and nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck._core import waiting
from potluck._core.cluster.code_store.job_folders import KEPT_JOBS, Record
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.content.package import Package
from potluck._core.cluster.content.shelf import Shelf
from potluck._core.cluster.jobs import output_relay
from potluck._core.cluster.jobs.dispatcher import JobDispatcher
from potluck._core.cluster.jobs.groups.roster import Phase
from potluck._core.cluster.jobs.summary import Summary
from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.events import WantGroup
from potluck._core.wire import bulk, jobs, local, peers, worker_link
from potluck._core.wire.nodes import JobGroup
from potluck.errors import ConfigurationError, ProtocolError
from support.job_parts import (
    EVE,
    LEADER,
    ME,
    Machine,
    install,
    package_of,
    play,
    reports,
    spec,
    submit,
    until_over,
    view,
)


def record(package: bytes, job: str) -> Record:
    return Record(job, LEADER, package.hex())


def test_an_order_of_the_leader_is_carried_out_also_if_it_comes_before_its_view(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        places = (jobs.WorkerPlace("0", ME, 0),)
        all_jobs.received(LEADER, jobs.Order(spec(package, LEADER), places))
        assert not all_jobs.runners
        install(machine, all_jobs, view(LEADER, ME))
        async with asyncio.timeout(20):
            while not reports(machine):
                await asyncio.sleep(0)

    machine = play(tmp_path, story)
    assert machine.launched == ["job"]
    assert reports(machine) == [LEADER]


def test_a_node_that_breaks_over_an_order_reports_it_instead_of_leaving_the_leader_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(record: Record) -> Path:
        raise KeyError("no room")

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        monkeypatch.setattr(code_store, "open", breaks)
        install(machine, all_jobs, view(LEADER, ME))
        all_jobs.received(
            LEADER, jobs.Order(spec(package, LEADER), (jobs.WorkerPlace("0", ME, 0),))
        )
        async with asyncio.timeout(20):
            while not reports(machine):
                await asyncio.sleep(0)

    machine = play(tmp_path, story)
    [said] = [message for _, message in machine.sent if isinstance(message, jobs.NodeReport)]
    assert said.error == "this is potluck's fault, please report it: KeyError: 'no room'"
    assert "preparing job job broke" in caplog.text


def test_a_banned_node_ends_its_workers(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        install(machine, all_jobs, view(LEADER, ME))
        all_jobs.received(LEADER, jobs.Order(spec(package, LEADER), ()))
        all_jobs.act(events.Leave("a cut"))
        assert all_jobs.runners, "it may come back"
        machine.is_banned = True
        all_jobs.act(events.Leave("banned"))
        assert not all_jobs.runners

    play(tmp_path, story)


def test_an_order_of_anybody_else_is_refused_and_said(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        install(machine, all_jobs, view(LEADER, ME, EVE))
        order = jobs.Order(spec(package, EVE), (jobs.WorkerPlace("0", ME, 0),))
        all_jobs.received(EVE, order)
        all_jobs.received(EVE, jobs.StartWorker("job", "0", 0))
        install(machine, all_jobs, view(LEADER, ME, EVE, epoch=4))
        assert not all_jobs.runners

    machine = play(tmp_path, story)
    assert machine.launched == []
    assert machine.notes == [
        "eve (eve) does not lead the cluster, and ordered a job: nothing is run for it"
    ]
    assert not [
        m for _, m in machine.sent if isinstance(m, bulk.DescriptionRequest | jobs.NodeReport)
    ]


def test_nothing_runs_that_the_owner_does_not_allow_whatever_the_leader_orders(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        machine.refusals[ME] = "its owner does not let it run jobs of leader"
        install(machine, all_jobs, view(LEADER, ME))
        order = jobs.Order(spec(package, LEADER), (jobs.WorkerPlace("0", ME, 0),))
        all_jobs.received(LEADER, order)
        all_jobs.received(LEADER, jobs.StartWorker("job", "0", 0))
        async with asyncio.timeout(20):
            while not reports(machine):
                await asyncio.sleep(0)
        all_jobs.received(LEADER, jobs.StartWorker("job", "0", 0))
        assert machine.launched == []
        machine.refusals.clear()
        all_jobs._offers_changed()
        async with asyncio.timeout(20):
            while not machine.launched:
                await asyncio.sleep(0)

    machine = play(tmp_path, story)
    said = [message for _, message in machine.sent if isinstance(message, jobs.NodeReport)]
    assert said[0].error == "its owner does not let it run jobs of leader"
    assert machine.launched == ["job"], "it is allowed now"


@pytest.mark.parametrize("ends_by", ["the leader's list", "a ban"])
@pytest.mark.parametrize("starts", [True, False])
def test_a_job_that_ran_here_is_over_once_and_one_that_did_not_may_be_ordered_again(
    tmp_path: Path, starts: bool, ends_by: str
) -> None:
    """The first leader may be lost between its orders to two nodes."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        install(machine, all_jobs, view(LEADER, ME))
        order = jobs.Order(spec(package, LEADER), (jobs.WorkerPlace("0", ME, 0),))
        all_jobs.received(LEADER, order)
        async with asyncio.timeout(20):
            while not reports(machine):
                await asyncio.sleep(0)
        if starts:
            all_jobs.runners["job"]._reports.starting("0", 0, 0)
        if ends_by == "a ban":
            all_jobs.barred([LEADER])
        else:
            all_jobs.received(LEADER, jobs.JobList(()))

    machine = play(tmp_path, story)
    assert machine.over_here == [("job", starts)]


@pytest.mark.parametrize("what", ["package", "starter"])
def test_another_job_under_the_name_of_one_that_runs_here_is_refused_and_said(
    tmp_path: Path, what: str
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        mine = spec(await package_of(code_store, tmp_path / "code"), ME)
        install(machine, all_jobs, view(LEADER, ME))
        all_jobs.received(LEADER, jobs.Order(mine, ()))
        lie: dict[str, Any] = {"package": bytes(32)} if what == "package" else {"starter": LEADER}
        lies = jobs.Order(msgspec.structs.replace(mine, **lie), (jobs.WorkerPlace("0", ME, 0),))
        for _ in range(3):
            all_jobs.received(LEADER, lies)
        runner = all_jobs.runners["job"]
        assert (runner.spec, runner.places) == (mine, ()), "nothing of the lie is taken"

    machine = play(tmp_path, story)
    [said] = [note for note in machine.notes if "another job was ordered under the name" in note]
    assert "job" in said


def placed(all_jobs: JobDispatcher) -> list[str]:
    return sorted(place.node for place in all_jobs._controllers["job"].placement.places)


def phases(all_jobs: JobDispatcher) -> dict[str, str]:
    """The phase of the worker at each node, as the leader sees it."""
    [controller] = all_jobs._controllers.values()
    places = {place.worker: place.node for place in controller.placement.places}
    return {places[each.worker]: each.phase for each in controller.status().workers}


def test_the_leader_leaves_out_a_machine_whose_owner_does_not_allow_the_starter(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        machine.refusals[EVE] = "its owner does not let it run jobs of leader"
        install(machine, all_jobs, view(ME, LEADER, EVE))
        all_jobs.received(LEADER, jobs.Submit(spec(package, LEADER)))
        assert placed(all_jobs) == [LEADER, ME]
        for node in (ME, LEADER):
            all_jobs.received(node, jobs.NodeReport("job"))
        notes = notes_of(machine)
        assert "eve (eve) takes no part: its owner does not let it run jobs of leader" in notes
        all_jobs.received(EVE, jobs.NodeReport("job", error=machine.refusals[EVE]))
        assert phases(all_jobs) == {LEADER: "starting", ME: "starting"}
        machine.refusals.clear()
        all_jobs._offers_changed()
        assert placed(all_jobs) == [EVE, LEADER, ME], "the job grows"

    play(tmp_path, story)


def test_a_job_that_no_owner_allows_is_refused_with_each_reason(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        machine.refusals = {ME: "not for you", LEADER: "its owner paused it"}
        install(machine, all_jobs, view(ME, LEADER))
        machine.sent.clear()
        all_jobs.received(LEADER, jobs.Submit(spec(bytes(32), LEADER)))
        [(to, answer)] = machine.sent
        assert to == LEADER
        assert answer == jobs.Submitted(
            "job",
            "no machine runs this job. me (me): not for you. leader (leader): its owner paused it",
        )

    play(tmp_path, story)


def test_a_paused_machine_leaves_the_job_and_comes_back(tmp_path: Path) -> None:
    """What its workers say once it has left changes nothing, also if they end by their signal."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code")
        for node in (ME, LEADER, EVE):
            all_jobs.received(node, jobs.NodeReport("job"))
        [worker] = all_jobs._controllers["job"].placement.at(EVE)
        machine.refusals[EVE] = "its owner paused it"
        all_jobs._offers_changed()
        others = {LEADER: "starting", ME: "starting"}
        assert phases(all_jobs) == others | {EVE: "away"}
        for late in (
            worker_link.Ready(worker, port=1, pid=1),
            worker_link.Failed(worker, "terminated"),
        ):
            all_jobs.received(EVE, jobs.WorkerEvent("job", late))
        busy = jobs.NodeReport("job", (jobs.ProcessState(worker, 0, 0, True),))
        all_jobs.received(EVE, busy)
        assert phases(all_jobs)[EVE] == "away"
        idle = jobs.NodeReport("job", (jobs.ProcessState(worker, 0, 0, False),))
        all_jobs.received(EVE, idle)
        assert phases(all_jobs)[EVE] == "away", "its owner did not give it again"
        machine.sent.clear()
        all_jobs._offers_changed()
        assert machine.sent == [], "it leaves once, and is asked for nothing"
        machine.refusals.clear()
        machine.sent.clear()
        all_jobs._offers_changed()
        asked = [to for to, each in machine.sent if isinstance(each, jobs.Order)]
        assert asked == [EVE], "for a report"
        all_jobs.received(EVE, busy)
        assert phases(all_jobs)[EVE] == "away", "its old worker is still ending"
        all_jobs.received(EVE, jobs.NodeReport("job", error="it is paused"))
        lines = notes_of(machine)
        assert not any("it is paused" in line for line in lines), "an old report"
        all_jobs.received(EVE, jobs.WorkerEvent("job", jobs.Exited(worker, -15, 0)))
        all_jobs.received(EVE, idle)
        assert phases(all_jobs) == others | {EVE: "starting"}
        [controller] = all_jobs._controllers.values()
        assert controller.state.worker(worker).restarts == 0, "that was no failure"
        all_jobs.received(EVE, jobs.WorkerEvent("job", worker_link.Ready(worker, port=1, pid=2)))
        assert phases(all_jobs)[EVE] == "ready", "its new worker counts again"

    play(tmp_path, story)


def test_nobody_outside_the_view_or_in_anothers_name_can_submit_a_job(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        install(machine, all_jobs, view(ME, LEADER))
        machine.sent.clear()
        all_jobs.received(EVE, jobs.Submit(spec(bytes(32), EVE)))
        assert machine.sent == []
        all_jobs.received(LEADER, jobs.Submit(spec(bytes(32), ME)))
        assert machine.sent == []

    play(tmp_path, story)


def test_a_node_speaks_for_its_own_workers_only(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code")
        for node in (ME, LEADER, EVE):
            all_jobs.received(node, jobs.NodeReport("job"))
        [status] = all_jobs.status()
        assert {worker.phase for worker in status.workers} == {"starting"}
        all_jobs.received(EVE, jobs.WorkerEvent("job", jobs.Exited("0", 1, 0)))
        [status] = all_jobs.status()
        assert {worker.phase for worker in status.workers} == {"starting"}
        all_jobs.received(LEADER, jobs.WorkerEvent("job", jobs.Exited("0", 1, 0)))
        [status] = all_jobs.status()
        assert status.workers[0].phase == "gone"

    play(tmp_path, story)


def told(machine: Machine, node: str) -> list[worker_link.FromAgent]:
    """What the leader has ``node`` tell its workers."""
    return [
        message.message
        for to, message in machine.sent
        if to == node and isinstance(message, jobs.SendToWorkers)
    ]


def test_a_wait_is_passed_on_to_all_nodes_and_a_stopped_worker_named_by_its_own(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code")
        nodes = (ME, LEADER, EVE)
        for node in nodes:
            all_jobs.received(node, jobs.NodeReport("job"))
        on = {place.node: place.worker for place in all_jobs._controllers["job"].placement.places}
        for node in nodes:
            ready = worker_link.Ready(on[node], port=1, pid=1)
            all_jobs.received(node, jobs.WorkerEvent("job", ready))
        group = next(each for each in machine.events if isinstance(each, WantGroup))
        agreed = JobGroup("job", 4, group.members)
        install(machine, all_jobs, msgspec.structs.replace(view(*nodes, epoch=4), groups=(agreed,)))

        waiting = jobs.WorkerEvent("job", worker_link.Waiting(on[ME], 4))
        all_jobs.received(ME, waiting)
        all_jobs.received(ME, waiting)
        for node in nodes:
            assert told(machine, node) == [worker_link.Probe(0)], "once, however many wait"

        stalled = jobs.WorkerEvent("job", jobs.Stalled(on[EVE], "its process 7 is stopped"))
        all_jobs.received(LEADER, stalled)
        assert told(machine, ME) == [worker_link.Probe(0)], "a node speaks for its own workers"
        all_jobs.received(EVE, stalled)
        *_, over = told(machine, ME)
        assert isinstance(over, worker_link.GroupOver)
        assert over.worker == on[EVE]
        assert over.cause == (f"worker {on[EVE]} on {EVE} stands still: its process 7 is stopped")

    play(tmp_path, story)


def test_what_jobs_leave_behind_is_bounded(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        for number in range(KEPT_JOBS + 3):
            folder = code_store.open(record(package, f"job-{number}"))
            assert (folder.code / "train.py").read_text() == "print('hello')"
            code_store.close(folder)

    play(tmp_path, story)
    assert len(list((tmp_path / "home" / "code_store" / "jobs").iterdir())) == KEPT_JOBS


def test_a_jobs_folder_is_kept_by_its_own_age_not_by_its_scripts(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        for number in range(KEPT_JOBS):
            code_store.close(code_store.open(record(package, f"job-{number}")))
        os.utime(tmp_path / "home" / "content" / "code" / "packages" / package.hex(), (1, 1))
        code_store.close(code_store.open(record(package, "last")))

    play(tmp_path, story)
    assert list((tmp_path / "home" / "code_store" / "jobs").glob("last.*/code/train.py"))


def test_a_folder_that_was_not_copied_whole_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(shelf: Shelf, package: Package, target: Path) -> None:
        target.mkdir()
        raise OSError("the disk is full")

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        with monkeypatch.context() as patch:
            patch.setattr(Shelf, "unpack", breaks)
            with pytest.raises(ConfigurationError, match=r"the disk is full\. Make room"):
                code_store.open(record(package, "job"))
        folder = code_store.open(record(package, "job"))
        assert (folder.code / "train.py").is_file()
        code_store.close(folder)

    play(tmp_path, story)


def test_an_agent_that_ends_does_not_wait_for_a_folder_on_its_way(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        install(machine, all_jobs, view(LEADER, ME))
        all_jobs.received(LEADER, jobs.Order(spec(bytes(32), LEADER), ()))
        async with asyncio.timeout(20):
            while not any(isinstance(m, bulk.DescriptionRequest) for _, m in machine.sent):
                await asyncio.sleep(0)
            await all_jobs.close()

    play(tmp_path, story)


def test_a_starter_that_was_cut_off_at_the_end_of_its_job_hears_that_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_relay, "COPY_S", 0.05)

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code", (LEADER,), max_nodes=1)
        all_jobs.received(LEADER, jobs.NodeReport("job"))
        machine.unreachable.add(LEADER)
        all_jobs.received(LEADER, jobs.WorkerEvent("job", jobs.Exited("0", 0, 0)))
        all_jobs.received(LEADER, jobs.WorkerEvent("job", jobs.OutputEnded("0", 0)))
        await until_over(all_jobs)
        assert machine.notes[-1] == "job job is over: exit code 0"
        kept = [each for _, each in machine.sent if isinstance(each, jobs.KeepEnd)]
        assert msgspec.json.decode(kept[0].summary, type=Summary).exit_code == 0
        machine.unreachable.clear()
        machine.sent.clear()
        all_jobs.linked(LEADER)
        assert (LEADER, jobs.JobList((), ())) in machine.sent

    play(tmp_path, story)


def test_a_process_that_was_replaced_may_report_its_exit_after_the_new_one(tmp_path: Path) -> None:
    """A node of the release before reads the last output of a process before it reports its exit,
    and may report meanwhile that the process does not run."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code", (LEADER,), max_nodes=1)
        all_jobs.received(LEADER, jobs.NodeReport("job"))
        ready = worker_link.Ready("0", port=1, pid=7)
        all_jobs.received(LEADER, jobs.WorkerEvent("job", ready))
        is_over = (jobs.ProcessState("0", 0, 0, False),)
        all_jobs.received(LEADER, jobs.NodeReport("job", is_over))
        assert (LEADER, jobs.StartWorker("job", "0", 1)) in machine.sent
        for event in (
            jobs.Exited("0", 0, 1),
            jobs.OutputEnded("0", 1),
            jobs.Exited("0", -9, 0),
            jobs.OutputEnded("0", 0),
        ):
            all_jobs.received(LEADER, jobs.WorkerEvent("job", event))
        await until_over(all_jobs)
        [ended] = [each for _, each in machine.sent if isinstance(each, jobs.JobEnded)]
        [worker] = msgspec.json.decode(ended.summary, type=Summary).workers
        assert (worker.exit, worker.restarts) == (0, 1)

    play(tmp_path, story)


def test_a_stopped_worker_whose_agent_is_another_now_has_ended(tmp_path: Path) -> None:
    """Whoever would tell of its exit is gone."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code", (LEADER,))
        for number, node in enumerate((LEADER, ME)):
            all_jobs.received(node, jobs.NodeReport("job"))
            ready = worker_link.Ready(str(number), port=1, pid=7)
            all_jobs.received(node, jobs.WorkerEvent("job", ready))
        [controller] = all_jobs._controllers.values()
        all_jobs.received(LEADER, jobs.InterruptJob("job", signal.SIGTERM, 1))
        all_jobs.received(ME, jobs.WorkerEvent("job", jobs.Exited("1", 0, 0)))
        all_jobs.received(ME, jobs.WorkerEvent("job", jobs.OutputEnded("1", 0)))
        assert controller.state.worker("0").phase is Phase.STOPPING
        is_alive = (jobs.ProcessState("0", 0, 0, True),)
        all_jobs.received(LEADER, jobs.NodeReport("job", is_alive))
        assert controller.state.worker("0").phase is Phase.STOPPING
        all_jobs.received(LEADER, jobs.NodeReport("job"))
        await until_over(all_jobs)

    play(tmp_path, story)


def test_a_starter_whose_agent_is_another_now_submits_what_the_next_leader_lacks(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        own, other = spec(bytes(32), ME), spec(bytes(32), EVE)
        other = msgspec.structs.replace(other, job="other")
        install(machine, all_jobs, first := view(LEADER, EVE, ME))
        for each in (own, other):
            all_jobs.received(LEADER, jobs.JobWaits(each))
        all_jobs.received(LEADER, jobs.JobList((), ("job", "other")))
        install(
            machine, all_jobs, msgspec.structs.replace(first, epoch=4, members=first.members[1:])
        )
        submitted = [sent for sent in machine.sent if isinstance(sent[1], jobs.Submit)]
        assert submitted == [(EVE, jobs.Submit(own))]
        all_jobs.received(EVE, jobs.JobList((), ()))
        assert machine.listed_here[-1] == {"job"}, "it is not over"
        all_jobs.received(EVE, jobs.Submitted("job"))
        all_jobs.received(EVE, jobs.JobList((), ()))
        assert machine.over_here == [("job", True)]

    play(tmp_path, story)


def test_a_machine_that_is_alone_takes_none_of_its_jobs_for_over(tmp_path: Path) -> None:
    """Others may run them, or have them waiting."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        install(machine, all_jobs, view(ME))
        all_jobs.received(ME, jobs.JobList((), ()))
        assert machine.listed_here == []
        install(machine, all_jobs, view(EVE, ME, epoch=4))
        all_jobs.received(EVE, jobs.JobList(("job",), ()))
        assert machine.listed_here == [{"job"}]

    play(tmp_path, story)


def test_the_end_of_a_job_does_not_wait_for_output_of_a_node_that_leaves(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code", (LEADER,), max_nodes=1)
        all_jobs.received(LEADER, jobs.NodeReport("job"))
        all_jobs.received(LEADER, jobs.WorkerEvent("job", jobs.Exited("0", 0, 0)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert all_jobs.status(), "its last output may come"
        install(machine, all_jobs, view(ME, epoch=4))
        await until_over(all_jobs)

    play(tmp_path, story)


def test_who_leads_no_more_keeps_no_task_for_the_job(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        install(machine, all_jobs, view(ME, LEADER))
        before = len(asyncio.all_tasks())
        all_jobs.received(LEADER, jobs.Submit(spec(package, LEADER)))
        assert len(asyncio.all_tasks()) == before + 3, "the end, the roll call, the copy of the log"
        install(machine, all_jobs, view(LEADER, ME, epoch=4))
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0)
        assert machine.events == [], "the job is not over"

    play(tmp_path, story)


class Terminal:
    """A command that waits for its job."""

    def __init__(self) -> None:
        self.heard: list[local.Reply] = []

    def take(self, message: local.Reply) -> None:
        self.heard.append(message)


def test_a_job_that_another_leader_took_over_is_not_submitted_again(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "train.py").write_text("print('hello')")
        install(machine, all_jobs, view(LEADER, EVE, ME))
        terminal, folder = Terminal(), str(tmp_path / "code")
        request = local.RunRequest(folder=folder, script="train.py", directory=folder)
        job = await all_jobs.submit(request, terminal)
        install(machine, all_jobs, view(EVE, ME, epoch=4))
        status = worker_link.JobState(job, EVE, 0, "train.py", 0.0, 4, 7, None, (), ())
        all_jobs.received(EVE, jobs.JobStatus(status))
        machine.sent.clear()
        install(machine, all_jobs, view(EVE, ME, epoch=5))
        assert not [m for _, m in machine.sent if isinstance(m, jobs.Submit)]
        all_jobs.received(EVE, jobs.JobList(()))
        last = terminal.heard[-1]
        assert isinstance(last, local.CommandResult)
        assert "the cluster does not have it any more" in last.text

    play(tmp_path, story)


def test_the_log_of_a_job_is_read_from_before_it_is_ordered_until_it_is_refused(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "train.py").write_text("print('hello')")
        install(machine, all_jobs, view(LEADER, EVE, ME))
        terminal, folder = Terminal(), str(tmp_path / "code")
        request = local.RunRequest(folder=folder, script="train.py", directory=folder)
        job = await all_jobs.submit(request, terminal)
        assert local.JobSubmitted(job, ME) in terminal.heard
        question = jobs.LogRequest(job, ME, wait_s=30.0)
        asked = asyncio.create_task(all_jobs._keeping._asked(ME, question))
        while job not in str(machine.log._jobs):
            await asyncio.sleep(0)
        assert not asked.done()
        all_jobs.received(LEADER, jobs.Submitted(job, "no machine runs it"))
        async with asyncio.timeout(20):  # less than it was to wait
            answer = await asked
        assert answer == jobs.LogLines((), has_more=False, is_over=True)
        assert machine.log._jobs == {}

    play(tmp_path, story)


def test_a_script_that_does_not_travel_is_refused_before_anybody_hears_of_the_job(
    tmp_path: Path,
) -> None:
    """It would else be missing on every node but this one, where the workers fail."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        folder = tmp_path / "code"
        folder.mkdir()
        (tmp_path / "train.py").write_text("print('hello')")
        (folder / "train.py").symlink_to(tmp_path / "train.py")
        install(machine, all_jobs, view(LEADER, ME))
        machine.sent.clear()
        request = local.RunRequest(folder=str(folder), script="train.py", directory=str(folder))
        with pytest.raises(ConfigurationError) as caught:
            await all_jobs.submit(request, Terminal())
        assert str(caught.value) == (
            f"the script {folder}/train.py can't travel to the other nodes: it is a link, and "
            "links do not travel. To run it on the cluster, run the file that it leads to: "
            f"potluck run {tmp_path.resolve()}/train.py. Nothing was started"
        )
        assert machine.sent == []
        assert machine.events == []

    play(tmp_path, story)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", ".", "a\\b", "", "a\n"])
def test_a_jobs_name_is_no_path(name: str) -> None:
    order = jobs.Order(msgspec.structs.replace(spec(bytes(32), EVE), job=name), ())
    with pytest.raises(ProtocolError, match="job"):
        peers.MESSAGE.decode(peers.MESSAGE.encode(order)[4:])


def test_a_jobs_name_may_have_what_scripts_names_have() -> None:
    order = jobs.Order(msgspec.structs.replace(spec(bytes(32), EVE), job="..my train é-1f0c"), ())
    assert peers.MESSAGE.decode(peers.MESSAGE.encode(order)[4:]) == order


def test_a_node_that_floods_with_orders_it_may_not_give_is_cut_off(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        install(machine, all_jobs, view(LEADER, ME, EVE))
        order = jobs.JobList(tuple(f"{number:0256d}" for number in range(jobs.MAX_JOBS)))

        def flood() -> None:
            for _ in range(10_000):
                all_jobs.received(EVE, order)

        with pytest.raises(ProtocolError, match="ordered more than is kept"):
            flood()
        all_jobs.received(LEADER, order)

    play(tmp_path, story)


def notes_of(machine: Machine) -> list[str]:
    """Of a job of another node, which this one leads."""
    said = (note.partition("job job: ") for note in machine.notes)
    return [text for before, _, text in said if not before and text]


def test_a_job_names_the_machines_and_workers_that_its_beginning_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.05)
    monkeypatch.setattr(waiting, "EVERY_S", 0.05)

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        async def says(part: str) -> None:
            machine.notes.clear()
            async with asyncio.timeout(20):
                while not any(part in text for text in notes_of(machine)):
                    await asyncio.sleep(0)

        await submit(machine, all_jobs, code_store, tmp_path / "code")
        await says("waiting for leader (leader), me (me), eve (eve) to get ready for the job (")
        all_jobs.received(ME, jobs.NodeReport("job"))
        await says("waiting for leader (leader), eve (eve) to get ready for the job (")
        for node in (LEADER, EVE):
            all_jobs.received(node, jobs.NodeReport("job"))
        on = {place.node: place.worker for place in all_jobs._controllers["job"].placement.places}
        for node in (ME, LEADER):
            all_jobs.received(node, jobs.WorkerEvent("job", jobs.Started(on[node], 0, 7)))
        missing = f"worker {on[EVE]} on eve (its process has not started yet)"
        await says(f"ready: 0 of 3 workers; still waiting for {missing} (")
        all_jobs.received(EVE, jobs.WorkerEvent("job", jobs.Started(on[EVE], 0, 7)))
        for node in (ME, LEADER):
            ready = worker_link.Ready(on[node], port=1, pid=7)
            all_jobs.received(node, jobs.WorkerEvent("job", ready))
        missing = f"worker {on[EVE]} on eve (its process 7 runs and has not called potluck.init()"
        await says(f"ready: 2 of 3 workers; still waiting for {missing}")

    play(tmp_path, story)


def test_a_job_begins_without_a_machine_that_leaves_before_it_is_ready(tmp_path: Path) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code")
        for node in (ME, LEADER):
            all_jobs.received(node, jobs.NodeReport("job"))
        assert not all_jobs.status(), "eve may get ready"
        install(machine, all_jobs, view(ME, LEADER, epoch=4))
        assert phases(all_jobs) == {LEADER: "starting", ME: "starting"}
        install(machine, all_jobs, view(ME, LEADER, EVE, epoch=5))
        all_jobs.received(EVE, jobs.NodeReport("job"))
        assert phases(all_jobs) == {LEADER: "starting", ME: "starting", EVE: "starting"}

    play(tmp_path, story)


def test_a_job_is_refused_when_too_few_machines_are_left_before_it_has_begun(
    tmp_path: Path,
) -> None:
    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        package = await package_of(code_store, tmp_path / "code")
        install(machine, all_jobs, view(ME, LEADER, EVE))
        three = msgspec.structs.replace(spec(package, LEADER), min_nodes=3)
        all_jobs.received(LEADER, jobs.Submit(three))
        machine.sent.clear()
        install(machine, all_jobs, view(ME, LEADER, epoch=4))
        [answer] = [each for _, each in machine.sent if isinstance(each, jobs.Submitted)]
        assert answer.error.startswith("2 of at least 3 machines can run this job")
        async with asyncio.timeout(20):
            while all_jobs._controllers:
                await asyncio.sleep(0)

    play(tmp_path, story)


def test_a_job_whose_order_no_link_would_take_is_refused(tmp_path: Path) -> None:
    """It would end the links to all nodes, and at the next view the leader's agent."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        long = ("x" * (1 << 16),) * 16
        await submit(machine, all_jobs, code_store, tmp_path / "code", arguments=long)
        [answer] = [each for _, each in machine.sent if isinstance(each, jobs.Submitted)]
        assert "at most 1048576 are allowed" in answer.error
        assert not [each for _, each in machine.sent if isinstance(each, jobs.Order)]

    play(tmp_path, story)


def test_a_job_that_can_not_begin_leaves_its_end_behind(tmp_path: Path) -> None:
    """The command that started it may have left: whoever asks later is told."""

    async def story(machine: Machine, all_jobs: JobDispatcher, code_store: CodeStore) -> None:
        await submit(machine, all_jobs, code_store, tmp_path / "code", (LEADER,), max_nodes=1)
        all_jobs.received(LEADER, jobs.NodeReport("job", error="its disk is full"))

        def kept() -> list[Summary]:
            ends = [each for _, each in machine.sent if isinstance(each, jobs.KeepEnd)]
            return [msgspec.json.decode(each.summary, type=Summary) for each in ends]

        async with asyncio.timeout(20):
            while not kept():
                await asyncio.sleep(0)
        assert kept()[0].exit_code == 2
        assert "its disk is full" in kept()[0].problems[0]

    play(tmp_path, story)
