"""``LocalRunner``: runs the workers of one job that are placed on one node.

It fetches the job's folder, starts and stops the processes of the workers here, holds their links
to this agent, gives them the groups that the cluster's view has, and reports to the leader. It
decides nothing: what becomes of the workers is reported in the order in which it happens, and the
job's controller orders what is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path

import msgspec

from potluck._core.background import Tasks, stop, why
from potluck._core.cluster.code_store.imports import describe_lack, lacking
from potluck._core.cluster.code_store.job_folders import JobFolder, Record, key_of
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.data_sets.job_data import JobData
from potluck._core.cluster.discovery.interfaces import interface_of
from potluck._core.cluster.environments.making import Environment
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.chaos import parse_chaos
from potluck._core.cluster.jobs.log import LogPump
from potluck._core.cluster.jobs.needs import read_plan
from potluck._core.cluster.jobs.placement import rank_in_words
from potluck._core.cluster.jobs.process import Debuggers, Launch, WorkerProcess
from potluck._core.cluster.jobs.worker_probe import WorkerProbe
from potluck._core.cluster.jobs.worker_reports import WorkerReports
from potluck._core.cluster.sharing.broker import Broker
from potluck._core.cluster.sharing.sandbox import BROKER_FILE
from potluck._core.system import SIGKILL
from potluck._core.transport import aio
from potluck._core.types import Member
from potluck._core.waiting import EVERY_S
from potluck._core.wire import jobs, worker_link
from potluck._core.wire.greeting import Hello, Refusal, Welcome, common_version
from potluck._core.wire.nodes import JobGroup, View
from potluck.errors import (
    ConfigurationError,
    IdentityError,
    LinkError,
    PotluckError,
    ProtocolError,
)

_log = logging.getLogger(__name__)

_MAX_UNSENT = 1 << 20
_OUTPUT_S = 20.0
_LAST_MESSAGES_S = 1.0
_WITHDRAW_S = 3.0
_HALTED_S = 2.0

_INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Of Gloo, NCCL and torch's RPC."""

_Link = aio.MessageLink[worker_link.FromWorker, worker_link.FromAgent]


