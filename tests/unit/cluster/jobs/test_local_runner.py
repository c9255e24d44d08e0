"""The workers of one machine: a worker speaks for itself only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.history import JobHistory
from potluck._core.cluster.jobs.local_runner import LocalRunner
from potluck._core.cluster.jobs.log import JobLog
from potluck._core.cluster.names import NodeNames
from potluck._core.cluster.sharing.limits import Limits
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.types import Member
from potluck._core.wire import jobs, worker_link
from potluck._core.wire.greeting import Hello
from potluck._core.wire.nodes import JobGroup, View, ViewMember
from potluck.errors import ConfigurationError, IdentityError, PotluckError
from support.job_parts import ME, parts_of
from support.requests import Nodes

SPEC = jobs.JobSpec(
    job="job", script="train.py", package=None, starter=ME, versions=own_versions(), per_node=2
)
ORDER = jobs.Order(
    SPEC,
    (jobs.WorkerPlace("0", ME, 0), jobs.WorkerPlace("1", ME, 1)),
    jobs.WorldSpec(members=("0", "1")),
)


class Machine:
    """The rest of the agent, and launcher and process of its workers: starts nothing, writes down
    what it hears."""

    pid, stands_still, is_sandboxed = 1, "", False
    view = View("L", 1, (ViewMember(ME, 1, 1),))
    history = JobHistory(None)
    log = JobLog(None, print)

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_prepared = asyncio.Event()
        self.is_releasing, self.is_released = asyncio.Event(), asyncio.Event()
        self.is_released.set()

    @property
    def heard(self) -> list[jobs.Event]:
        return [message.event for message in self.sent if isinstance(message, jobs.WorkerEvent)]

    def parts(self) -> AgentParts:
        return parts_of(
            self,
            names=NodeNames(ME, ME),
            launcher=lambda *place, **how: self.launch,
            note=print,
        )

    def make(self, job: str) -> Path:
        return Path(job)

    def remove(self, folder: Path) -> None:
        """Nothing was made."""

    def send(self, node: str, message: jobs.FromNode) -> bool:
        self.sent.append(message)
        if isinstance(message, jobs.NodeReport):
            self.is_prepared.set()
        return True

    def to_leader(self, message: jobs.FromNode) -> bool:
        return self.send(self.view.leader, message)

    def launch(
        self, worker: str, variables: dict[str, str], on_exit: Callable[[int], None]
    ) -> Machine:
        return self

    async def confirm(self, spec: jobs.JobSpec) -> None:
        """All jobs run."""

    def refuses(self, spec: jobs.JobSpec) -> str:
        return ""

    def signal(self, number: int) -> None:
        pass

    async def release(self) -> None:
        self.is_releasing.set()
        await self.is_released.wait()


async def with_both_workers(machine: Machine, home: Path) -> LocalRunner:
    """The runner of ``machine``, whose two workers have been ordered."""
    runner = LocalRunner(
        machine.parts(),
        CodeStore(home, ME, Nodes().store(home / "content", ME)),
        ORDER,
        lambda: False,
    )
    async with asyncio.timeout(20):
        await machine.is_prepared.wait()
    for worker in "01":
        runner.ordered(jobs.StartWorker("job", worker, 0))
    return runner


def test_a_worker_that_speaks_for_another_is_cut_off_before_that_counts(tmp_path: Path) -> None:
    async def story() -> Machine:
        machine = Machine()
        runner = await with_both_workers(machine, tmp_path)

        async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await runner.greeted(reader, writer, Hello("worker", job="job", worker="0"))
            writer.close()

        async with await asyncio.start_server(called, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for said in (worker_link.Entered("0", 4), worker_link.Finished("1")):
                writer.write(worker_link.TO_AGENT.encode(said))
            async with asyncio.timeout(20):
                await reader.read()
            writer.close()
        await runner.put_away()
        return machine

    machine = asyncio.run(story())
    _, _, said, complaint = machine.heard
    assert said == worker_link.Entered("0", 4)
    assert complaint == worker_link.WorkerNote("", "worker 0 was cut off: it spoke for worker '1'")


def test_a_worker_whose_group_a_pause_ended_before_it_entered_asks_for_a_later_one(
    tmp_path: Path,
) -> None:
    """The pause may be over before the view changes: then nobody else says that it has no group."""

    async def story() -> Machine:
        machine = Machine()
        runner = await with_both_workers(machine, tmp_path)
        for worker in "01":
            runner._happened(worker_link.Ready(worker, port=1))
        group = JobGroup("job", 4, (Member("0", ME), Member("1", ME)), 4, ("0", "1"))
        runner.installed(View("L", 4, machine.view.members, (group,)))
        runner._happened(worker_link.Entered("1", 4))
        runner.hold("a cut")
        machine.sent.clear()
        runner.report_again()
        await runner.put_away()
        return machine

    machine = asyncio.run(story())
    ready = [each for each in machine.heard if isinstance(each, worker_link.Ready)]
    assert {each.worker: each.after_epoch for each in ready} == {"0": 4, "1": 0}


def test_a_process_that_ended_passes_for_alive_until_its_exit_is_reported(tmp_path: Path) -> None:
    """Else the leader would take it for one that was lost with its agent."""

    async def story() -> Machine:
        machine = Machine()
        runner = await with_both_workers(machine, tmp_path)
        runner._confinement.limits = Limits(memory_bytes=1 << 30)
        machine.sent.clear()
        machine.is_released.clear()
        exiting = asyncio.create_task(runner._exited("0", 1, 0))
        await machine.is_releasing.wait()
        runner.report_again()
        machine.is_released.set()
        await exiting
        runner.report_again()
        await runner.put_away()
        return machine

    sent = asyncio.run(story()).sent
    reported = [each for each in sent if isinstance(each, jobs.NodeReport)]
    alive = [[each.is_alive for each in report.workers] for report in reported]
    assert alive == [[True, True], [False, True]]
    exits = [
        number
        for number, each in enumerate(sent)
        if isinstance(each, jobs.WorkerEvent) and isinstance(each.event, jobs.Exited)
    ]
    assert sent.index(reported[0]) < exits[0] < sent.index(reported[1])


@pytest.mark.parametrize(
    ("error", "lacks"),
    [(IdentityError("no space left"), True), (ConfigurationError("a job runs once"), False)],
)
def test_a_machine_whose_disk_is_full_lacks_what_the_job_can_do_without(
    tmp_path: Path, error: PotluckError, lacks: bool
) -> None:
    class Refusing(Machine):
        async def confirm(self, spec: jobs.JobSpec) -> None:
            raise error

    async def story() -> Machine:
        machine = Refusing()
        runner = await with_both_workers(machine, tmp_path)
        await runner.put_away()
        return machine

    assert asyncio.run(story()).sent == [jobs.NodeReport("job", (), str(error), lacks)]
