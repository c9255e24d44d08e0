"""``LocalRunner``: runs the workers of all jobs that are placed on one node.

It fetches a job's folder, starts and stops the workers here, gives them the groups that the
cluster's view holds, and reports to the leader. It takes orders only from the leader of its own
view: no other node can make this one run anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from potluck.background import Tasks, stop, why
from potluck.cluster.code_store.store import CodeStore
from potluck.cluster.jobs.chaos import parse_chaos
from potluck.cluster.jobs.host import JobHost
from potluck.cluster.jobs.local_workers import LocalWorkers, world_variables
from potluck.cluster.jobs.worker_reports import WorkerReports
from potluck.errors import ConfigurationError, LinkError, PotluckError
from potluck.system import SIGKILL
from potluck.transport import aio
from potluck.types import Member
from potluck.wire import control, jobs
from potluck.wire.messages import Hello, Refusal
from potluck.wire.nodes import JobGroup, View

_log = logging.getLogger(__name__)

_MAX_UNSENT = 1 << 20
_MAX_KEPT_LINES = 1000
_BRING_S = 10.0
_BRING_AGAIN_S = 0.2


@dataclass(slots=True, eq=False)
class LocalJob:
    """One job here. ``world`` is the one that workers are started for now; ``unsent`` are lines of
    output for which there was no leader."""

    spec: jobs.JobSpec
    places: jobs.Places
    world: jobs.WorldSpec
    reports: WorkerReports = field(default_factory=WorkerReports)
    workers: LocalWorkers | None = None
    preparing: asyncio.Task[None] | None = None
    group: JobGroup | None = None
    status: control.StatusReply | None = None
    error: str = ""
    unsent: deque[jobs.Output] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT_LINES))

    @property
    def alive(self) -> tuple[str, ...]:
        return () if self.workers is None else self.workers.alive


class LocalRunner:
    """All jobs of this node. While ``must_wait()``, a command of this machine does not keep up with
    the output, and the output of the workers here is not read."""

    def __init__(self, host: JobHost, code_store: CodeStore, must_wait: Callable[[], bool]) -> None:
        self.jobs: dict[str, LocalJob] = {}
        self._host = host
        self._code_store = code_store
        self._must_wait = must_wait
        self._tasks = Tasks()

    # What the leader orders.

    def received(self, message: jobs.FromLeader) -> None:
        """The leader of this node's view sent ``message``."""
        if isinstance(message, jobs.Order):
            self._order(message)
        elif isinstance(message, jobs.JobList):
            for job_id in self.jobs.keys() - set(message.jobs):
                self._drop(job_id)
        elif isinstance(message, jobs.JobStatus):
            job = self.jobs.get(message.status.job)
            if job is not None:
                job.status = message.status
        elif (job := self.jobs.get(message.job)) is not None and job.workers is not None:
            match message:
                case jobs.StartWorker(_, worker, attempt):
                    self._start(job, job.workers, worker, attempt)
                case jobs.SignalWorkers(_, workers, number):
                    job.workers.signal(workers, number)
                case jobs.TellWorkers(_, workers, told):
                    job.workers.tell(workers, told)

    def _order(self, order: jobs.Order) -> None:
        job = self.jobs.get(order.spec.job)
        if job is None:
            job = self.jobs[order.spec.job] = LocalJob(order.spec, order.places, order.world)
            job.preparing = self._tasks.start(self._prepare(job))
            return
        job.places, job.world = order.places, order.world
        if job.workers is not None:
            self._report(job)
        elif job.error:
            job.error = ""
            job.preparing = self._tasks.start(self._prepare(job))

    async def _prepare(self, job: LocalJob) -> None:
        """Fetch the folder if needed, make the job's ``LocalWorkers``, and report to the leader."""
        spec, job_id = job.spec, job.spec.job
        folder: Path | None = None
        try:
            if spec.package is not None:
                if not self._code_store.has(spec.package):
                    await self._bring(spec, spec.package)
                folder = await asyncio.to_thread(self._code_store.open, spec.package, job_id)
            elif spec.starter != self._host.me:
                raise ConfigurationError("it is local to the node it was started on")
        except (PotluckError, OSError) as error:
            job.error = str(error)[:4000]
        except Exception as error:  # the leader would wait for this node's report for ever
            _log.exception("preparing job %s broke", job_id)
            job.error = f"this is potluck's fault, please report it: {why(error)}"[:4000]
        else:
            if self.jobs.get(job_id) is not job:
                return
            launch = self._host.launcher(
                spec,
                folder,
                is_starter=spec.starter == self._host.me,
                sink=partial(self._line, job),
                is_behind=self._is_behind,
            )
            job.workers = LocalWorkers(job_id, launch, partial(self._happened, job))
        self._report(job)

    async def _bring(self, spec: jobs.JobSpec, package: bytes) -> None:
        """Fetch the package from the starter or the leader. Either may not know yet that this node
        is in the view, or may not have the package itself yet: both are asked again for a while."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _BRING_S
        while True:
            view = self._host.plane.view
            nodes = set() if view is None else {spec.starter, view.leader} - {self._host.me}
            for node in sorted(nodes, key=lambda node: node != spec.starter):
                try:
                    await self._code_store.fetch(node, package)
                    return
                except LinkError:
                    if loop.time() > deadline:
                        raise
            if not nodes and loop.time() > deadline:
                raise LinkError("no node that is left has the script's folder")
            await asyncio.sleep(_BRING_AGAIN_S)

    def _start(self, job: LocalJob, workers: LocalWorkers, worker: str, attempt: int) -> None:
        if worker in workers.alive or not job.reports.is_new(worker, attempt):
            return
        job.reports.starting(worker, attempt, job.world.number)
        workers.start(worker, attempt, self._variables(job, worker))

    def _variables(self, job: LocalJob, worker: str) -> dict[str, str]:
        """The variables that tell ``worker`` its rank in its world. Workers that came later have
        ranks after all others."""
        node_of = {place.worker: place.node for place in job.places}
        members = job.world.members
        if worker not in members:
            members = tuple(place.worker for place in job.places)
        beside = [each for each in members if node_of[each] == node_of[worker]]
        nodes = {"POTLUCK_NODES": ",".join(self._host.names.label(node_of[m]) for m in members)}
        return {
            "POTLUCK_AGENT": f"127.0.0.1:{self._host.port}",
            "POTLUCK_BIND": self._host.bind,
            "POTLUCK_WIRE": job.spec.wire,
            **({} if job.spec.is_local else nodes),
            "LOCAL_RANK": str(beside.index(worker)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": self._address(node_of[members[0]]),
            "MASTER_PORT": str(job.world.master_port),
            **world_variables(members.index(worker), len(members), job.world.number),
        }

    def _report(self, job: LocalJob) -> None:
        """Report to the leader everything about this job's workers here that it may not know."""
        name, say, alive = job.spec.job, self._host.to_leader, job.alive
        for event in job.reports.ended():
            say(jobs.Happened(name, event))
        say(jobs.Reported(name, job.reports.seen(alive), job.error))
        for event in job.reports.standing(alive):
            say(jobs.Happened(name, event))
        while job.unsent:
            if not say(job.unsent[0]):
                return
            job.unsent.popleft()

    def _drop(self, job_id: str) -> None:
        job = self.jobs.pop(job_id)
        self._tasks.start(self._put_away(job))

    async def _put_away(self, job: LocalJob) -> None:
        if job.preparing is not None:  # the folder may be on its way, over a slow link
            await stop(job.preparing)
        if job.workers is not None:
            await job.workers.put_away()
        if not job.spec.is_local:
            await asyncio.to_thread(self._code_store.close, job.spec.job)

    # What the cluster agreed on.

    def installed(self, view: View) -> None:
        """Give each new group of ``view`` to its members here."""
        for job_id, job in self.jobs.items():
            group = view.group(job_id)
            if group is None or (job.group is not None and group.epoch <= job.group.epoch):
                continue
            before, job.group = job.group, group
            if job.workers is None:
                continue
            names = tuple(member.worker for member in group.members)
            if before is not None and not job.world.is_fixed:  # that ends as a whole
                for member in before.members:
                    if member.worker not in names and member.node not in view.nodes:
                        cause = (
                            f"node {self._host.names.called(member.node)} left the cluster's view"
                        )
                        over = control.GroupOver(before.epoch, member.worker, False, cause)
                        job.workers.tell(job.alive, over)
            chaos = parse_chaos(job.spec.chaos)
            members = tuple(self._seen_from_here(member) for member in group.members)
            for rank, name in enumerate(names):
                steps = chaos.steps_of(rank)
                told = control.GroupView(job_id, group.epoch, members, steps, group.paths)
                if job.reports.world_of(name) == group.world:
                    job.workers.tell((name,), told)

    def hold(self, reason: str) -> None:
        """This node is paused, or in no view: end the groups here, and have their workers wait."""
        for job in self.jobs.values():
            if job.workers is None:
                continue
            if job.group is not None and not job.world.is_fixed:  # that may outlast the pause
                cause = control.clip(reason)
                over = control.GroupOver(job.group.epoch, "", False, cause)
                job.workers.tell(job.alive, over)
            job.workers.tell(job.alive, control.Hold(control.clip(reason)))

    def give_up(self) -> None:
        """End all workers here: their jobs go on without this node for good."""
        for job_id in list(self.jobs):
            self._drop(job_id)

    def resync(self) -> None:
        """The workers here have a state that was dropped (of a fork): kill them; the leader has
        them started again."""
        for job in self.jobs.values():
            if job.workers is not None:
                job.workers.signal(job.alive, SIGKILL)

    def say_again(self) -> None:
        """There is a leader again, maybe another one: report all jobs to it."""
        for job in self.jobs.values():
            if job.workers is not None or job.error:
                self._report(job)

    def _seen_from_here(self, member: Member) -> Member:
        host = self._address(member.node)
        return Member(member.worker, member.node, host, member.port, member.local_rank)

    def _address(self, node: str) -> str:
        return "127.0.0.1" if node == self._host.me else self._host.links.last_address(node)

    # What the workers do.

    async def greeted(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello: Hello,
        node: str,
    ) -> None:
        """A worker of this machine has connected: give the connection to its job's workers."""
        job = self.jobs.get(hello.job)
        if job is None or job.workers is None:
            refusal = Refusal("job", f"this node runs no job {hello.job!r}")
            await aio.write_greeting(writer, refusal)
        else:
            await job.workers.greeted(reader, writer, hello)

    def _line(self, job: LocalJob, worker: str, stream: str, text: str) -> None:
        line = jobs.Output(job.spec.job, worker, stream, text)
        if job.unsent or not self._host.to_leader(line):
            job.unsent.append(line)

    def _is_behind(self) -> bool:
        view = self._host.plane.view
        is_far_behind = view is not None and self._host.links.unsent(view.leader) > _MAX_UNSENT
        return is_far_behind or self._must_wait()

    def _happened(self, job: LocalJob, event: jobs.Event) -> None:
        self._host.to_leader(jobs.Happened(job.spec.job, job.reports.take(event)))
        stands_still = self._host.plane.stands_still
        if stands_still and isinstance(event, control.Ready | control.Lost):
            assert job.workers is not None
            job.workers.tell((event.worker,), control.Hold(control.clip(stands_still)))

    async def close(self) -> None:
        """End all workers here."""
        self.give_up()
        await self._tasks.ended()