class LocalRunner:
    """One job on this node, from its first order to ``put_away``. ``world`` is the world that
    workers are started for now, ``group`` the newest that the nodes agreed on, ``last_status`` the
    leader's last status, and when it came, in seconds of ``time.monotonic``. It was to end
    ``interrupts`` times."""

    def __init__(
        self,
        agent: AgentParts,
        code_store: CodeStore,
        order: jobs.Order,
        must_wait: Callable[[], bool],
        on_running: Callable[[LocalRunner], None] = lambda runner: None,
    ) -> None:
        """While ``must_wait()``, a command of this machine does not keep up with the output, and
        the output of the workers here is not read. ``on_running(self)``: the first worker here was
        started."""
        self.spec = order.spec
        self.places = order.places
        self.world = order.world
        self.interrupts = order.interrupts
        self.group: JobGroup | None = None
        self.last_status: tuple[worker_link.JobState, float] | None = None
        self._agent = agent
        self._code_store = code_store
        self._must_wait = must_wait
        self._on_running = on_running
        self._confinement = agent.confinement
        self._launch: Launch | None = None
        self._opening: asyncio.Task[JobFolder] | None = None
        self._folder: JobFolder | None = None
        self._environment: Environment | None = None
        self._not_made = ""
        self._worker_home: Path | None = None
        self._broker: Broker | None = None
        self._peers: frozenset[tuple[str, int]] = frozenset()
        """Where the workers of the present group listen."""
        self._error = ""
        self._lacks = False
        self._is_withdrawing = False
        self._reports = WorkerReports()
        self._key = key_of(self.spec.job, self.spec.starter)
        self._pump: LogPump | None = None
        self._processes: dict[str, WorkerProcess] = {}
        self._alive: set[str] = set()
        self._short_of_memory: set[str] = set()
        self._links: dict[str, _Link] = {}
        self._unlinked: dict[str, asyncio.Event] = {}
        """By worker: set while it has no link here."""
        self._probes = WorkerProbe(
            lambda worker, reason: self._happened(jobs.Stalled(worker, worker_link.clip(reason))),
            self._note,
        )
        self._debuggers = Debuggers()
        if order.spec.plan is not None:
            code_store.hold(order.spec.plan)
        self._waits_told: dict[str, float] = {}
        self._data: JobData | None = None
        if self.spec.data:
            called = agent.names.called
            self._data = JobData(
                agent.data,
                self.spec,
                self._key,
                called=called,
                note=self._note,
                on_wait=self._waits_for_data,
                is_alive=self._alive.__contains__,
            )
        self._tasks = Tasks()
        self._preparing = self._tasks.start(self._prepare())

    @property
    def alive(self) -> tuple[str, ...]:
        """The workers whose processes run."""
        return tuple(sorted(self._alive))

    @property
    def _has_place(self) -> bool:
        """Whether workers of the job are placed on this node."""
        return any(each.node == self._agent.me for each in self.places)

    @property
    def has_started(self) -> bool:
        """Whether a worker was ever started here."""
        return bool(self._reports.seen(()))

    async def put_away(self) -> None:
        """End all processes, links and tasks. Nothing more is reported."""
        await stop(self._preparing)  # the folder may be on its way, over a slow link
        self._probes.close()
        self._debuggers.close()
        if self._pump is not None:
            self._pump.close()
        await self._tasks.close()
        for process in self._processes.values():
            process.signal(SIGKILL)
        for process in self._processes.values():
            await process.release()
        self._agent.confinement.give_back(self.spec.job)
        for link in list(self._links.values()):
            link.abort()
        if self._broker is not None:
            await self._broker.close()
        if self._data is not None:
            await self._data.close()
        if self._environment is not None:
            self._environment.release()
        if self.spec.plan is not None:
            self._code_store.release(self.spec.plan)
        if self._worker_home is not None:
            await asyncio.to_thread(self._agent.worker_homes.remove, self._worker_home)
        if self._opening is not None:
            await asyncio.wait([self._opening])
            if self._opening.exception() is None:  # else the leader has the error
                await asyncio.to_thread(self._code_store.close, self._opening.result())

    # Before the first worker starts.

    async def _prepare(self) -> None:
        """Fetch the folder if needed, and report to the leader."""
        spec, self._lacks = self.spec, False
        try:
            if refusal := self._refusal():
                raise ConfigurationError(refusal)
            await self._agent.vouching.confirm(spec)
            self._lacks = True  # whatever can't be had from here on: the job can do without
            if self._data is not None:
                self._data.members([each.node for each in self.places])
                await self._data.offer()
            if spec.plan is None and (missing := await asyncio.to_thread(lacking, spec.needs)):
                raise ConfigurationError(describe_lack(missing, spec.own, sys.executable))
            if spec.package is not None:
                if not await asyncio.to_thread(self._code_store.has, spec.package):
                    await self._code_store.fetch(spec.package, spec.starter)
            elif spec.starter != self._agent.me:
                raise ConfigurationError("it is local to the node it was started on")
            if self._folder is None:
                opening = asyncio.to_thread(self._code_store.open, _record_of(spec))
                self._opening = asyncio.create_task(opening)
                self._folder = await asyncio.shield(self._opening)
            if self._pump is None and not spec.is_local:
                self._pump = LogPump(
                    self._agent.log, self._key, self._send_line, self._reports.has_run
                )
            if self._worker_home is None:
                make = self._agent.worker_homes.make
                self._worker_home = await asyncio.to_thread(make, spec.job)
            worker_home = self._worker_home
            sandbox = self._confinement.sandbox_of(spec, self._agent.me)
            if sandbox is not None and not sandbox.has_network and self._broker is None:
                self._broker = self._agent.broker(worker_home / BROKER_FILE, self._may_dial)
            if spec.plan is not None:
                await self._make_environment(spec.plan)
            if self._data is not None:
                await self._bring(self._data)
        except (PotluckError, OSError) as error:
            self._lacks |= isinstance(error, IdentityError | OSError)  # a full disk
            self._error = str(error)[:4000]
        except Exception as error:  # the leader would wait for this node's report for ever
            self._lacks = False
            _log.exception("preparing job %s broke", spec.job)
            self._error = f"this is potluck's fault, please report it: {why(error)}"[:4000]
        else:
            if self._awaits_data:  # it got places here meanwhile
                self._preparing = self._tasks.start(self._prepare())
                return
            if self._has_place:  # else the part would be taken from other jobs
                self._confinement = self._agent.confinement.part_of(spec)
            self._launch = self._agent.launcher(
                self._confinement,
                spec,
                self._folder,
                worker_home,
                made=self._environment,
                me=self._agent.me,
                sink=self._line,
                is_behind=self._is_behind,
                readable=() if self._data is None else (self._data.folder,),
            )
        self._report()

    async def _bring(self, data: JobData) -> None:
        """Have the job's data here, if workers are placed here."""
        try:
            await data.bring(has_workers=self._has_place)
        except OSError as error:
            raise ConfigurationError(f"can't keep the job's data: {why(error)}") from error

    @property
    def _awaits_data(self) -> bool:
        """Whether workers are placed here, and their data did not come yet."""
        return self._data is not None and not self._data.is_here and self._has_place

    def _waits_for_data(self, worker: str, why: str) -> None:
        """The other ranks wait for ``worker`` as for one that is debugged."""
        self._happened(worker_link.Halted(worker, why[:256]))
        if (now := time.monotonic()) >= self._waits_told.get(worker, 0.0):
            self._waits_told[worker] = now + EVERY_S
            self._note(
                f"rank {self._rank(worker)} on {self._agent.names.label(self._agent.me)} {why}"
            )

    @property
    def _awaits_environment(self) -> bool:
        """Whether workers are placed here, and their environment is not made yet."""
        return self.spec.plan is not None and self._environment is None and self._has_place

    @property
    def _awaits_part(self) -> bool:
        """Whether workers are placed here, and their part of the machine is not taken yet."""
        has_none = self._confinement is self._agent.confinement
        return self.spec.cores > 0 and has_none and self._has_place

    async def _make_environment(self, package: bytes) -> None:
        """Make the environment, if workers are placed here. Whether it can be had at all is found
        out elsewhere, too: such a machine gets no places."""
        if not await asyncio.to_thread(self._code_store.has, package):
            await self._code_store.fetch(package, self.spec.starter)
        plan = await asyncio.to_thread(read_plan, self._code_store, package)
        environments = self._agent.environments
        try:
            environments.part_of(plan)
            if self._awaits_environment:
                self._environment = await environments.make(
                    plan, lambda text: self._note(f"environment: {text}")
                )
            elif self._environment is None and self._not_made:
                raise ConfigurationError(self._not_made)
        except ConfigurationError as error:
            self._not_made = str(error)
            raise

    # What the leader orders.

    def order_again(self, order: jobs.Order) -> None:
        """The leader, maybe a new one, ordered the job once more."""
        self.places, self.world, self.interrupts = order.places, order.world, order.interrupts
        if self._data is not None and self._data.is_open:
            self._data.members([each.node for each in self.places])
        is_ready = not (self._awaits_environment or self._awaits_part or self._awaits_data)
        if self._launch is not None and is_ready:
            self._report()
        elif self._launch is not None or self._error:
            self._launch, self._error = None, ""
            self._preparing = self._tasks.start(self._prepare())

    def ordered(self, message: jobs.StartWorker | jobs.SignalWorkers | jobs.SendToWorkers) -> None:
        """Carry out the leader's order about workers."""
        match message:
            case jobs.StartWorker(_, worker, attempt):
                if self._launch is not None:
                    self._start(self._launch, worker, attempt)
            case jobs.SignalWorkers(_, workers, number):
                self._signal(workers, number)
            case jobs.SendToWorkers(_, workers, content):
                self._send(workers, content)

    def _start(self, launch: Launch, worker: str, attempt: int) -> None:
        """Start ``worker``. If it can't be started, its exit code is 127."""
        if worker in self._alive or not self._reports.is_new(worker, attempt):
            return
        if self._refusal():
            return  # the leader has not heard of it yet
        if not self.has_started:
            self._on_running(self)
        self._reports.starting(worker, attempt, self.world.number)
        unlinked = self._unlinked[worker] = asyncio.Event()
        unlinked.set()

        def on_exit(code: int) -> None:
            self._tasks.start(self._exited(worker, code, attempt))

        try:
            variables = self._variables(worker, attempt)
            process = launch(worker, variables, on_exit)
        except ConfigurationError as error:
            self._note(str(error))
            self._happened(jobs.Exited(worker, 127, attempt))
            self._happened(jobs.OutputEnded(worker, attempt))
            return
        self._processes[worker] = process
        self._alive.add(worker)
        self._happened(jobs.Started(worker, attempt, process.pid))
        if variables.get("RANK") == str(self.spec.debug_rank):
            self._tasks.start(self._held(worker, process))

    # Whether the owner of this machine lets the job run here.

    def _refusal(self) -> str:
        return self._agent.offers.refuses(self.spec)

    def offers_changed(self) -> None:
        """The owner may have changed that: end the workers here, or take part again."""
        if self._refusal():
            if self._alive and not self._is_withdrawing:
                self._is_withdrawing = True
                self._tasks.start(self._withdraw())
        elif self._error:
            self._error = ""
            self._preparing = self._tasks.start(self._prepare())
        elif self._launch is not None:
            self._report()

    async def _withdraw(self) -> None:
        """End the workers here by SIGTERM, after a grace period by SIGKILL."""
        leaving = {name: self._processes[name] for name in self._alive}
        for process in leaving.values():
            process.signal(signal.SIGTERM)
        await asyncio.sleep(_WITHDRAW_S)
        for name in leaving.keys() & self._alive:
            if self._processes[name] is leaving[name]:
                leaving[name].signal(SIGKILL)
        self._is_withdrawing = False

    def _variables(self, worker: str, attempt: int) -> dict[str, str]:
        """The variables with the place of ``worker`` in its world. Workers that came later have
        ranks after all others."""
        node_of = {place.worker: place.node for place in self.places}
        members = self.world.members
        if worker not in members:
            members = tuple(place.worker for place in self.places)
        rank, size = members.index(worker), len(members)
        beside = [each for each in members if node_of[each] == node_of[worker]]
        data = {} if self._data is None else self._data.variables()
        if self._agent.outer_world is not None:
            outer = self._agent.outer_world(beside.index(worker))
            return {"POTLUCK_RESTARTS": str(attempt)} | data | outer
        nodes = {"POTLUCK_NODES": ",".join(self._agent.names.label(node_of[m]) for m in members)}
        return {
            "POTLUCK_AGENT": f"127.0.0.1:{self._agent.port}",
            "POTLUCK_BIND": self._agent.bind,
            "POTLUCK_JOB": self.spec.job,
            "POTLUCK_WORKER": worker,
            "POTLUCK_RESTARTS": str(attempt),
            **({} if self.spec.is_local else nodes),
            **data,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            # Scripts don't change this one: by it the worker knows that a world which torch forms
            # is the world that it was started for.
            "POTLUCK_WORLD_RANK": f"{rank}/{size}",
            "LOCAL_RANK": str(beside.index(worker)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": self._address(node_of[members[0]]),
            "MASTER_PORT": str(self.world.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.world.number),
            **self._interface({node_of[member] for member in members}),
        }

    def _interface(self, nodes: Set[str]) -> dict[str, str]:
        """Variables that lead other libraries to the interface by which this node reaches the
        others of ``nodes``: by themselves they call the host's name, which often resolves to
        127.0.1.1. Empty if there are no others, and for a sandbox without network; what the
        owner has set stays."""
        if self._broker is not None:
            return {}
        addresses = (self._agent.links.local(node) for node in sorted(nodes - {self._agent.me}))
        address = next(filter(None, addresses), "")
        name = interface_of(address.partition("%")[0]) if address else ""
        return {each: name for each in _INTERFACE_NAMES if name and each not in os.environ}

    def _send(self, names: Sequence[str], message: worker_link.FromAgent) -> None:
        """Send ``message`` to the workers ``names`` over their links here. A worker without a link
        is asked to stop by SIGTERM; not a finished worker, which ends by itself: its exit code may
        be why the job ends."""
        for worker in names:
            link = self._links.get(worker)
            if link is not None:
                link.send(message)
                if isinstance(message, worker_link.Probe):
                    is_alive = worker in self._alive
                    self._probes.probed(worker, self._processes[worker].pid if is_alive else 0)
            elif isinstance(message, worker_link.Stop) and not self._reports.has_finished(worker):
                self._signal((worker,), signal.SIGTERM)

    def _signal(self, workers: Sequence[str], number: int) -> None:
        for worker in workers:
            if worker in self._alive:
                self._processes[worker].signal(number)

    # What the cluster agreed on.

    def installed(self, view: View) -> None:
        """Give the workers here the job's group in ``view``, if it is a new one."""
        group = view.group(self.spec.job)
        if group is None or (self.group is not None and group.epoch <= self.group.epoch):
            return
        before, self.group = self.group, group
        names = tuple(member.worker for member in group.members)
        if before is not None and not self.world.is_fixed:  # that ends as a whole
            for member in before.members:
                if member.worker not in names and member.node not in view.nodes:
                    cause = f"node {self._agent.names.called(member.node)} left the cluster's view"
                    over = worker_link.GroupOver(before.epoch, member.worker, False, cause)
                    self._send(self.alive, over)
        chaos = parse_chaos(self.spec.chaos)
        members = tuple(map(self._seen_from_here, group.members))
        self._peers = frozenset((member.host, member.port) for member in members)
        for rank, name in enumerate(names):
            steps = chaos.steps_of(rank)
            new = worker_link.NewGroup(
                self.spec.job, group.epoch, members, steps, group.paths, group.cut
            )
            # Only to a process that was started for the group's world: one of an earlier world is
            # about to end.
            if self._reports.world_of(name) == group.world:
                self._reports.given(name, group.epoch)
                self._send((name,), new)

    def hold(self, reason: str) -> None:
        """This node is paused, or in no view: end the group here, and have its workers wait."""
        cause = worker_link.clip(reason)
        if self.group is not None and not self.world.is_fixed:  # that may outlast the pause
            self._send(self.alive, worker_link.GroupOver(self.group.epoch, "", False, cause))
            self._reports.ended_here()
        self._send(self.alive, worker_link.Hold(cause))

    def resync(self) -> None:
        """The workers here have a state that was dropped (of a fork): kill them; the leader has
        them started again."""
        self._signal(self.alive, SIGKILL)

    def report_again(self) -> None:
        """There is a leader again, maybe another one: report to it."""
        if self._launch is not None or self._error:
            self._report()

    def _may_dial(self, host: str, port: int) -> bool:
        """Whether workers in a sandbox may connect there: to the agent, and to their own group."""
        return (host, port) in self._peers | {("127.0.0.1", self._agent.port)}

    def _seen_from_here(self, member: Member) -> Member:
        machine = "" if self.spec.is_local else self._agent.names.label(member.node)
        return replace(member, host=self._address(member.node), machine=machine)

    def _address(self, node: str) -> str:
        return "127.0.0.1" if node == self._agent.me else self._agent.links.last_address(node)

    # Reports to the leader.

    def _report(self) -> None:
        """Report everything about the workers here that the leader may not know."""
        job, send, alive = self.spec.job, self._agent.plane.to_leader, self.alive
        for event in (*self._reports.progress(), *self._reports.ended()):
            send(jobs.WorkerEvent(job, event))
        lacks = self._lacks and bool(self._error)
        send(jobs.NodeReport(job, self._reports.seen(alive), self._error, lacks))
        for event in self._reports.standing(alive):
            send(jobs.WorkerEvent(job, event))
        if self._pump is not None:
            self._pump.again()

    def _happened(self, event: jobs.Event) -> None:
        self._agent.plane.to_leader(jobs.WorkerEvent(self.spec.job, self._reports.take(event)))
        stands_still = self._agent.plane.stands_still
        if stands_still and isinstance(event, worker_link.Ready | worker_link.Lost):
            self._send((event.worker,), worker_link.Hold(worker_link.clip(stands_still)))

    def _note(self, text: str) -> None:
        """Show a line to people."""
        self._happened(worker_link.WorkerNote("", worker_link.clip(text)))

    def _line(self, worker: str, stream: str, text: str, end: jobs.End) -> None:
        if self._confinement.is_memory_error(text):
            self._short_of_memory.add(worker)
        if self.spec.is_local:
            self._agent.plane.to_leader(jobs.Output(self.spec.job, worker, stream, text, end))
            return
        label = f"{self._rank(worker)} {self._agent.names.label(self._agent.me)}"
        self._agent.log.add(self._key, worker, stream, label, text, end)

    def debugged(self, node: str, request: jobs.DebugRequest, *, may: bool) -> jobs.JobRuns:
        """A command on ``node`` debugs a rank that may run here. LinkError if it may not."""
        name, rank = self._agent.names.label, str(request.rank)
        workers = (self._processes[each] for each in self.alive if self._rank(each) == rank)
        process = self._debuggers.process_of(request.session) or next(workers, None)
        if process is None:
            return jobs.JobRuns(False)
        if not may:
            starter, me = name(self.spec.starter), name(self._agent.me)
            raise LinkError(f"it is debugged on {starter}, which started it, and on {me}")
        return jobs.JobRuns(self._debuggers.asked(process, name(node), request))

    async def _held(self, worker: str, process: WorkerProcess) -> None:
        """The others wait for a debugged rank, which says so itself once it has a link."""
        while worker not in self._links and not process.has_ended:
            self._happened(worker_link.Halted(worker, "before it is ready"))
            await asyncio.sleep(_HALTED_S)

    def _rank(self, worker: str) -> str:
        members = () if self.group is None else self.group.members
        return rank_in_words(worker, [each.worker for each in members], self.world)

    def _send_line(self, line: jobs.LogLine) -> bool:
        """Give a line of the log to the leader, which may be here: its journal wants it, too."""
        view, plane = self._agent.plane.view, self._agent.plane
        if view is None or self._agent.links.unsent(view.leader) > _MAX_UNSENT:
            return False
        return plane.to_leader(
            jobs.Output(
                self.spec.job, line.source, line.stream, line.text, line.end, line.at, line.number
            )
        )

    def _is_behind(self) -> bool:
        return self._must_wait() if self.spec.is_local else self._agent.log.is_behind

    # Connections and ends of workers.

    async def greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello
    ) -> None:
        """A worker of this job has connected: answer, and take its messages until the link ends."""
        refusal = self._objection(hello)
        await aio.write_greeting(writer, refusal or Welcome())
        if refusal is not None:
            return
        worker = hello.worker
        link = aio.MessageLink(
            reader,
            writer,
            received=worker_link.TO_AGENT,
            sent=worker_link.FROM_AGENT,
            version=common_version(hello),
        )
        ended = self._unlinked[worker]
        ended.clear()
        self._links[worker] = link
        try:
            await self._listen(worker, link)
        finally:
            ended.set()
            if self._links.get(worker) is link:
                del self._links[worker]
                self._tasks.start(self._hung_up(worker, self._processes.get(worker)))

    def _objection(self, hello: Hello) -> Refusal | None:
        if hello.worker in self._links:
            return Refusal(
                "duplicate",
                f"worker {hello.worker} is connected already; a process that a worker starts, as "
                "joblib does for n_jobs=2, can't connect again: leave n_jobs at 1",
            )
        if hello.worker not in self._unlinked:
            return Refusal("worker", f"job {self.spec.job} has no worker {hello.worker!r}")
        return None

    async def _listen(self, worker: str, link: _Link) -> None:
        is_done = False
        with contextlib.suppress(LinkError):
            try:
                while not is_done:
                    message = await link.receive()
                    if message.worker != worker:
                        raise ProtocolError(f"it spoke for worker {message.worker!r}")
                    self._probes.answered(worker)
                    process = self._processes[worker]
                    if isinstance(message, worker_link.Ready) and process.is_sandboxed:
                        # In the sandbox processes have other numbers.
                        message = msgspec.structs.replace(message, pid=process.pid)
                    self._happened(message)
                    is_done = isinstance(message, worker_link.Finished)
            except PotluckError as error:
                if not isinstance(error, LinkError):
                    self._note(f"worker {worker} was cut off: {error}")
                raise

    async def _hung_up(self, worker: str, process: WorkerProcess | None) -> None:
        """The link ended. Mostly the process has ended as well, and its exit code is more exact:
        wait for that a moment."""
        await asyncio.sleep(_LAST_MESSAGES_S)
        if self._processes.get(worker) is process and worker not in self._links:
            self._happened(jobs.Disconnected(worker))

    async def _exited(self, worker: str, code: int, attempt: int) -> None:
        """The process ended. A death by signal is reported at once; before an exit the worker may
        have sent its reason, which is read first."""
        process = self._processes[worker]
        if code >= 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_MESSAGES_S):
                    await self._unlinked[worker].wait()
        self._probes.answered(worker)
        if self._data is not None:
            self._data.ended(worker)
        link = self._links.pop(worker, None)
        if link is not None:
            link.abort()
        why_ended = await self._why_ended(worker, process, code)
        self._alive.discard(worker)  # not before: without its exit it passes for lost
        self._happened(jobs.Exited(worker, code, attempt, why_ended))
        await process.release()
        results = []
        if self._folder is not None and not self.spec.keeps_files:
            results = await asyncio.to_thread(self._folder.results)
        num_bytes = sum(each.size for each in results)
        if self._pump is not None:
            await self._pump.sent(_OUTPUT_S)
        self._happened(jobs.OutputEnded(worker, attempt, len(results), num_bytes))

    async def _why_ended(self, worker: str, process: WorkerProcess, code: int) -> str:
        """Why the process ended with ``code``, if the owner's limits were the reason."""
        confinement = self._confinement
        if code != 0 and confinement.limits.memory_bytes:
            # Its last words may not have been read yet; it may be stopped while it writes them.
            await process.release()
        said_so = worker in self._short_of_memory
        self._short_of_memory.discard(worker)
        return confinement.why_ended(code, said_so=said_so)


def _record_of(spec: jobs.JobSpec) -> Record:
    return Record(
        job=spec.job,
        starter=spec.starter,
        package="" if spec.package is None else spec.package.hex(),
        script=spec.script,
        began=spec.started,
        keeps_files=spec.keeps_files,
        below=spec.below,
        directory=spec.directory,
    )
