"""The jobs of the cluster as one node takes part in them: it fetches a job's folder, runs the
workers that are placed here, gives them the groups that the cluster's view holds, and tells the
leader what they say.

All it does with a job it was ordered to by the leader of its own view: nobody else can make this
node run anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from potluck.cluster.bundles.depot import BundleDepot
from potluck.cluster.jobs.crew import Crew, seat
from potluck.cluster.jobs.host import JobHost
from potluck.errors import LinkError, PotluckError
from potluck.service import why
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
class Post:
    """One job here. ``world`` is the one that workers are started for now; ``worlds`` and
    ``attempts`` are those of the newest process of each worker. ``asking``: who waits for a view,
    since which epoch; ``ended`` how the newest process of a worker did."""

    spec: jobs.JobSpec
    seats: jobs.Places
    world: jobs.World
    crew: Crew | None = None
    preparing: asyncio.Task[None] | None = None
    group: JobGroup | None = None
    status: control.StatusReply | None = None
    error: str = ""
    attempts: dict[str, int] = field(default_factory=dict)
    worlds: dict[str, int] = field(default_factory=dict)
    ready: dict[str, control.Ready] = field(default_factory=dict)
    asking: dict[str, int] = field(default_factory=dict)
    installed: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    ended: dict[str, jobs.Exited] = field(default_factory=dict)
    unsaid: deque[jobs.Output] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT_LINES))

    @property
    def alive(self) -> tuple[str, ...]:
        return () if self.crew is None else self.crew.alive


class JobRunner:
    """All jobs here. ``depot`` has the bundles."""

    def __init__(self, host: JobHost, depot: BundleDepot) -> None:
        self.posts: dict[str, Post] = {}
        self._host = host
        self._depot = depot
        self._tasks: set[asyncio.Task[None]] = set()

    # What the leader orders.

    def received(self, message: jobs.FromLeader) -> None:
        """The leader of this node's view said ``message``."""
        if isinstance(message, jobs.Order):
            self._order(message)
        elif isinstance(message, jobs.JobList):
            for job in self.posts.keys() - set(message.jobs):
                self._drop(job)
        elif isinstance(message, jobs.JobStatus):
            post = self.posts.get(message.status.job)
            if post is not None:
                post.status = message.status
        elif (post := self.posts.get(message.job)) is not None and post.crew is not None:
            match message:
                case jobs.StartWorker(_, worker, attempt):
                    self._start(post, post.crew, worker, attempt)
                case jobs.StopWorkers(_, workers, reason):
                    post.crew.stop(workers, reason)
                case jobs.SignalWorkers(_, workers, number):
                    post.crew.signal(workers, number)
                case jobs.TellWorkers(_, workers, told):
                    post.crew.tell(workers, told)

    def _order(self, order: jobs.Order) -> None:
        post = self.posts.get(order.spec.job)
        if post is None:
            post = self.posts[order.spec.job] = Post(order.spec, order.places, order.world)
            post.preparing = self._spawn(self._prepare(post))
            return
        post.seats, post.world = order.places, order.world
        if post.crew is not None:
            self.report(post)
        elif post.error:
            post.error = ""
            post.preparing = self._spawn(self._prepare(post))

    async def _prepare(self, post: Post) -> None:
        """Have the folder here, then be ready to start workers."""
        spec, job = post.spec, post.spec.job
        try:
            if not self._depot.has(spec.bundle):
                await self._bring(spec)
            folder = await asyncio.to_thread(self._depot.open, spec.bundle, job)
        except (PotluckError, OSError) as error:
            post.error = str(error)[:4000]
        except Exception as error:  # the leader would wait for this node's report for ever
            _log.exception("preparing job %s broke", job)
            post.error = f"this is potluck's fault, please report it: {why(error)}"[:4000]
        else:
            if self.posts.get(job) is not post:
                return
            launcher = self._host.runtime.launcher(
                spec,
                folder,
                is_starter=spec.starter == self._host.me,
                sink=lambda worker, stream, text: self._line(post, worker, stream, text),
                is_behind=self._is_behind,
            )
            post.crew = Crew(job, launcher, _PostBoss(self, post))
        self.report(post)

    async def _bring(self, spec: jobs.JobSpec) -> None:
        """Get the bundle from the starter, or the leader. Either may still have to hear that this
        node is in the view, or have the bundle itself: they are asked again for a while."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _BRING_S
        while True:
            view = self._host.view
            nodes = set() if view is None else {spec.starter, view.leader} - {self._host.me}
            for node in sorted(nodes, key=lambda node: node != spec.starter):
                try:
                    await self._depot.fetch(node, spec.bundle)
                    return
                except LinkError:
                    if loop.time() > deadline:
                        raise
            if not nodes and loop.time() > deadline:
                raise LinkError("no node that is left has the script's folder")
            await asyncio.sleep(_BRING_AGAIN_S)

    def _start(self, post: Post, crew: Crew, worker: str, attempt: int) -> None:
        if worker in crew.alive or attempt <= post.attempts.get(worker, -1):
            return
        post.attempts[worker], post.worlds[worker] = attempt, post.world.number
        for known in (post.ready, post.asking, post.installed, post.ended):
            known.pop(worker, None)
        post.finished.discard(worker)
        crew.start(worker, attempt, self._variables(post, worker))

    def _variables(self, post: Post, worker: str) -> dict[str, str]:
        """Where ``worker`` is in its world. One that came later has the place after all others."""
        node_of = {seat.worker: seat.node for seat in post.seats}
        members = post.world.members
        if worker not in members:
            members = tuple(seat.worker for seat in post.seats)
        beside = [each for each in members if node_of[each] == node_of[worker]]
        return {
            "POTLUCK_AGENT": f"127.0.0.1:{self._host.port}",
            "POTLUCK_BIND": self._host.bind,
            "POTLUCK_WIRE": post.spec.wire,
            "POTLUCK_NODES": ",".join(self._host.names.label(node_of[m]) for m in members),
            "LOCAL_RANK": str(beside.index(worker)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": self._address(node_of[members[0]]),
            "MASTER_PORT": str(post.world.master_port),
            **seat(members.index(worker), len(members), post.world.number),
        }

    def report(self, post: Post) -> None:
        """Tell the leader all that it may not know of this job's workers here."""
        job, say = post.spec.job, self._host.to_leader
        for exited in post.ended.values():
            say(jobs.Happened(job, exited))
        workers = tuple(
            jobs.Seen(worker, attempt, post.worlds[worker], worker in post.alive)
            for worker, attempt in post.attempts.items()
        )
        say(jobs.Reported(job, workers, post.error))
        for worker in post.alive:
            if worker in post.finished:
                say(jobs.Happened(job, control.Finished(worker)))
            elif worker in post.asking:
                again = msgspec.structs.replace(
                    post.ready[worker], after_epoch=post.asking[worker], cause=""
                )
                say(jobs.Happened(job, again))
            elif worker in post.installed:
                say(jobs.Happened(job, post.ready[worker]))
                say(jobs.Happened(job, control.Installed(worker, post.installed[worker])))
        while post.unsaid:
            if not say(post.unsaid[0]):
                return
            post.unsaid.popleft()

    def _drop(self, job: str) -> None:
        post = self.posts.pop(job)
        self._spawn(self._put_away(post))

    async def _put_away(self, post: Post) -> None:
        if post.preparing is not None:  # the folder may be on its way, over a slow link
            post.preparing.cancel()
            await asyncio.gather(post.preparing, return_exceptions=True)
        if post.crew is not None:
            await post.crew.put_away()
        await asyncio.to_thread(self._depot.close, post.spec.job)

    # What the cluster agreed on.

    def installed(self, view: View) -> None:
        """Give each new group to its members here; say anew where the workers stand."""
        for job, post in self.posts.items():
            group = view.group(job)
            if group is None or (post.group is not None and group.epoch <= post.group.epoch):
                continue
            before, post.group = post.group, group
            if post.crew is None:
                continue
            names = tuple(member.worker for member in group.members)
            if before is not None and not post.world.is_fixed:  # that ends as a whole
                for member in before.members:
                    if member.worker not in names and member.node not in view.nodes:
                        cause = (
                            f"node {self._host.names.called(member.node)} left the cluster's view"
                        )
                        over = control.GroupOver(before.epoch, member.worker, False, cause)
                        post.crew.tell(post.alive, over)
            chaos = self._host.runtime.chaos(post.spec.chaos)
            members = tuple(self._seen_from_here(member) for member in group.members)
            for rank, name in enumerate(names):
                steps = chaos.steps_of(rank)
                told = control.View(job, group.epoch, members, steps, group.paths)
                if post.worlds.get(name) == group.world:
                    post.crew.tell((name,), told)

    def hold(self, reason: str) -> None:
        """This node is in no view that counts: end the groups, let the workers wait."""
        for post in self.posts.values():
            if post.crew is None:
                continue
            if post.group is not None and not post.world.is_fixed:  # that may outlast the pause
                cause = control.clip(reason)
                over = control.GroupOver(post.group.epoch, "", False, cause)
                post.crew.tell(post.alive, over)
            post.crew.tell(post.alive, control.Hold(control.clip(reason)))

    def give_up(self) -> None:
        """End all workers here: their jobs go on without this node for good."""
        for job in list(self.posts):
            self._drop(job)

    def resync(self) -> None:
        """The state of the workers here must not go on: they are started anew, by and by."""
        for post in self.posts.values():
            if post.crew is not None:
                post.crew.signal(post.alive, SIGKILL)

    def say_again(self) -> None:
        """There is a leader to talk to, maybe another one."""
        for post in self.posts.values():
            if post.crew is not None or post.error:
                self.report(post)

    def _seen_from_here(self, member: Member) -> Member:
        host = self._address(member.node)
        return Member(member.worker, member.node, host, member.port, member.local_rank)

    def _address(self, node: str) -> str:
        return "127.0.0.1" if node == self._host.me else self._host.address(node)

    # What the workers do.

    async def greeted(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello: Hello,
    ) -> None:
        """A worker of this machine calls."""
        post = self.posts.get(hello.job)
        if post is None or post.crew is None:
            refusal = Refusal("job", f"this node runs no job {hello.job!r}")
            await aio.write_greeting(writer, refusal)
        else:
            await post.crew.greeted(reader, writer, hello)

    def _line(self, post: Post, worker: str, stream: str, text: str) -> None:
        line = jobs.Output(post.spec.job, worker, stream, text)
        if post.unsaid or not self._host.to_leader(line):
            post.unsaid.append(line)

    def _is_behind(self) -> bool:
        view = self._host.view
        return view is not None and self._host.unsent(view.leader) > _MAX_UNSENT

    def happened(self, post: Post, event: jobs.Event) -> None:
        """Remember what a later leader has to be told again, and tell the present one."""
        match event:
            case control.Ready(worker=worker, after_epoch=after):
                if worker in post.finished:  # and forms its fixed world once more
                    post.finished.discard(worker)
                    after = post.installed.get(worker, after)
                    event = msgspec.structs.replace(event, after_epoch=after)
                post.ready[worker] = event
                post.asking[worker] = after
            case control.Lost(worker, epoch):
                post.asking[worker] = epoch
            case control.Installed(worker, epoch):
                post.installed[worker] = epoch
                post.asking.pop(worker, None)
            case control.Finished(worker):
                post.finished.add(worker)
            case jobs.Exited(worker):
                post.ended[worker] = event
            case _:
                pass
        self._host.to_leader(jobs.Happened(post.spec.job, event))
        if self._host.stands_still and isinstance(event, control.Ready | control.Lost):
            assert post.crew is not None
            post.crew.tell((event.worker,), control.Hold(control.clip(self._host.stands_still)))

    async def close(self) -> None:
        """End all workers here."""
        self.give_up()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@dataclass(frozen=True, slots=True)
class _PostBoss:
    """The leader, as a crew sees it: far away."""

    runner: JobRunner
    post: Post

    def happened(self, event: jobs.Event) -> None:
        self.runner.happened(self.post, event)

    def asked(self, worker: str, request: control.StatusRequest) -> None:
        pass  # an agent of a cluster answers commands, not workers
