"""Leading one job of a cluster: a ``Lead`` whose hands are on all nodes, and whose groups the
cluster's nodes vote on.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from potluck.cluster.groups import events, membership
from potluck.cluster.groups.roster import Phase, Policy, World
from potluck.cluster.jobs.host import JobHost
from potluck.cluster.jobs.job import Job
from potluck.cluster.jobs.lead import Lead
from potluck.cluster.jobs.placement import holders, place
from potluck.cluster.membership.events import WantGroup
from potluck.cluster.topology.versions import differences
from potluck.errors import ConfigurationError
from potluck.system import SIGKILL
from potluck.types import Member
from potluck.wire import control, jobs
from potluck.wire.nodes import JobGroup, View

_LAST_WORDS = 30
_MAX_UNSENT = 4 << 20
_CAUSE_S = 4.0
"""A worker may fail this long before the nodes know that another's machine is lost: 3 s, and some
time on the way."""


class JobCoordinator:
    """One job, on the node that leads the cluster."""

    def __init__(
        self,
        host: JobHost,
        spec: jobs.JobSpec,
        places: jobs.Places,
        view: View,
        *,
        is_new: bool,
        before: JobGroup | None = None,
        world: jobs.World | None = None,
    ) -> None:
        """A new job, of which nothing runs; or one that another leader had begun, whose group was
        ``before`` in the view before this one, and whose workers were started for ``world``."""
        self.spec = spec
        self.places = places
        self.has_begun = not is_new
        self.last_words: dict[str, deque[str]] = {}
        self.num_interrupts = 0
        self._host = host
        self._reported: set[str] = set()
        self._announced: list[events.Announce] = []
        self._group: JobGroup | None = view.group(spec.job)
        self._settled: set[str] = set()
        self._ended: set[str] = set()
        self._pids: dict[str, int] = {}
        self._unfit: set[str] = set()
        self._held: deque[tuple[str, jobs.FromNode]] | None = None
        self._num_dropped = 0
        self._nodes = set(view.nodes)
        policy = Policy(
            max_restarts=spec.max_restarts,
            restarts_worlds=spec.restarts_worlds,
            wait_s=spec.wait_s,
            min_workers=spec.min_workers,
            cause_s=_CAUSE_S,
        )
        names = tuple(each.worker for each in places)
        self.world = world or jobs.World(members=names, master_port=spec.master_port)
        state, self._first_actions = membership.begin(names, policy, view.epoch)
        if not is_new:
            group = self._group
            epoch, members = view.epoch, tuple[Member, ...]()
            if group is not None and group.world == self.world.number:
                epoch, members = group.epoch, group.members
            begun = World(
                self.world.members, self.world.number, self.world.restarts, self.world.is_fixed
            )
            state = membership.take_over(names, policy, epoch, members, begun)
        job = Job(spec.job, spec.script, names, policy, wire=spec.wire)
        chaos = host.runtime.chaos(spec.chaos)
        self.lead = Lead(job, state, hands=self, chaos=chaos, on_note=self._noted)
        if not is_new:
            self._tell_of_take_over(view, before)
            gone = tuple(each.worker for each in places if each.node not in view.nodes)
            if self.world.is_fixed and gone:
                self.lead.handle(events.Away(gone, self._host.names.readable(view.reason)))

    def _tell_of_take_over(self, view: View, before: JobGroup | None) -> None:
        reason, me = self._host.names.readable(view.reason), self._host.names.called(self._host.me)
        self.lead.note(f"{reason}; {me} leads the job from now on")
        journal, now = self.lead.journal, time.monotonic()
        for member in () if before is None else before.members:
            if member.node not in view.nodes:
                journal.lost(member.worker, f"worker {member.worker} lost ({reason})", now)
        if self._group is not None:
            names = tuple(member.worker for member in self._group.members)
            journal.announced(self._group.epoch, names, ())

    @property
    def node_of(self) -> dict[str, str]:
        """The node of each worker."""
        return {each.worker: each.node for each in self.places}

    # The nodes.

    def objection(self, view: View) -> str:
        """Why this job can't be begun; empty if it can."""
        nodes = sorted({each.node for each in self.places})
        texts = [text for node in nodes for text in self._differences(node)]
        if self.spec.starter not in view.nodes:
            texts.append("the node it was started on is not in the cluster's view")
        return "not all nodes can run this script: " + "; ".join(texts) if texts else ""

    def _differences(self, node: str) -> list[str]:
        theirs = self._host.versions(node)
        if theirs is None:
            return [f"there is no link to {self._host.names.called(node)}"]
        return differences(self._host.names.called(node), self.spec.versions, theirs)

    def installed(self, view: View) -> None:
        """``view`` is the one to use, maybe again after a pause: what it says of the job's group,
        and of its nodes."""
        held, self._held = self._held or (), None
        for node, message in held:
            self.received(node, message)
        group = view.group(self.spec.job)
        if group is not None and (self._group is None or group.epoch > self._group.epoch):
            self._agreed(group, self._host.names.readable(view.reason))
        self._group = group or self._group
        lost = self._nodes - set(view.nodes)
        for node in sorted(lost):
            self._reported.discard(node)
            reason = f"node {self._host.names.called(node)} left the cluster's view"
            gone = tuple(each.worker for each in self.places if each.node == node)
            self._settled -= set(gone)
            known = {worker.name for worker in self.lead.state.workers}
            if self.has_begun:
                self.lead.handle(events.Away(tuple(w for w in gone if w in known), reason))
            elif gone:
                self.lead.note(reason)
        self._nodes = set(view.nodes)
        self._take_in_newcomers(view)
        for node in view.nodes:
            self.order(node)
        self._settle()

    def _take_in_newcomers(self, view: View) -> None:
        state = self.lead.state
        if not self.has_begun or state.num_finished or state.stopping:
            return
        fitting = []
        for node in view.nodes:
            if node in self.node_of.values() or not (texts := self._differences(node)):
                fitting.append(node)
            elif node not in self._unfit:
                self._unfit.add(node)
                self.lead.note(f"a node can't take part: {'; '.join(texts)}")
        self.places += place(self.spec, fitting, self.places)

    def order(self, node: str) -> None:
        """Tell ``node`` (again) what the job is."""
        self._host.send(node, jobs.Order(self.spec, self.places, self.world))

    # What the nodes say.

    def hold(self) -> None:
        """No majority can be reached: what workers say waits."""
        self._held = self._held or deque(maxlen=10_000)

    def received(self, node: str, message: jobs.FromNode) -> None:
        """``node`` said something about its workers."""
        if self._held is not None:
            self._held.append((node, message))
            return
        if isinstance(message, jobs.Reported):
            self._report(node, message)
            return
        event = message.event if isinstance(message, jobs.Happened) else message
        if isinstance(event, control.Said):
            self.lead.note(f"{self._host.names.label(node)}: {event.text}")
        elif self.node_of.get(event.worker) != node or not self._knows(event.worker):
            return
        elif isinstance(event, jobs.Output):
            self._output(event)
        else:
            self._happened(node, event)

    def _knows(self, worker: str) -> bool:
        return any(each.name == worker for each in self.lead.state.workers)

    def _happened(self, node: str, event: jobs.Event) -> None:
        worker = event.worker
        if isinstance(event, control.Ready):
            self._pids[worker] = event.pid
            self.lead.follow(self._host.ring())
            event = msgspec.structs.replace(event, node=node)
        if isinstance(event, jobs.Exited):
            if event.attempt < self.lead.state.worker(worker).attempt:
                return
            self._ended.add(worker)
            self._settled.discard(worker)
        self.lead.take(event)
        if self._holds_state(event) and worker not in self._settled:
            self._settled.add(worker)
            self._settle()

    def _holds_state(self, event: jobs.Event) -> bool:
        """Whether ``event`` shows that its worker holds the job's state."""
        group = self._group
        if group is None:
            return False
        if isinstance(event, control.Installed):
            # All begin with the same: who is in the first group holds what there is.
            return event.epoch == group.epoch == group.origin
        if isinstance(event, control.Progress):
            return event.step >= 0 and event.epoch >= self.lead.state.worker(event.worker).joined
        return False

    def _settle(self) -> None:
        """Put on record that all members hold the state by now, once they do."""
        group = self._group
        if group is None or not group.entering or self._announced or self._held is not None:
            return
        names = tuple(member.worker for member in group.members)
        if set(group.entering) <= self._settled:
            reason = f"all of job {self.spec.job} hold its state"
            self._host.handle(WantGroup(self.spec.job, group.members, names, reason))

    def _report(self, node: str, told: jobs.Reported) -> None:
        if told.error:
            reason = f"{self._host.names.called(node)} can't run the job: {told.error}"
            if self.has_begun:
                self.lead.note(reason)
            else:
                self.refuse(reason)
            return
        self._reported.add(node)
        mine = [each.worker for each in self.places if each.node == node]
        if not self.has_begun:
            if {each.node for each in self.places} <= self._reported:
                self.has_begun = True
                self._host.send(self.spec.starter, jobs.Submitted(self.spec.job))
                where = ", ".join(self._host.names.label(node) for node in self._order_of_nodes())
                count = len(self.places)
                self.lead.note(f"starting {count} worker{'s' if count > 1 else ''} on {where}")
                self.lead.begin(self._first_actions)
            return
        alive = {each.worker for each in told.workers if each.is_alive}
        for each in told.workers:
            if self.node_of.get(each.worker) == node and self._knows(each.worker):
                self.lead.handle(each)
        for name in mine:
            if not self._knows(name):
                self.lead.handle(events.Placed(name))
                continue
            state = self.lead.state
            worker = state.worker(name)
            if worker.phase is Phase.STOPPING and state.world.is_fixed and not state.stopping:
                if name in alive:  # its node may not have heard of it
                    self.signal((name,), signal.SIGTERM if state.world.broken else SIGKILL)
                else:
                    self.lead.take(jobs.Exited(name, -SIGKILL))  # with its agent, another now
                continue
            no_process = (Phase.GONE, Phase.WAITING, Phase.SPARE)
            if name in alive or worker.phase in no_process:
                continue
            if worker.phase is Phase.STARTING:
                self.start(name, worker.attempt)
            elif worker.alive and worker.phase is not Phase.STOPPING:
                self._ended.add(name)
                self.lead.handle(events.Away((name,), f"worker {name} did not outlive its agent"))
                self.lead.handle(events.Placed(name))

    def _order_of_nodes(self) -> list[str]:
        return list(dict.fromkeys(each.node for each in self.places))

    def refuse(self, reason: str) -> None:
        """The job can't be begun."""
        self._host.send(self.spec.starter, jobs.Submitted(self.spec.job, reason[:4000]))
        self.lead.over.set()

    def _output(self, line: jobs.Output) -> None:
        """Pass a worker's line on to the starter, or to the log if it is gone."""
        if line.stream == "stderr":
            words = self.last_words.setdefault(line.worker, deque(maxlen=_LAST_WORDS))
            words.append(line.text)
        label = f"{line.worker} {self.node(line.worker)}"[:256]
        if self.spec.starter not in self._nodes:
            self._host.log(self.spec.job, f"[{label}] {line.text}")
            return
        if self._host.unsent(self.spec.starter) > _MAX_UNSENT:
            self._num_dropped += 1
            return
        if self._num_dropped:
            text = f"{self._num_dropped} lines of output were left out: they were not read in time"
            self._num_dropped = 0
            self._noted(text)
        self._host.send(self.spec.starter, jobs.Shown(line.job, label, line.stream, line.text))

    def interrupted(self, message: jobs.InterruptJob) -> None:
        """The operator wants the end."""
        while self.num_interrupts < message.times:
            self.num_interrupts += 1
            if not self.has_begun:
                self.refuse("interrupted before it began")
                return
            self.lead.handle(events.Interrupted(message.number))

    # Groups.

    def _agreed(self, group: JobGroup, reason: str) -> None:
        names = tuple(member.worker for member in group.members)
        journal, before = self.lead.journal, self._announced
        self._group = group
        for position in reversed(range(len(before))):
            announced = before[position]
            if announced.members == group.members:
                self._announced = before[position + 1 :]
                journal.announced(group.epoch, names, announced.joined)
                self._ended -= set(announced.joined)
                self.lead.handle(events.Agreed(group.epoch, names, announced.epoch))
                return
        self._announced = []
        for announced in before:
            self.lead.handle(events.NotAgreed(announced.epoch, group.epoch, reason))
        journal.announced(group.epoch, names, ())
        self.lead.handle(events.Agreed(group.epoch, names, 0, reason))

    def group_refused(self, floor: int, reason: str) -> None:
        """The nodes don't agree on what was announced last."""
        if self._announced:
            announced = self._announced.pop()
            self.lead.handle(
                events.NotAgreed(announced.epoch, floor, self._host.names.readable(reason))
            )

    # What was decided (Hands).

    def begin_world(self, world: events.BeginWorld) -> None:
        port = self.world.master_port
        if world.number != self.world.number:
            port = self._host.runtime.free_port()  # no store of the world before listens there
        restarts = self.lead.state.world.restarts
        self.world = jobs.World(world.number, world.members, restarts, world.is_fixed, port)
        for node in sorted(self._nodes):
            self.order(node)

    def agree(self, announced: events.Announce) -> None:
        self._announced.append(announced)
        if announced.world is not None:
            self._want(announced, tuple(each.worker for each in announced.members), fresh=True)
            return
        ended = set(self._ended)
        for member in () if self._group is None else self._group.members:
            if self._host.is_dead(member.node):
                ended.add(member.worker)
        kept, fresh = holders(
            self._group,
            announced.members,
            joined=announced.joined,
            settled=self._settled,
            ended=ended,
        )
        self._want(announced, kept, fresh=fresh)

    def _want(self, announced: events.Announce, kept: tuple[str, ...], *, fresh: bool) -> None:
        """Have the group agreed on. A fixed world's members hold what they need, and are not to
        wait for those of the world before, whose state is in the script's checkpoint."""
        self._host.handle(
            WantGroup(
                self.spec.job,
                announced.members,
                kept,
                announced.reason,
                fresh,
                renew=True,
                paths=self._host.paths({member.node for member in announced.members}),
                world=announced.world or 0,
            )
        )

    def start(self, worker: str, attempt: int) -> None:
        node = self.node_of[worker]
        self._host.send(node, jobs.StartWorker(self.spec.job, worker, attempt))

    def tell(self, workers: Sequence[str], message: control.FromAgent) -> None:
        for node, names in self._by_node(workers).items():
            self._host.send(node, jobs.TellWorkers(self.spec.job, names, message))

    def stop(self, workers: Sequence[str], reason: str) -> None:
        for node, names in self._by_node(workers).items():
            self._host.send(node, jobs.StopWorkers(self.spec.job, names, control.clip(reason)))

    def signal(self, workers: Sequence[str], number: int) -> None:
        for node, names in self._by_node(workers).items():
            self._host.send(node, jobs.SignalWorkers(self.spec.job, names, number))

    def pid(self, worker: str) -> int:
        return self._pids.get(worker, 0)

    def node(self, worker: str) -> str:
        node = self.node_of.get(worker)
        return "" if node is None else self._host.names.label(node)

    def _by_node(self, workers: Sequence[str]) -> dict[str, tuple[str, ...]]:
        nodes = self.node_of
        found: dict[str, tuple[str, ...]] = {}
        for worker in workers:
            found[nodes[worker]] = (*found.get(nodes[worker], ()), worker)
        return found

    # For people.

    def status(self) -> control.StatusReply:
        """The job as it is now."""
        return self.lead.status(node=self._host.me, pid=0, started=self.spec.started)

    def _noted(self, text: str) -> None:
        if self.spec.starter in self._nodes:
            self._host.send(self.spec.starter, jobs.JobNote(self.spec.job, control.clip(text)))
        else:
            self._host.log(self.spec.job, f"potluck: {text}")
        if self.spec.starter != self._host.me:
            self._host.note(f"job {self.spec.job}: {text}"[:4096])

    def summary(self) -> jobs.JobEnded:
        """How it ended."""
        code, text = self._host.runtime.summary(self.spec, self.lead, self.last_words)
        return jobs.JobEnded(self.spec.job, code, text)


def accept(host: JobHost, spec: jobs.JobSpec, view: View) -> JobCoordinator:
    """The coordinator of a new job; ConfigurationError if it can't be run on this cluster."""
    places = place(spec, view.nodes, ())
    coordinator = JobCoordinator(host, spec, places, view, is_new=True)
    objection = coordinator.objection(view)
    if objection:
        raise ConfigurationError(objection)
    return coordinator
