"""``JobController``: leads one job, on the node that leads the cluster.

Reports about the job's workers, from all nodes, are events for ``groups.membership``. The actions
that it decides are carried out here: orders to the nodes of the workers, and groups that the nodes
are to agree on (``group_agreement.py``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from potluck._core.background import Alarm
from potluck._core.cluster.code_store.imports import describe_missing
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.chaos import parse_chaos
from potluck._core.cluster.jobs.environment import free_port
from potluck._core.cluster.jobs.group_agreement import GroupAgreement
from potluck._core.cluster.jobs.groups import events, membership
from potluck._core.cluster.jobs.groups.roster import JobPolicy, Phase, State
from potluck._core.cluster.jobs.journal import Journal, first_line, lost_text
from potluck._core.cluster.jobs.orders import Endings, Faults, Orders
from potluck._core.cluster.jobs.output_relay import OutputRelay, RollCall
from potluck._core.cluster.jobs.permissions import DeferredMessages
from potluck._core.cluster.jobs.placement import Placement, keepers_of, rank_in_words
from potluck._core.cluster.jobs.summary import Summary, missing_workers, status_of, summarize
from potluck._core.system import SIGKILL
from potluck._core.wire import jobs, worker_link
from potluck._core.wire.nodes import JobGroup, View
from potluck._core.wire.peers import Written
from potluck._core.wire.versions import JOBS_SINCE

_log = logging.getLogger(__name__)

_A_LOOK = 0
"""The number of probes that belong to no inquiry of ``membership``, which counts from 1."""
_LOOK_AGAIN_S = 1.0
_HOLD_AGAIN_S = 1.0
_LEAST_HOLD_S = 10.0
"""Several times as long as between two messages of a worker at a breakpoint."""


class JobController:
    """The leader's side of one job. ``over`` is set when the job has ended; ``crash`` is then the
    error of potluck's own that ended it, if there was one. ``state`` is that of the job's
    membership."""

    def __init__(
        self,
        agent: AgentParts,
        spec: jobs.JobSpec,
        places: jobs.Places,
        view: View,
        *,
        is_new: bool,
        before: JobGroup | None = None,
        world: jobs.WorldSpec | None = None,
        last_status: tuple[worker_link.JobState, float] | None = None,
        busy: Callable[[str, jobs.JobSpec], str] = lambda node, spec: "",
    ) -> None:
        """``busy(node, spec)``: why the job gets no further workers on a node, which other jobs
        have; empty if it may.

        A new job, of which nothing runs; or one that another leader had begun, whose group was
        ``before`` in the view before this one, and whose workers were started for ``world``. That
        leader sent ``last_status``, received at this time."""
        names = tuple(each.worker for each in places)
        self.spec = spec
        self.placement = Placement(
            spec,
            places,
            agent.names,
            agent.links.introduction,
            lambda node: agent.offers.objection(node, spec.starter) or busy(node, spec),
        )
        self.since = time.monotonic()
        self.refusal = ""
        """Why the job can't be begun; empty if it can."""
        self._orders = Orders(spec.job, self.placement, agent.links)
        self._faults = Faults(parse_chaos(spec.chaos), self._orders, self.note)
        self._withdrawn: set[str] = set()
        self._held_at = -math.inf
        """The nodes with workers that their owner took out, until their old workers have exited and
        the owner has given them again."""
        self.world = world or jobs.WorldSpec(members=names, master_port=spec.master_port)
        self.has_begun = not is_new
        self.num_interrupts = 0
        self.over = asyncio.Event()
        self.crash: BaseException | None = None
        self._agent = agent
        self._nodes = set(view.nodes)
        self._reported: set[str] = set()
        self._deferred: DeferredMessages | None = None
        self._looked_at = float("-inf")
        self._groups = GroupAgreement(spec.job, view.group(spec.job))
        self._journal = Journal(names, time.monotonic())
        self._output = OutputRelay(agent, spec)
        self._endings = Endings(self._orders, lambda worker: self.state.worker(worker), self.note)
        self._roll_call = RollCall(self._awaited, self.note, on_broken=self._broke)
        self.state: State
        self._began_at = view.epoch
        self._events: deque[events.Event] = deque()
        self._is_handling = False
        self._is_closed = False
        self._alarm = Alarm(lambda: self.handle(events.Tick()))
        self._written: dict[str, tuple[int, int]] = {}
        """By node: how many files its workers have left there, and their bytes."""
        self._first_actions: tuple[events.Action, ...] = ()
        policy, group = JobPolicy.of(spec), self._groups.group
        if is_new:
            self.state, self._first_actions = membership.begin(names, policy, view.epoch)
        else:
            self.state = membership.take_over(names, policy, view.epoch, group, self.world)
            if last_status is not None:
                self._journal.take_over(*last_status)
                self.since = self._journal.began
            self._note_take_over(view, before)
            self.offers_changed()

    def _note_take_over(self, view: View, before: JobGroup | None) -> None:
        names = self._agent.names
        reason, me = names.readable(view.reason), names.called(self._agent.me)
        self.note(f"{reason}; {me} leads the job from now on")
        journal, now = self._journal, time.monotonic()
        group = self._groups.group
        members = () if group is None else tuple(member.worker for member in group.members)
        for member in () if before is None else before.members:
            if member.node not in view.nodes and member.worker not in members:
                journal.lost(member.worker, f"worker {member.worker} lost ({reason})", now)
        if group is not None:
            journal.announced(group.epoch, members, ())
        # The view keeps a group whole of which no worker that is left is known to hold the state.
        places = self.placement.places
        gone = tuple(each.worker for each in places if each.node not in view.nodes)
        if gone:
            self.handle(events.Away(gone, reason))

    def close(self) -> None:
        """Decide nothing any more; end all timers and tasks."""
        self._is_closed = True
        self._alarm.set(None)
        self._roll_call.close()
        self._endings.close()
        self._output.close()

    def handle(self, event: events.Event) -> None:
        """Have membership decide about ``event``, then about the events that its actions cause."""
        self._events.append(event)
        if self._is_handling or self._is_closed or self.crash is not None:
            return
        self._is_handling = True
        try:
            while self._events:
                event = self._events.popleft()
                self.state, actions = membership.handle(self.state, event, time.monotonic())
                self._act(actions)
        except Exception as error:  # not the caller's fault
            self._broke(error)
        finally:
            self._is_handling = False
        self._alarm.set(None if self._is_closed else self.state.next_wakeup())
        if self.state.over:
            self.over.set()

    def _broke(self, error: BaseException) -> None:
        """End the job by ``error``, which is raised where the end is waited for."""
        self.crash = error
        self.over.set()

    # The nodes.

    def refuse(self, reason: str) -> None:
        """The job can't be begun."""
        self.refusal = reason
        self._agent.links.send(self.spec.starter, jobs.Submitted(self.spec.job, reason[:4000]))
        self.over.set()

    def order(self, node: str) -> None:
        """Send ``node`` the job and its places, maybe not for the first time."""
        self._roll_call.begin()
        order = jobs.Order(self.spec, self.placement.places, self.world, self.num_interrupts)
        self._agent.links.send(node, order)

    def offers_changed(self) -> None:
        """A node takes part in this job from now on, or not any more, as its owner wishes."""
        if not self.has_begun:
            return
        before = self.placement.places
        for node in self.placement.nodes:
            refusal = self._refusal(node)
            if refusal and node not in self._withdrawn:
                self._withdraw(node, refusal)
            elif not refusal and node in self._withdrawn:
                self.order(node)  # which it answers by a report
        self._take_in()
        if self.placement.places != before:
            for node in sorted(self._nodes):
                self.order(node)

    def _refusal(self, node: str) -> str:
        """The reason why the owner of ``node`` takes it out of the job; empty if it may run it."""
        return self._agent.offers.refusal(node, self.spec.starter)

    def _withdraw(self, node: str, refusal: str) -> None:
        """The owner takes ``node`` out of the job, and the node ends its workers by itself; or it
        lacks something, and starts none."""
        self._withdrawn.add(node)
        gone, reason = self.placement.at(node), f"{self._agent.names.called(node)}: {refusal}"
        self._groups.away(gone)
        self.note(reason)
        self.handle(events.Away(tuple(filter(self._knows, gone)), reason))

    def _take_in(self) -> None:
        if not (self.state.num_finished or self.state.stopping):
            self.placement.take_in(sorted(self._nodes), self.note)

    def hold(self) -> None:
        """No majority can be reached: keep the nodes' messages until ``installed``."""
        self._deferred = self._deferred or DeferredMessages()

    def installed(self, view: View) -> None:
        """``view`` is used from now on, or again after a pause: take over the job's group and nodes
        from it."""
        deferred, self._deferred = self._deferred or DeferredMessages(), None
        for node, message in deferred.take():
            assert isinstance(message, jobs.FromNode)
            self.received(node, message)
        group = view.group(self.spec.job)
        if group is not None:
            self._group_installed(group, self._agent.names.readable(view.reason))
        left = sorted(self._nodes - set(view.nodes))
        self._nodes = set(view.nodes)
        for node in left:
            self._reported.discard(node)
            reason = f"node {self._agent.names.called(node)} left the cluster's view"
            gone = self.placement.at(node)
            self._groups.away(gone)
            if self.has_begun:
                self.handle(events.Away(tuple(filter(self._knows, gone)), reason))
            elif gone:
                self.note(reason)
                self._leave_out(node)
        self._output.nodes_changed()
        self.copy_output()
        if self.has_begun:
            self._take_in()
        for node in view.nodes:
            self.order(node)
        self._want_all_hold()

    def copy_output(self) -> None:
        """A second node keeps the log: the starter, which gets all that it has not written itself;
        else another of those that keep the job's history, which gets what no other node has."""
        view, me, starter = self._agent.plane.view, self._agent.me, self.spec.starter
        keepers = () if view is None else keepers_of(self.spec, self.placement.places, view)
        others = [node for node in keepers if node != me]
        target = starter if starter in others else next(iter(others), "")

        introduction = self._agent.links.introduction(target) if target else None
        is_old = introduction is not None and introduction.versions.protocol < JOBS_SINCE

        def is_wanted(source: str) -> bool:
            node = self.placement.node_of(source)
            if is_old:  # it keeps no log of its own workers
                return True
            return node != target if target == starter else node in (None, me)

        self._output.copies_to(target, is_wanted)

    def linked(self, node: str) -> None:
        """There is a new link to ``node``: messages over the link before it may be lost."""
        self._output.linked(node)
        self.order(node)

    def _group_installed(self, group: JobGroup, reason: str) -> None:
        decided, joined = self._groups.installed(group, reason)
        for event in decided:
            if isinstance(event, events.Agreed):
                self._journal.announced(event.epoch, event.members, joined)
            self.handle(event)

    def group_refused(self, floor: int, reason: str) -> None:
        """The nodes don't agree on what was announced last."""
        event = self._groups.refused(floor, self._agent.names.readable(reason))
        if event is not None:
            self.handle(event)

    def _want_all_hold(self) -> None:
        """Ask for a view that records that all members hold the job's state, once they do."""
        want = None if self._deferred is not None else self._groups.want_all_hold()
        if want is not None:
            self._agent.plane.handle(want)

    # Messages of the nodes.

    def received(self, node: str, message: jobs.FromNode) -> None:
        """``node`` sent ``message`` about its workers."""
        if self._deferred is not None:
            self._deferred.keep_newest(node, message)
            return
        if isinstance(message, jobs.NodeReport):
            self._report(node, message)
            return
        event = message.event if isinstance(message, jobs.WorkerEvent) else message
        if isinstance(event, worker_link.WorkerNote):
            self.note(f"{self.placement.prefix(event.worker, node)}{event.text}")
        elif self.placement.node_of(event.worker) != node or not self._knows(event.worker):
            return
        elif isinstance(event, jobs.Output):
            if event.stream not in ("stdout", "stderr"):
                return  # each stream of a log takes memory here
            if event.stream == "stderr" and event.end == "\n":
                self._journal.wrote(event.worker, event.text)
            self._output.line(event, self._label(event.worker))
        else:
            self._happened(event, node)

    def _label(self, worker: str) -> str:
        group = self.state.newest_group
        rank = rank_in_words(worker, () if group is None else group.members, self.world)
        return f"{rank} {self.placement.label(worker)}".strip()

    def _knows(self, worker: str) -> bool:
        return any(each.name == worker for each in self.state.workers)

    def _report(self, node: str, report: jobs.NodeReport) -> None:
        if node in self._withdrawn:
            # Until its old workers have exited, or their reports would pass for those of new ones.
            is_busy = report.error or any(each.is_alive for each in report.workers)
            if is_busy or self._refusal(node):
                return
            self._withdrawn.discard(node)
        self.placement.lacks(node, report.error if report.lacks else "")
        if report.error:
            if node not in self.placement.nodes:
                return  # it may lead the job, but runs no workers of it
            if self.has_begun:
                self._withdraw(node, report.error)
                return
            if report.lacks:
                self._leave_out(node)
                return
            self.refuse(f"{self._agent.names.called(node)} can't run the job: {report.error}")
            return
        self._reported.add(node)
        if not self.has_begun:
            if set(self.placement.nodes) <= self._reported:
                self._begin()
            return
        for each in report.workers:
            if self.placement.node_of(each.worker) == node and self._knows(each.worker):
                self.handle(each)
        alive = {each.worker for each in report.workers if each.is_alive}
        for name in self.placement.at(node):
            self._compare(name, name in alive)

    def _leave_out(self, node: str) -> None:
        """``node``, on which nothing runs yet, lacks something or has left: begin without it."""
        self.placement.leave_out(node)
        view = self._agent.plane.view
        objection = "" if view is None else self.placement.objection(view)
        if objection:
            self.refuse(objection)
            return
        names = tuple(each.worker for each in self.placement.places)
        self.world = msgspec.structs.replace(self.world, members=names)
        self._journal = Journal(names, time.monotonic())
        policy = JobPolicy.of(self.spec)
        self.state, self._first_actions = membership.begin(names, policy, self._began_at)
        for each in sorted(self._nodes):
            self.order(each)
        if set(self.placement.nodes) <= self._reported:
            self._begin()

    def _begin(self) -> None:
        self.has_begun = True
        self._agent.links.send(self.spec.starter, jobs.Submitted(self.spec.job))
        if not self.spec.is_local:
            where = ", ".join(map(self._agent.names.label, self.placement.nodes))
            count = len(self.placement.places)
            self.note(f"starting {count} worker{'s' if count > 1 else ''} on {where}")
            self.placement.note_unlike(self.placement.nodes, self.note)
            self.placement.note_unfit(sorted(self._nodes), self.note)
        self._act(self._first_actions)

    def _compare(self, name: str, is_alive: bool) -> None:
        """The node of worker ``name`` reported whether its process runs. If that differs from the
        state here, the node has not got the newest order, or has lost the process."""
        if not self._knows(name):
            self.handle(events.Placed(name))
            return
        state, worker = self.state, self.state.worker(name)
        if worker.phase is Phase.STOPPING and not is_alive:
            # It ended with its agent, which is another now.
            self._journal.facts_of(name).exit_code = -SIGKILL
            self.handle(jobs.Exited(name, -SIGKILL))
        elif worker.phase is Phase.STOPPING and state.world.is_fixed and not state.stopping:
            # Its node may not have heard of it.
            self._orders.signal((name,), signal.SIGTERM if state.world.broken else SIGKILL)
        elif is_alive or worker.phase in (Phase.GONE, Phase.WAITING, Phase.SPARE):
            pass
        elif worker.phase is Phase.STARTING:
            self._orders.start(name, worker.attempt)
        elif worker.alive and worker.phase is not Phase.STOPPING:
            self._groups.ended(name)
            self.handle(events.Away((name,), f"worker {name} did not outlive its agent"))
            self.handle(events.Placed(name))

    # Events of the workers.

    def _happened(self, event: jobs.Event, node: str) -> None:
        now, worker = time.monotonic(), self.state.worker(event.worker)
        facts = self._journal.facts_of(event.worker)
        if node in self._withdrawn and not isinstance(event, jobs.Exited | jobs.OutputEnded):
            return
        match event:
            case jobs.Started(_, attempt, pid):
                if attempt == worker.attempt:
                    facts.pid = pid
            case jobs.OutputEnded(name, attempt, num_files, num_bytes):
                self._output.ended(name, attempt)
                self._written[node] = (num_files, num_bytes)
            case worker_link.Waiting(_, epoch):
                self._look_at_members(epoch)
            case worker_link.ChaosDue():
                self._faults.due(event, self.state)
            case worker_link.WorkerProgress():
                for note in self._journal.progress(event, now):
                    self._output.note(note.text)
            case worker_link.Ready(pid=pid):
                facts.pid = pid
                self._follow_ring()
                self.handle(msgspec.structs.replace(event, node=node))
                self._roll_call.begin()
            case worker_link.Entered(name, epoch):
                if self._journal.entered(name, epoch, now) and self.state.world.is_fixed:
                    self._output.note(self._journal.world_formed(now))
                self.handle(event)
            case worker_link.Lost():
                self._journal.reported(event.epoch, event.step, now)
                self.handle(event)
            case jobs.Exited(name, code, attempt):
                self._output.exited(name, attempt)
                if attempt < worker.attempt:
                    return
                self._groups.ended(name)
                facts.exit_code = code
                if node in self._withdrawn:
                    self.offers_changed()  # its owner may have given it again already
                else:
                    self.handle(event)
            case jobs.Stalled(name, reason):
                label = self.placement.label(name)
                where = f" on {label}" if label else ""
                text = f"worker {name}{where} stands still: {reason}"
                self.handle(jobs.Stalled(name, text))
            case worker_link.WorkerNote():
                pass  # passed on as it came
            case worker_link.Halted(name, why):
                seconds = max(self.spec.peer_timeout_s, _LEAST_HOLD_S)
                seconds = min(seconds, worker_link.MAX_HOLD_S)
                hold = worker_link.Hold(f"worker {name} {why}", seconds)
                if (now := time.monotonic()) - self._held_at >= _HOLD_AGAIN_S:
                    self._held_at = now
                    self._orders.send([each.name for each in self.state.workers], hold)
            case _:
                self.handle(event)
        if self._groups.take(event, self.state.worker(event.worker).joined):
            self._want_all_hold()

    def _follow_ring(self) -> None:
        """From the next group on, ranks follow the ring of nodes that avoids slow links."""
        view = self._agent.plane.view
        ring = self._agent.surveyor.ring(() if view is None else view.nodes)
        self.state = replace(self.state, ring=ring)

    def _look_at_members(self, epoch: int) -> None:
        """A member waits for long: have the agents of all members probe them."""
        group, now = self.state.group(epoch), time.monotonic()
        if group is not None and now - self._looked_at >= _LOOK_AGAIN_S:
            self._looked_at = now
            self._orders.send(group.members, worker_link.Probe(_A_LOOK))

    def check_time(self) -> None:
        """End the job if its time is over."""
        limit = self.spec.seconds
        if limit and self.num_interrupts == 0 and time.monotonic() - self.since > limit:
            self.note(f"it has taken {limit:g} s, as long as it may by its --time: it is ended")
            self.interrupted(jobs.InterruptJob(self.spec.job, signal.SIGTERM, 1))

    def interrupted(self, message: jobs.InterruptJob) -> None:
        """The operator wants the job to end. All nodes know: one of them may lead it next."""
        if self.num_interrupts >= message.times:
            return
        while self.num_interrupts < message.times:
            self.num_interrupts += 1
            if not self.has_begun:
                self.refuse("interrupted before it began")
                return
            self.handle(events.Interrupted(message.number))
        for node in sorted(self._nodes):
            self.order(node)

    # Actions that were decided.

    def _act(self, actions: Sequence[events.Action]) -> None:
        for action in actions:
            _log.info("%s: %s", type(action).__name__, action.reason)
            match action:
                case events.Announce():
                    self._announce(action)
                case events.EndGroup():
                    self._end_group(action)
                case events.SendProbe(probe, to):
                    self._orders.send(to, worker_link.Probe(probe))
                case events.BeginWorld():
                    self._begin_world(action)
                case events.EndWorld(workers, lost, cause, reason):
                    for worker in lost:
                        self._journal.lost(worker, lost_text(worker, cause), time.monotonic())
                    self.note(first_line(reason))
                    self._endings.terminate(workers)
                case events.Start(worker, attempt, reason, alone):
                    if attempt and alone:
                        self.note(f"starting worker {worker} again ({reason})")
                    self._journal.started(worker)
                    self._orders.start(worker, attempt)
                case events.Kill(workers, reason):
                    self.note(reason)
                    self._orders.signal(workers, SIGKILL)
                case events.EndWorkers(workers, number, reason):
                    self.note(f"stopping worker {', '.join(workers)}: {first_line(reason)}")
                    if number:
                        self._endings.interrupt(workers, number)
                    else:
                        self._endings.stop(workers, reason)
                case events.Note(reason):
                    self.note(reason)

    def _announce(self, action: events.Announce) -> None:
        """Have the nodes agree on the group; it counts once a view that has it is installed."""
        plane, before = self._agent.plane, self._groups.group
        members = () if before is None else before.members
        dead = {member.node for member in members if plane.is_dead(member.node)}
        paths = self._agent.surveyor.paths({member.node for member in action.members})
        plane.handle(self._groups.announced(action, dead, paths))

    def _begin_world(self, action: events.BeginWorld) -> None:
        port = self.world.master_port
        if action.number != self.world.number:
            port = free_port()  # no store of the world before listens there
        restarts = self.state.world.restarts
        self.world = jobs.WorldSpec(action.number, action.members, restarts, action.is_fixed, port)
        for node in sorted(self._nodes):
            self.order(node)

    def _end_group(self, action: events.EndGroup) -> None:
        if not self.state.stopping:
            why = first_line(action.reason).split(";")[0]
            text = f"epoch {action.epoch} ended ({why})"
            if action.worker:
                text = lost_text(action.worker, why)
            self._journal.lost(action.worker, text, time.monotonic())
            self.note(action.reason)
        cause = worker_link.clip(action.reason)
        over = worker_link.GroupOver(action.epoch, action.worker, action.certain, cause)
        self._orders.send(action.to, over)

    # For people.

    def _awaited(self) -> str:
        """What the job waits for until its first group has formed, in words; empty if nothing."""
        if self.has_begun:
            return missing_workers(self.state, self._journal, self.placement.label)
        silent = [node for node in self.placement.nodes if node not in self._reported]
        names = ", ".join(map(self._agent.names.called, silent))
        return f"waiting for {names} to get ready for the job" if silent else ""

    def note(self, text: str) -> None:
        """Show a line to people, and keep it for the summary."""
        self._journal.note(text, time.monotonic())
        self._output.note(text)

    def status(self) -> worker_link.JobState:
        """The job as it is now."""
        return status_of(
            self.spec,
            self.state,
            self._journal,
            node=self._agent.me,
            called=self.placement.label,
            now=time.monotonic(),
        )

    async def all_read(self) -> None:
        """Return when the output of all ended workers was passed on; see ``OutputRelay``."""
        unread = await self._output.all_read(
            lambda worker: self.placement.node_of(worker) in self._nodes
        )
        if unread:
            names = ", ".join(f"{worker} ({self.placement.label(worker)})" for worker in unread)
            self.note(f"the last output of worker {names} did not arrive in time")
        await self._output.all_sent()

    def summary(self) -> Summary:
        """The job, now that it is over."""
        return summarize(
            job=self.spec.job,
            script=self.spec.script,
            state=self.state,
            journal=self._journal,
            unfired=self._faults.unfired,
            missing=self._missing,
            called=self.placement.label,
            written=() if self.spec.keeps_files else self._all_written(),
            now=time.monotonic(),
        )

    def _missing(self, worker: str, module: str) -> str:
        """Why an import of ``module`` failed on the machine of ``worker``."""
        node = self.placement.node_of(worker)
        introduction = None if node is None else self._agent.links.introduction(node)
        python = "" if introduction is None else introduction.versions.executable
        machine = self.placement.label(worker)
        if self.spec.plan is not None and module not in dict(self.spec.own):
            return (
                f"the script needs the Python package {module!r}, which is not in its environment: "
                "add it to the file that says what the script needs"
            )
        return describe_missing(module, self.spec.needs, self.spec.own, machine, python)

    def _all_written(self) -> list[Written]:
        found = []
        for node in self.placement.nodes:
            name = self._agent.names.label(node)
            if node not in self._nodes:
                found.append(Written(node, name, None, None))
            elif (count := self._written.get(node, (0, 0)))[0]:
                found.append(Written(node, name, *count))
        return found
