"""The dispatcher: one agent's entry for everything about jobs.

It takes messages of other agents, requests of this machine's commands, and the cluster's views, and
gives each to the part that it is for: the ``JobController`` of the job, if this node leads the
cluster; the ``LocalRunner`` of the job's workers here; or the command that waits for the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from potluck._core.background import Tasks
from potluck._core.cluster.code_store.selection import in_words, links_in_words
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.client_jobs import ClientJobs
from potluck._core.cluster.jobs.controller import JobController
from potluck._core.cluster.jobs.environment import free_port
from potluck._core.cluster.jobs.groups.events import Severed
from potluck._core.cluster.jobs.keeping import Keeping, new_id
from potluck._core.cluster.jobs.local_runner import LocalRunner
from potluck._core.cluster.jobs.needs import look_at, plan_of
from potluck._core.cluster.jobs.permissions import DeferredMessages, may_lead_soon, may_send
from potluck._core.cluster.jobs.placement import Placement, place
from potluck._core.cluster.jobs.queue import Running
from potluck._core.cluster.jobs.queued import QueuedJobs, as_running, never_begun
from potluck._core.cluster.jobs.summary import encode_summary
from potluck._core.cluster.links.local import Client
from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.view import describe
from potluck._core.cluster.names import find_node
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.transport import aio
from potluck._core.waiting import Complaint
from potluck._core.wire import jobs, local, peers, worker_link
from potluck._core.wire.greeting import Hello, Refusal
from potluck._core.wire.nodes import View
from potluck._core.wire.versions import JOBS_SINCE
from potluck.errors import ConfigurationError, PotluckError

_log = logging.getLogger(__name__)

_STATUS_S = 0.5
_VIEW_S = 15.0


class JobDispatcher:
    """The jobs of one agent, from construction to ``close``. It registers for its messages
    itself."""

    def __init__(self, agent: AgentParts, code_store: CodeStore) -> None:
        self.runners: dict[str, LocalRunner] = {}
        self._agent = agent
        self._code_store = code_store
        self._controllers: dict[str, JobController] = {}
        self._clients = ClientJobs(agent.plane.to_leader, lambda spec: self._keeping.over(spec))
        self._deferred = DeferredMessages()
        self._complain = Complaint(agent.note)
        self._has_view = asyncio.Event()
        self._view_changed = asyncio.Event()
        self._tasks = Tasks()
        self._ending = Tasks()
        self._submitting: dict[Client, asyncio.Task[None]] = {}
        self._queue = QueuedJobs(
            agent,
            code_store,
            running=self._running,
            start=self._start,
            send_all=self._send_all,
            on_changed=self._queue_changed,
        )
        self._keeping = Keeping(
            agent,
            self.runners,
            self._queue.why,
            lambda job: self._queue.table.spec(job) or self._clients.spec(job),
            self._starter_of,
            self._cancel_asked,
        )
        self._tasks.start(self._send_status())
        agent.links.on(jobs.JobMessage, self.received)
        agent.links.on_linked.append(lambda node, introduction: self.linked(node))
        agent.plane.listeners.append(self.act)
        agent.offers.listeners.append(self._offers_changed)
        agent.surveyor.rate = self.rate
        agent.commands.on(local.RunRequest, self._run_asked)
        agent.commands.on(local.InterruptRequest, self._interrupt_asked)
        agent.commands.on(local.JobsRequest, self._status_asked)
        agent.commands.on_gone.append(self.abandon)

    # Requests of this machine's commands.

    async def submit(self, request: local.RunRequest, client: Client) -> str:
        """Submit a job for ``client`` to the leader; returns the job's name. ConfigurationError if
        this node can't submit one."""
        agent = self._agent
        try:
            async with asyncio.timeout(_VIEW_S):
                await self._has_view.wait()
        except TimeoutError:
            raise ConfigurationError(
                "this node is in no cluster yet; `potluck status` shows what it knows"
            ) from None
        if agent.plane.stands_still:
            raise ConfigurationError(
                f"this node is {agent.plane.stands_still}; `potluck continue --alone` overrides"
            )
        if request.again:
            spec = await self._keeping.another_run(request.again, self._code_store)
            await self._await_nodes(spec.job, spec, spec.only, client)
            take = agent.data.take_again
            spec = await take(spec, lambda text: client.take(jobs.JobNote(spec.job, text)))
        else:
            spec = await self._new_spec(request, client)
        spec = agent.sign(await agent.vouching.start_own(spec))
        client.take(local.JobSubmitted(spec.job, spec.starter))
        self._clients.submit(spec, client, outlives=request.outlives)
        return spec.job

    async def _new_spec(self, request: local.RunRequest, client: Client) -> jobs.JobSpec:
        """The spec of the job that ``request`` describes; its folder is taken in."""
        agent = self._agent
        job = new_id(request.module.rpartition(".")[2] or PurePosixPath(request.script).stem)

        def note(text: str) -> None:
            client.take(jobs.JobNote(job, text))

        only = self._named(request.on)
        await self._await_nodes(job, request, only, client)
        self._check_leader()
        package, below = None, ""
        if request.folder:
            package, selection = await self._code_store.take_in(
                *(Path(request.folder), request.script, request.include),
                [folder for _, folder in request.data],
            )
            receivers = self._receivers(only)
            for text in filter(None, (in_words(selection, receivers), links_in_words(selection))):
                note(text)
            with contextlib.suppress(ValueError):
                relative = Path(request.directory).relative_to(request.folder)
                below = relative.as_posix() if relative.parts else ""
        kinds = self._kinds(only)
        plan = await plan_of(request, kinds, agent.environments, self._code_store, note)
        data = await agent.data.take_in(request.data, note, travels=package is not None)
        chosen = {name: getattr(request, name) for name in jobs.JobOptions.__struct_fields__}
        versions, needs, own = await asyncio.to_thread(look_at, request)
        if plan is not None:
            versions, needs = msgspec.structs.replace(versions, python="", torch=""), ()
        return jobs.JobSpec(
            **chosen,
            job=job,
            package=package,
            starter=agent.me,
            versions=versions,
            needs=needs,
            own=own,
            only=only,
            plan=plan,
            data=data,
            below=below,
            master_port=free_port(),
            started=time.time(),
        )

    def _check_leader(self) -> None:
        """ConfigurationError if the leader's potluck is too old to lead jobs of this release: it
        would forget the fields that it does not know, and with them what was signed."""
        view = self._agent.plane.view
        leader = None if view is None else self._agent.links.introduction(view.leader)
        if leader is not None and leader.versions.protocol < JOBS_SINCE:
            raise ConfigurationError(
                f"{leader.name} leads the cluster, and its potluck {leader.versions.potluck} is "
                f"too old to lead jobs of this machine's. Enter there: {leader.versions.upgrade}"
            )

    def _named(self, texts: Sequence[str]) -> tuple[str, ...]:
        """The nodes that ``potluck run --on`` names; ConfigurationError for unknown ones."""
        view = self._agent.plane.view
        nodes = () if view is None else view.nodes
        known = [(node, self._agent.names.label(node)) for node in nodes]
        found = []
        for text in texts:
            try:
                node = find_node(text, known)
                if node not in nodes:
                    raise ConfigurationError("it is not in the cluster now")
            except ConfigurationError as error:
                names = ", ".join(sorted(name for _, name in known))
                raise ConfigurationError(
                    f"--on {text}: {error}. The machines that are there: {names}"
                ) from None
            found.append(node)
        return tuple(dict.fromkeys(found))

    async def _await_nodes(
        self, job: str, request: jobs.JobOptions, only: tuple[str, ...], client: Client
    ) -> None:
        """Return when the view has as many nodes as ``request`` asks for."""

        def willing() -> list[str]:
            return [node for node in self._willing(me) if node in only or not only]

        def here() -> str:
            names = ", ".join(map(self._agent.names.label, willing()))
            count = f"{len(willing())} of at least {request.min_nodes} machines"
            return f"{count} ({names})" if names else count

        def are_enough() -> bool:
            return len(willing()) >= request.min_nodes

        me = self._agent.me
        if are_enough():
            return
        note = f"in the cluster: {here()}; waiting {request.wait_s:g} s for the others"
        note += self._refusals(me)
        client.take(jobs.JobNote(job, note))
        try:
            async with asyncio.timeout(request.wait_s):
                while not are_enough():
                    await self._view_changed.wait()
        except TimeoutError:
            raise ConfigurationError(
                f"in the cluster: {here()}, after {request.wait_s:g} s; start `potluck up` on the "
                "others, or give fewer with --min-nodes (POTLUCK_MIN_PEERS), or a longer --wait"
                f"{self._refusals(me)}"
            ) from None

    def _receivers(self, only: tuple[str, ...]) -> list[str]:
        """The names of the other nodes that get a job's folder: the nodes that run this node's
        jobs, of ``only`` these nodes (empty: of all)."""
        me = self._agent.me
        nodes = (each for each in self._willing(me) if each != me and (each in only or not only))
        return [self._agent.names.label(node) for node in nodes]

    def _kinds(self, only: tuple[str, ...]) -> set[str]:
        """The kinds of the machines that may run a job of this node."""
        kinds = {own_versions().kind}
        for node in self._willing(self._agent.me):
            introduction = self._agent.links.introduction(node)
            if introduction is not None and (node in only or not only):
                kinds.add(introduction.versions.kind)
        return kinds - {""}

    def _willing(self, starter: str) -> tuple[str, ...]:
        """The nodes of the view that run jobs of ``starter``."""
        nodes = () if self._agent.plane.view is None else self._agent.plane.view.nodes
        return tuple(n for n in nodes if not self._agent.offers.objection(n, starter))

    def _refusals(self, starter: str) -> str:
        """Why the other nodes of the view run no jobs of ``starter``, to be put after a text."""
        nodes = () if self._agent.plane.view is None else self._agent.plane.view.nodes
        objections = ((node, self._agent.offers.objection(node, starter)) for node in nodes)
        return "".join(
            f". {self._agent.names.called(node)}: {why}" for node, why in objections if why
        )

    def _offers_changed(self) -> None:
        """This machine's owner, or another's, changed whose jobs run there."""
        self._view_changed.set()
        self._view_changed = asyncio.Event()
        for controller in list(self._controllers.values()):
            controller.offers_changed()
        for runner in list(self.runners.values()):
            runner.offers_changed()
        self._queue.look()

    async def _run_asked(self, request: local.RunRequest, client: Client) -> None:
        """Submit a job, unless the command interrupts it or leaves before that is done."""
        task = asyncio.current_task()
        assert task is not None
        self._submitting[client] = task
        try:
            await self.submit(request, client)
        except asyncio.CancelledError:
            client.take(local.CommandResult(False, "interrupted before it began"))
            raise
        finally:
            del self._submitting[client]

    async def _interrupt_asked(self, request: local.InterruptRequest, client: Client) -> None:
        if client in self._submitting:
            self._submitting[client].cancel()
        self.interrupt(client, request.number)

    async def _status_asked(self, request: local.JobsRequest, client: Client) -> local.JobsReply:
        known = {*self.runners, *self._controllers, *self._queue.names}
        return local.JobsReply(self.status(), tuple(known))

    def abandon(self, client: Client) -> None:
        """The command has gone."""
        self._clients.left(client)

    def interrupt(self, client: Client, number: int) -> None:
        """The operator wants the job of ``client`` to end, by signal ``number``."""
        self._clients.interrupt(client, number)

    def status(self) -> tuple[worker_link.JobState, ...]:
        """The status of all jobs: of those led here as it is now, else as the leader sent it
        last."""
        led = {job: each.status() for job, each in self._controllers.items() if each.has_begun}
        received = {
            job: here.last_status[0] for job, here in self.runners.items() if here.last_status
        }
        return tuple(status for _, status in sorted((received | led).items()))[: jobs.MAX_JOBS]

    def rate(self) -> float:
        """Samples per second of the workers on this node."""
        name = self._agent.names.label(self._agent.me)
        workers = [each for job in self.status() for each in job.workers if each.node == name]
        return sum(each.samples_per_s or 0.0 for each in workers if each.rank >= 0)

    # A worker of this machine.

    async def greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        """A worker has connected: give the connection to the runner of its job."""
        runner = self.runners.get(hello.job)
        if runner is not None:
            await runner.greeted(reader, writer, hello)
        else:
            refusal = Refusal("job", f"this node runs no job {hello.job!r}")
            await aio.write_greeting(writer, refusal)

    # Messages of other agents, and of this agent to itself.

    def received(self, node: str, message: jobs.JobMessage) -> None:
        """``node`` sent ``message``; it may be this node. ProtocolError if ``node`` is to be cut
        off."""
        view = self._agent.plane.view
        if not may_send(node, message, view, self._starter_of):
            is_order = isinstance(message, jobs.FromLeader)
            if is_order and node != self._agent.me and may_lead_soon(node, view):
                self._deferred.keep_orders(node, message)
        elif isinstance(message, jobs.FromLeader):
            self._ordered(message)
        elif isinstance(message, jobs.LabelledOutput) and message.source:
            self._keeping.keep_line(message)
        elif isinstance(message, jobs.ToStarter):
            self._clients.received(message)
            self._keeping.wake(message.job)
        elif isinstance(message, jobs.Submit):
            assert view is not None
            self._submitted(node, message.spec, view)
        elif isinstance(message, jobs.InterruptJob) and message.job in self._queue.names:
            self._tasks.start(self._cancel(message))
        elif (controller := self._controllers.get(message.job)) is not None:
            if isinstance(message, jobs.InterruptJob):
                controller.interrupted(message)
            else:
                controller.received(node, message)

    def _starter_of(self, job: str) -> str:
        controller = self._controllers.get(job)
        return self._queue.starter_of(job) if controller is None else controller.spec.starter

    def _ordered(self, message: jobs.FromLeader) -> None:
        """The leader of this node's view sent ``message``."""
        match message:
            case jobs.Order(spec):
                self._queue.ordered(spec.job)
                runner = self.runners.get(spec.job)
                if runner is not None and runner.spec != spec:
                    self._complain(
                        f"another job was ordered under the name of {spec.job}, which runs here: "
                        f"it is refused. The leader of the cluster should be looked at"
                    )
                elif runner is not None:
                    runner.order_again(message)
                elif len(self.runners) < jobs.MAX_JOBS:
                    self.runners[spec.job] = LocalRunner(
                        self._agent,
                        self._code_store,
                        message,
                        lambda: self._clients.is_behind,
                        self._keeping.runs,
                    )
                    self._keeping.placed(self.runners[spec.job])
            case jobs.JobList(listed, queued):
                self._end(self.runners.keys() - set(listed))
                if queued is None:  # an older release, which knows of no queue
                    queued = self._queue.names
                known = {*listed, *queued}
                self._queue.listed(queued)
                self._clients.listed(known)
                view = self._agent.plane.view
                if view is not None and len(view.nodes) > 1:  # alone it knows of no other's jobs
                    self._agent.vouching.listed({*known, *self._clients.names})
            case jobs.JobWaits():
                self._queue.take(message)
            case jobs.JobStatus(status):
                if (runner := self.runners.get(status.job)) is not None:
                    runner.last_status = status, time.monotonic()
                self._clients.show(message)
            case _:
                if (runner := self.runners.get(message.job)) is not None:
                    runner.ordered(message)

    def _end(self, ended: Collection[str]) -> None:
        """The ``ended`` jobs are over."""
        for runner in (self.runners[job] for job in ended):
            self._agent.vouching.over(runner.spec, has_run=runner.has_started)
        self._drop(ended)

    def _drop(self, ended: Collection[str]) -> None:
        """End the workers here of the ``ended`` jobs."""
        for job in ended:
            self._keeping.wake(job)
            runner = self.runners.pop(job)
            self._ending.start(self._put_away(runner))

    async def _put_away(self, runner: LocalRunner) -> None:
        await runner.put_away()
        if runner.spec.job not in self.runners:
            self._keeping.ended_here(runner.spec)

    def is_elastic(self, job: str) -> bool:
        """Whether the workers of ``job`` here go on in another group after a loss."""
        return (runner := self.runners.get(job)) is not None and not runner.world.is_fixed

    # Leading.

    def _submitted(self, node: str, spec: jobs.JobSpec, view: View) -> None:
        if spec.job in self._controllers:
            return
        if spec.job in self._queue.names:
            self._agent.links.send(node, jobs.Submitted(spec.job))
            return
        try:
            if view.leader != self._agent.me or node != spec.starter:
                raise ConfigurationError("this node does not lead the cluster, or not for you")
            if self._queue.table.has_begun(spec.job):
                raise ConfigurationError(
                    f"it has begun before: `potluck wait {spec.job}` tells how it ended"
                )
            if len(self._controllers) >= jobs.MAX_JOBS:
                raise ConfigurationError(f"the cluster runs {jobs.MAX_JOBS} jobs already")
            if not self._willing(spec.starter):
                raise ConfigurationError(f"no machine runs this job{self._refusals(spec.starter)}")
            placement = Placement(
                spec,
                place(spec, self._queue.may(spec, view), ()),
                self._agent.names,
                self._agent.links.introduction,
                lambda node: self._agent.offers.objection(node, spec.starter),
            )
            if objection := placement.objection(view):
                raise ConfigurationError(objection)
            # With all places that it can get: a longer one would cut the links to all nodes.
            names = tuple(each.worker for each in placement.places)
            peers.MESSAGE.encode(jobs.Order(spec, placement.places, jobs.WorldSpec(members=names)))
            self._queue.submitted(spec)
        except PotluckError as error:
            self._agent.links.send(node, jobs.Submitted(spec.job, str(error)[:4000]))

    def _start(self, spec: jobs.JobSpec, nodes: Sequence[str]) -> None:
        """Begin the job of ``spec`` on ``nodes``."""
        view = self._agent.plane.view
        assert view is not None
        places = place(spec, nodes, ())
        self._lead(
            JobController(self._agent, spec, places, view, is_new=True, busy=self._queue.objection),
            view,
        )

    def _running(self) -> list[Running]:
        return [
            as_running(each.spec, each.placement.nodes, each.since)
            for each in self._controllers.values()
        ]

    def _cancel_asked(self, node: str, question: jobs.CancelJob) -> None:
        """``node``, which may do so, cancels a job that is led here."""
        controller, times = self._controllers.get(question.job), 1 + question.kills
        if controller is None:
            message = jobs.InterruptJob(question.job, signal.SIGTERM, times)
            self._tasks.start(self._cancel(message))
            return
        controller.note(f"cancelled by {self._agent.names.called(node)}")
        times = min(controller.num_interrupts + times, jobs.MAX_INTERRUPTS)
        controller.interrupted(jobs.InterruptJob(question.job, signal.SIGTERM, times))

    async def _cancel(self, message: jobs.InterruptJob) -> None:
        """A job that waits is not to begin."""
        if spec := self._queue.cancel(message.job):
            await self._end_cancelled(spec, message.number)

    async def _end_cancelled(self, spec: jobs.JobSpec, number: int = signal.SIGTERM) -> None:
        text = "it was cancelled while it waited for machines"
        ended = jobs.JobEnded(spec.job, never_begun(spec, 128 + number, text))
        await self._keeping.ended(spec, (), ended)
        self._agent.links.send(spec.starter, ended)
        self._queue.forget(spec.job)

    def _lead(self, controller: JobController, view: View) -> None:
        assert controller.spec.job not in self._controllers
        self._controllers[controller.spec.job] = controller
        self._tasks.start(self._finish(controller))
        controller.copy_output()
        for node in view.nodes:
            controller.order(node)

    async def _finish(self, controller: JobController) -> None:
        await controller.over.wait()
        await controller.all_read()
        job, starter = controller.spec.job, controller.spec.starter
        if self._controllers.get(job) is not controller:
            return  # another node leads it by now
        try:
            if controller.crash is not None:
                controller.refuse(
                    f"this is potluck's fault, please report it: {controller.crash!r}"
                )
            elif controller.has_begun:
                summary = controller.summary()
                ended = jobs.JobEnded(job, encode_summary(summary))
                await self._keeping.ended(controller.spec, controller.placement.places, ended)
                if self._controllers.get(job) is not controller:
                    return
                view = self._agent.plane.view
                is_in = view is not None and starter in view.nodes
                if not is_in or not self._agent.links.send(starter, ended):
                    self._agent.note(f"job {job} is over: exit code {summary.exit_code}")
            if controller.refusal:  # the command may have left: it is told who asks later
                ended = jobs.JobEnded(job, never_begun(controller.spec, 2, controller.refusal))
                await self._keeping.ended(controller.spec, controller.placement.places, ended)
        finally:
            controller.close()
            if self._controllers.get(job) is controller:  # it may lead the job once more
                del self._controllers[job]
            self._agent.plane.handle(events.JobOver(job))
            self._send_list()
            self._queue.look()
            for other in list(self._controllers.values()):
                other.offers_changed()  # there is room on machines

    def _queue_changed(self) -> None:
        """Other jobs wait now: running ones may take machines that those wanted."""
        self._send_list()
        for controller in list(self._controllers.values()):
            controller.offers_changed()

    def _send_list(self) -> None:
        self._send_all(self._list())

    def _list(self) -> jobs.JobList:
        return jobs.JobList(tuple(sorted(self._controllers)), tuple(sorted(self._queue.names)))

    def _send_all(self, message: jobs.FromLeader) -> None:
        view = self._agent.plane.view
        if view is not None and view.leader == self._agent.me:
            for node in view.nodes:
                self._agent.links.send(node, message)

    async def _send_status(self) -> None:
        while True:
            await asyncio.sleep(_STATUS_S)
            try:
                view = self._agent.plane.view
                relayed = self._agent.surveyor.relayed(() if view is None else view.nodes)
                for controller in self._controllers.values():
                    controller.check_time()
                    if controller.has_begun:
                        controller.handle(Severed(controller.placement.pairs(relayed)))
                        self._send_all(jobs.JobStatus(controller.status()))
            except Exception:  # a failure to describe one state must not end all later reports
                _log.exception("the status of the jobs could not be sent")

    # What the nodes agreed on.

    def act(self, action: events.Action) -> None:
        """Carry out ``action`` of the membership protocol, as far as it concerns jobs."""
        match action:
            case events.Install(view):
                self._installed(view)
            case events.Pause(reason):
                for runner in self.runners.values():
                    runner.hold(reason)
                for controller in self._controllers.values():
                    controller.hold()
                self._clients.out(self._agent.names.readable(reason))
            case events.Resume():
                assert self._agent.plane.view is not None
                self._is_back(self._agent.plane.view)
                for controller in self._controllers.values():
                    controller.installed(self._agent.plane.view)
                for runner in self.runners.values():
                    runner.report_again()
            case events.Leave(reason, resync):
                self._has_view.clear()
                self._stop_leading()
                for runner in self.runners.values():
                    runner.hold(reason)
                if self._agent.plane.is_banned:
                    self._drop(list(self.runners))
                elif resync:
                    for runner in self.runners.values():
                        runner.resync()
                self._clients.out(self._agent.names.readable(reason))
            case events.GroupRefused(job, floor, reason) if job in self._controllers:
                self._controllers[job].group_refused(floor, reason)
            case _:
                pass

    def _installed(self, view: View) -> None:
        self._has_view.set()
        self._view_changed.set()
        self._view_changed = asyncio.Event()
        again = self._queue.installed(view)
        self._clients.ask_again(again)  # before the list of a leader that lacks them
        if view.leader == self._agent.me:
            for controller in list(self._controllers.values()):
                controller.installed(view)
            # A new leader takes over the jobs that it knows from its own runners: every node
            # has every job.
            for job, here in self.runners.items():
                if job not in self._controllers:
                    controller = JobController(
                        self._agent,
                        here.spec,
                        here.places,
                        view,
                        is_new=False,
                        before=here.group,
                        world=here.world,
                        last_status=here.last_status,
                        busy=self._queue.objection,
                    )
                    self._lead(controller, view)
                    ending = jobs.InterruptJob(job, signal.SIGTERM, here.interrupts)
                    controller.interrupted(ending)
            for each in self._queue.table:
                if each.is_cancelled:  # its leader was lost before that was kept
                    self._tasks.start(self._end_cancelled(each.spec))
            self._send_list()
            self._queue.look()
        else:
            self._stop_leading()
        for runner in self.runners.values():
            runner.installed(view)
        for node, message in self._deferred.take():
            if node == view.leader and isinstance(message, jobs.FromLeader):
                self._ordered(message)
            elif isinstance(message, jobs.Order):
                text = "does not lead the cluster, and ordered a job: nothing is run for it"
                self._agent.note(f"{self._agent.names.called(node)} {text}")
        for runner in self.runners.values():
            runner.report_again()
        self._is_back(view)

    def _is_back(self, view: View) -> None:
        self._clients.back(self._agent.names.readable(describe(view)))

    def barred(self, nodes: Collection[str]) -> None:
        """``nodes`` are out of the cluster: no job that they started runs on."""
        for job, controller in list(self._controllers.items()):
            if controller.spec.starter in nodes:
                self._agent.note(f"job {job} ends: {controller.spec.starter}, its starter, is out")
                controller.interrupted(jobs.InterruptJob(job, signal.SIGTERM, 2))
        self._end([job for job, each in self.runners.items() if each.spec.starter in nodes])
        self._queue.barred(nodes)

    def linked(self, node: str) -> None:
        """There is a new link to ``node``: messages over the link before it may be lost."""
        view = self._agent.plane.view
        if view is None or view.member(node) is None:
            return
        for controller in self._controllers.values():
            controller.linked(node)
        if view.leader == self._agent.me:
            self._agent.links.send(node, self._list())  # a job may have ended meanwhile
            self._queue.linked(node)
        if node == view.leader:
            for runner in self.runners.values():
                runner.report_again()
            self._clients.ask_again()

    def _stop_leading(self) -> None:
        for controller in self._controllers.values():
            controller.close()
            controller.over.set()
        self._controllers.clear()
        self._queue.stop()

    async def close(self) -> None:
        """End all workers here; no task stays."""
        self._stop_leading()
        await self._queue.close()
        await self._tasks.close()
        self._drop(list(self.runners))
        await self._ending.ended()
