"""All jobs of the cluster, as one node's agent has to do with them.

It leads them while it leads the cluster (``coordinator.py``), it has some of their workers
(``runner.py``), and it serves the commands of this machine that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from potluck.cluster.bundles.depot import BundleDepot
from potluck.cluster.jobs.coordinator import JobCoordinator, accept
from potluck.cluster.jobs.early import EarlyOrders
from potluck.cluster.jobs.host import JobHost
from potluck.cluster.jobs.runner import JobRunner
from potluck.cluster.membership import events
from potluck.cluster.topology.versions import own_versions
from potluck.errors import ConfigurationError, PotluckError
from potluck.wire import control, jobs, local
from potluck.wire.nodes import View

_log = logging.getLogger(__name__)

_STATUS_S = 0.5
_VIEW_S = 15.0


class Client(Protocol):
    """A command of this machine that waits for its job."""

    def send(self, message: local.Reply) -> None:
        """Tell it, without blocking."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A job that a command here started. ``is_taken``: the leader has it."""

    spec: jobs.JobSpec
    client: Client
    is_taken: bool = False
    number: int = 0
    times: int = 0


class JobDispatcher:
    """Feed it what the agent hears: messages, views, pauses, requests."""

    def __init__(self, host: JobHost, depot: BundleDepot) -> None:
        self.runner = JobRunner(host, depot)
        self._host = host
        self._depot = depot
        self._coordinators: dict[str, JobCoordinator] = {}
        self._watched: dict[str, _Watched] = {}
        self._early = EarlyOrders()
        self._has_view = asyncio.Event()
        self._view_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._tell_status())

    # What a person orders here.

    async def submit(self, request: local.RunRequest, client: Client) -> str:
        """Have a job run for ``client``; its name. ConfigurationError if it can't be."""
        host = self._host
        try:
            async with asyncio.timeout(_VIEW_S):
                await self._has_view.wait()
        except TimeoutError:
            raise ConfigurationError(
                "this node is in no cluster yet; `potluck status` shows what it knows"
            ) from None
        if host.stands_still:
            raise ConfigurationError(
                f"this node is {host.stands_still}; `potluck continue --alone` overrides"
            )
        job = f"{PurePosixPath(request.script).stem[:64]}-{secrets.token_hex(4)}"
        await self._await_nodes(job, request, client)
        bundle = await self._depot.take_in(Path(request.folder), request.script)
        below = ""
        with contextlib.suppress(ValueError):
            below = Path(request.directory).relative_to(request.folder).as_posix()
        spec = jobs.JobSpec(
            job=job,
            script=request.script,
            arguments=request.arguments,
            bundle=bundle,
            starter=host.me,
            versions=own_versions(),
            below=below,
            directory=request.directory,
            per_node=request.per_node,
            max_nodes=request.max_nodes,
            max_restarts=request.max_restarts,
            peer_timeout_s=request.peer_timeout_s,
            chaos=request.chaos,
            wire=request.wire,
            restarts_worlds=request.restarts_worlds,
            wait_s=request.wait_s,
            min_workers=request.min_workers,
            master_port=host.runtime.free_port(),
            started=time.time(),
        )
        self._watched[job] = _Watched(spec, client)
        host.to_leader(jobs.Submit(spec))
        return job

    async def _await_nodes(self, job: str, request: local.RunRequest, client: Client) -> None:
        """Until as many nodes are in the view as ``request`` asks for."""

        def here() -> str:
            nodes = () if self._host.view is None else self._host.view.nodes
            names = ", ".join(self._host.names.label(node) for node in nodes)
            return f"{len(nodes)} of at least {request.min_nodes} machines ({names})"

        def are_enough() -> bool:
            view = self._host.view
            return view is not None and len(view.nodes) >= request.min_nodes

        if are_enough():
            return
        note = f"in the cluster: {here()}; waiting {request.wait_s:g} s for the others"
        client.send(jobs.JobNote(job, note))
        try:
            async with asyncio.timeout(request.wait_s):
                while not are_enough():
                    await self._view_changed.wait()
        except TimeoutError:
            raise ConfigurationError(
                f"in the cluster: {here()}, after {request.wait_s:g} s; start `potluck up` on the "
                "others, or give fewer with --min-nodes (POTLUCK_MIN_PEERS), or a longer --wait"
            ) from None

    def interrupt(self, job: str, number: int) -> None:
        """The operator wants the end of a job that was submitted here."""
        watched = self._watched.get(job)
        if watched is not None:
            watched.number, watched.times = number, watched.times + 1
            self._host.to_leader(jobs.InterruptJob(job, number, watched.times))

    def abandon(self, job: str, number: int) -> None:
        """The command is gone without a word: its job ends, as if by ``number``."""
        if job in self._watched:
            self.interrupt(job, number)

    def status(self) -> tuple[control.StatusReply, ...]:
        """The jobs, as the leader told of them last."""
        led = {job: each.status() for job, each in self._coordinators.items() if each.has_begun}
        told = {job: post.status for job, post in self.runner.posts.items() if post.status}
        return tuple(status for _, status in sorted((told | led).items()))[: jobs.MAX_JOBS]

    # What other nodes say.

    def received(self, node: str, message: jobs.JobMessage) -> None:
        """``node`` said ``message``; it may be this one. ProtocolError if it is to be cut off."""
        view = self._host.view
        if isinstance(message, jobs.FromLeader):
            if view is None or node != view.leader:
                if node != self._host.me:
                    self._early.keep(node, message)
                return
            self._ordered(message)
        elif isinstance(message, jobs.ToStarter):
            if view is not None and node == view.leader:
                self._shown(message)
        elif view is None or view.member(node) is None:
            return
        elif isinstance(message, jobs.Submit):
            self._submitted(node, message.spec, view)
        else:
            coordinator = self._coordinators.get(message.job)
            if isinstance(message, jobs.InterruptJob):
                if coordinator is not None and node == coordinator.spec.starter:
                    coordinator.interrupted(message)
            elif coordinator is not None:
                coordinator.received(node, message)

    def _ordered(self, message: jobs.FromLeader) -> None:
        self.runner.received(message)
        if isinstance(message, jobs.JobStatus):
            watched = self._watched.get(message.status.job)
            if watched is not None:
                watched.is_taken = True  # its answer may have been lost with the leader before
                watched.client.send(message)
        elif isinstance(message, jobs.JobList):
            gone = [job for job, each in self._watched.items() if each.is_taken]
            for job in set(gone) - set(message.jobs):
                text = "it ended while this node was away; the leader's log says how"
                self._watched.pop(job).client.send(local.Outcome(False, text))

    def _shown(self, message: jobs.ToStarter) -> None:
        watched = self._watched.get(message.job)
        if watched is None:
            return
        if isinstance(message, jobs.Submitted):
            watched.is_taken = not message.error
            if message.error:
                del self._watched[message.job]
                watched.client.send(local.Outcome(False, message.error))
            return
        watched.client.send(message)
        if isinstance(message, jobs.JobEnded):
            del self._watched[message.job]

    # Leading.

    def _submitted(self, node: str, spec: jobs.JobSpec, view: View) -> None:
        if spec.job in self._coordinators:
            return
        try:
            if view.leader != self._host.me or node != spec.starter:
                raise ConfigurationError("this node does not lead the cluster, or not for you")
            if len(self._coordinators) >= jobs.MAX_JOBS:
                raise ConfigurationError(f"the cluster runs {jobs.MAX_JOBS} jobs already")
            coordinator = accept(self._host, spec, view)
        except PotluckError as error:
            self._host.send(node, jobs.Submitted(spec.job, str(error)[:4000]))
            return
        self._lead(coordinator, view)

    def _lead(self, coordinator: JobCoordinator, view: View) -> None:
        self._coordinators[coordinator.spec.job] = coordinator
        self._spawn(self._see_to_its_end(coordinator))
        for node in view.nodes:
            coordinator.order(node)

    async def _see_to_its_end(self, coordinator: JobCoordinator) -> None:
        await coordinator.lead.over.wait()
        job, starter = coordinator.spec.job, coordinator.spec.starter
        if self._coordinators.get(job) is not coordinator:
            return  # another node leads it by now
        try:
            if coordinator.lead.crash is not None:
                coordinator.refuse(
                    f"this is potluck's fault, please report it: {coordinator.lead.crash!r}"
                )
            elif coordinator.has_begun:
                ended = coordinator.summary()
                view = self._host.view
                is_in = view is not None and starter in view.nodes
                if not is_in or not self._host.send(starter, ended):
                    self._host.log(job, ended.summary.decode())
                    self._host.note(f"job {job} is over: exit code {ended.exit_code}")
        finally:
            coordinator.lead.close()
            self._coordinators.pop(job, None)
            self._host.handle(events.JobOver(job))
            self._tell_all(self._list())

    def _list(self) -> jobs.JobList:
        return jobs.JobList(tuple(sorted(self._coordinators)))

    def _tell_all(self, message: jobs.FromLeader) -> None:
        view = self._host.view
        if view is not None and view.leader == self._host.me:
            for node in view.nodes:
                self._host.send(node, message)

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(_STATUS_S)
            try:
                for coordinator in self._coordinators.values():
                    if coordinator.has_begun:
                        self._tell_all(jobs.JobStatus(coordinator.status()))
            except Exception:  # what is told next may do again
                _log.exception("the status of the jobs could not be told")

    # What the cluster agreed on.

    def act(self, action: events.Action) -> None:
        """The control plane decided this."""
        match action:
            case events.Install(view):
                self._installed(view)
            case events.Pause(reason):
                self.runner.hold(reason)
                for coordinator in self._coordinators.values():
                    coordinator.hold()
            case events.Resume():
                assert self._host.view is not None
                for coordinator in self._coordinators.values():
                    coordinator.installed(self._host.view)
                self.runner.say_again()
            case events.Leave(reason, resync):
                self._has_view.clear()
                self._stop_leading()
                self.runner.hold(reason)
                if self._host.is_banned:
                    self.runner.give_up()
                elif resync:
                    self.runner.resync()
            case events.GroupRefused(job, floor, reason) if job in self._coordinators:
                self._coordinators[job].group_refused(floor, reason)
            case _:
                pass

    def _installed(self, view: View) -> None:
        self._has_view.set()
        self._view_changed.set()
        self._view_changed = asyncio.Event()
        me = self._host.me
        if view.leader == me:
            for coordinator in list(self._coordinators.values()):
                coordinator.installed(view)
            for job, post in self.runner.posts.items():
                if job not in self._coordinators:
                    coordinator = JobCoordinator(
                        self._host,
                        post.spec,
                        post.seats,
                        view,
                        is_new=False,
                        before=post.group,
                        world=post.world,
                    )
                    self._lead(coordinator, view)
            self._tell_all(self._list())
        else:
            self._stop_leading()
        self.runner.installed(view)
        for node, message in self._early.take():
            if node == view.leader:
                self._ordered(message)
            elif isinstance(message, jobs.Order):
                text = "does not lead the cluster, and ordered a job: nothing is run for it"
                self._host.note(f"{self._host.names.called(node)} {text}")
        self.runner.say_again()
        for job, watched in self._watched.items():
            if not watched.is_taken:
                self._host.to_leader(jobs.Submit(watched.spec))
            if watched.times:
                self._host.to_leader(jobs.InterruptJob(job, watched.number, watched.times))

    def linked(self, node: str) -> None:
        """There is a new link to ``node``: what was said before may not have arrived."""
        view = self._host.view
        if view is None or view.member(node) is None:
            return
        for coordinator in self._coordinators.values():
            coordinator.order(node)
        if view.leader == self._host.me:
            self._host.send(node, self._list())  # a job may have ended meanwhile
        if node == view.leader:
            self.runner.say_again()

    def _stop_leading(self) -> None:
        for coordinator in self._coordinators.values():
            coordinator.lead.close()
            coordinator.lead.over.set()
        self._coordinators.clear()

    async def close(self) -> None:
        """End all workers here; no task stays."""
        self._stop_leading()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.runner.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
