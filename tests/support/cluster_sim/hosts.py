"""A simulated host: the real ``MembershipProtocol`` with a disk, a skewed clock, one
worker, and ways to fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Protocol

from potluck._core.cluster.jobs.group_agreement import holders
from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.failure_detector import Timing
from potluck._core.cluster.membership.protocol import MembershipProtocol
from potluck._core.types import Member
from potluck._core.wire.nodes import JobGroup, NodeMessage, StableRecord, View
from support.cluster_sim.network import Network, Queue
from support.cluster_sim.training import Worker, WorkerMessage

JOB = "job"
READY_S = 0.5


class Judge(Protocol):
    """Who watches that no invariant is broken."""

    def installed(self, host: Host, view: View) -> None: ...

    def committed(self, host: Host, branch: str, step: int, epoch: int) -> None: ...

    def noted(self, host: Host, action: events.Action) -> None: ...


class Host:
    """One machine. ``offset`` and ``rate`` are its clock's; only differences may matter."""

    def __init__(
        self, name: str, queue: Queue, network: Network, chance: random.Random, judge: Judge
    ) -> None:
        self.name = name
        self.queue, self.network, self.judge = queue, network, judge
        self.chance = chance
        self.offset = chance.uniform(-86_400, 86_400)
        self.rate = chance.uniform(0.97, 1.03)
        self.others: dict[str, Host] = {}
        self.incarnation = 0
        self.disk = StableRecord()
        self.barred: frozenset[str] = frozenset()
        """The file of admitted keys: who is out, as far as this host knows."""
        self.node: MembershipProtocol | None = None
        self.worker: Worker | None = None
        self.frozen_until = 0.0
        self.timing = Timing()
        self.make_node: Callable[..., MembershipProtocol] = MembershipProtocol
        self.judged: Callable[[events.Event, Callable[[], None]], None] | None = None
        """Called with each event and what handles it, in place of the latter."""
        self._backlog: list[events.Event] = []
        self._generation = 0
        self._ready: dict[str, tuple[float, str, int]] = {}

    @property
    def now(self) -> float:
        """This host's monotonic clock."""
        return self.queue.now * self.rate + self.offset

    # Coming and going.

    def start(self) -> None:
        """The agent starts: a new incarnation, with what is on disk."""
        self.incarnation += 1
        self._backlog, self._ready, self.frozen_until = [], {}, 0.0
        self.node = self.make_node(self.name, self.incarnation, self.disk, self.now, self.timing)
        if self.barred:
            self.handle(events.Barred(self.barred))
        self._new_worker()
        incarnation = self.incarnation
        for other in self.others.values():
            delay = self.chance.uniform(0.01, 0.5)
            self.queue.after(delay, partial(self._link, incarnation, other))
        self._tick(incarnation)
        self._work(incarnation)

    def _new_worker(self) -> None:
        self._generation += 1
        name = f"{self.name}.{self.incarnation}.{self._generation:03}"
        incarnation, worker = self.incarnation, None

        def tell(node: str, target: str, message: WorkerMessage) -> None:
            if self.worker is worker and self.incarnation == incarnation:
                other = self.others.get(node)
                if other is not None:
                    self.network.send(self.name, node, lambda: other.deliver(target, message))

        def on_commit(branch: str, step: int, epoch: int) -> None:
            self.judge.committed(self, branch, step, epoch)

        self.worker = worker = Worker(name, tell, on_commit)

    def _link(self, incarnation: int, other: Host) -> None:
        """Connect, as soon as the network lets us."""
        if self.node is None or self.incarnation != incarnation:
            return
        if other.node is not None and self.network.joined(self.name, other.name):
            self.handle(events.Linked(other.name, other.incarnation))
            other.handle(events.Linked(self.name, self.incarnation))
        else:
            self.queue.after(0.5, lambda: self._link(incarnation, other))

    def crash(self, *, is_seen: bool) -> None:
        """The agent and its worker end. ``is_seen``: the host lives and refuses connections."""
        if self.node is None:
            return
        self.node = self.worker = None
        incarnation = self.incarnation
        if is_seen:
            for other in self.others.values():
                self._refuse(other, incarnation)

    def _refuse(self, other: Host, incarnation: int) -> None:
        def tell() -> None:
            if self.network.joined(self.name, other.name):
                other.handle(events.ConnectionRefused(self.name, incarnation))
            elif self.node is None:
                self.queue.after(0.5, tell)  # the next attempt to connect

        self.queue.after(self.chance.uniform(0.001, 0.1), tell)

    def freeze(self, seconds: float) -> None:
        """The agent is stopped; its worker goes on."""
        self.frozen_until = max(self.frozen_until, self.queue.now + seconds)
        incarnation = self.incarnation
        self.queue.after(seconds, lambda: self._thaw(incarnation))

    def _thaw(self, incarnation: int) -> None:
        if self.incarnation == incarnation and self.queue.now >= self.frozen_until:
            backlog, self._backlog = self._backlog, []
            if self.chance.random() < 0.5:
                self.handle(events.Tick())
            for event in backlog:
                self.handle(event)

    # Time.

    def _tick(self, incarnation: int) -> None:
        node = self.node
        if node is None or self.incarnation != incarnation:
            return
        self.handle(events.Tick())
        wait = max(node.next_wakeup() - self.now, 0.001) / self.rate
        self.queue.after(wait, lambda: self._tick(incarnation))

    def _work(self, incarnation: int) -> None:
        if self.worker is None or self.incarnation != incarnation:
            return
        self.worker.tick()
        if self.queue.now >= self.frozen_until:
            word = (self.name, self.worker.name, self.worker.settled)
            for other in self.others.values():
                self.network.send(self.name, other.name, partial(other.is_ready, *word))
            self.is_ready(*word)
            self._keep_job()
        wait = self.chance.uniform(0.9, 1.1) * 0.25
        self.queue.after(wait, lambda: self._work(incarnation))

    # Events and actions.

    def bar(self, nodes: frozenset[str]) -> None:
        """The list of admitted keys says that ``nodes`` are out."""
        if not nodes <= self.barred:
            self.barred |= nodes
            self.handle(events.Barred(self.barred))

    def receive(self, source: str, incarnation: int, message: object) -> None:
        """A message of another host's agent arrived. The list of admitted keys comes with it; from
        a host that is out nothing is heard, but that host hears why."""
        if self.node is None:
            return
        other = self.others[source]
        if source in self.barred:
            self.network.send(self.name, source, lambda: other.bar(self.barred))
            return
        self.bar(other.barred)
        if source in self.barred:
            return
        self.handle(events.Received(source, incarnation, message))  # type: ignore[arg-type]

    def handle(self, event: events.Event) -> None:
        if self.node is None:
            return
        if self.queue.now < self.frozen_until:
            if not isinstance(event, events.Tick):
                self._backlog.append(event)
            return
        if self.judged is None:
            self._handle(event)
        else:
            self.judged(event, lambda: self._handle(event))

    def _handle(self, event: events.Event) -> None:
        assert self.node is not None
        for action in self.node.handle(event, self.now):
            self._act(action)

    def send(self, node: str, message: NodeMessage) -> None:
        """Send ``message`` to the agent of ``node``."""
        other = self.others.get(node)
        if other is not None:
            source, incarnation = self.name, self.incarnation
            self.network.send(source, node, lambda: other.receive(source, incarnation, message))

    def _act(self, action: events.Action) -> None:
        match action:
            case events.Send(node, message):
                self.send(node, message)
            case events.Save(number, record):
                self._write(number, record)
            case events.Install(view):
                self.judge.installed(self, view)
                self._install(view)
            case events.Pause():
                if self.worker is not None:
                    self.worker.stopped = True
            case events.Resume():
                if self.worker is not None:
                    self.worker.stopped = False
            case events.Leave(_, resync):
                if resync:
                    self._new_worker()
                elif self.worker is not None:
                    self.worker.leave()
            case events.GroupRefused() | events.Note():
                pass
        if not isinstance(action, events.Send):
            self.judge.noted(self, action)

    def _write(self, number: int, record: StableRecord) -> None:
        incarnation = self.incarnation

        def done() -> None:
            if self.incarnation == incarnation and self.node is not None:
                self.disk = record
                self.handle(events.Saved(number))

        slow = self.chance.random() < 0.02
        self._disk_free = max(getattr(self, "_disk_free", 0.0), self.queue.now)
        self._disk_free += 0.3 if slow else self.chance.uniform(0.0005, 0.01)
        self.queue.at(self._disk_free, done)

    def _install(self, view: View) -> None:
        if self.worker is None:
            return
        group = view.group(JOB)
        if group is None or group.epoch <= self.worker.epoch:
            return
        if any(member.worker == self.worker.name for member in group.members):
            self.worker.enter(group, f"/fork {view.history}" if view.fork_of else "")
        else:
            self.worker.leave()

    # The job: what ``membership`` does on the leader.

    def deliver(self, target: str, message: WorkerMessage) -> None:
        """A message of another host's worker arrived."""
        if self.worker is not None and self.worker.name == target:
            self.worker.hear(message)

    def is_ready(self, node: str, worker: str, settled: int) -> None:
        """A worker of ``node`` is there; it held the job's state in the group of ``settled``."""
        self._ready[node] = (self.queue.now, worker, settled)

    def begin_job(self) -> bool:
        """Start a job on this host's cluster, if this node leads it."""
        view = None if self.node is None else self.node.view
        if view is None or view.leader != self.name:
            return False
        return self._want(view, None)

    def _keep_job(self) -> None:
        node = self.node
        if node is None or node.view is None or node.paused or node.view.leader != self.name:
            return
        group = node.view.group(JOB)
        if group is not None:
            self._want(node.view, group)

    def _has_settled(self, member: Member, group: JobGroup) -> bool:
        _, worker, settled = self._ready.get(member.node, (0.0, "", 0))
        return worker == member.worker and settled == group.epoch

    def _has_ended(self, member: Member) -> bool:
        return self._ready.get(member.node, (0.0, "", 0))[1] > member.worker

    def _want(self, view: View, group: JobGroup | None) -> bool:
        newest = {
            node: worker
            for node, (at, worker, _) in self._ready.items()
            if node in view.nodes and self.queue.now - at < 1.5
        }
        before = group.members if group is not None else ()
        staying = [
            member
            for member in before
            if member.node in view.nodes and newest.get(member.node, member.worker) == member.worker
        ]
        there = {member.node for member in staying}
        new = [Member(worker, node) for node, worker in sorted(newest.items()) if node not in there]
        members = (*staying, *new)
        if not members:
            return False
        settled = {m.worker for m in staying if group is not None and self._has_settled(m, group)}
        names, fresh = holders(
            group,
            members,
            joined=[member.worker for member in new],
            heard=settled,
            ended=[member.worker for member in before if self._has_ended(member)],
        )
        if group is not None:
            is_stuck = any(member.node not in view.nodes for member in before)
            have_settled = bool(group.entering) and settled.issuperset(group.entering)
            if members == before and not is_stuck and not have_settled:
                return False
        self.handle(events.WantGroup(JOB, members, names, "workers change", fresh))
        return True
