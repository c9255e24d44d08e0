"""Who is in, who is out, and why: the pure core of membership.

``handle(state, event, now) -> (state, actions)`` sees no socket, process, clock or disk. ``now``
is any monotonic clock in seconds. Rules:

- The epoch only rises. The first view waits for all expected workers.
- A view's members are in order of seniority (the view they joined in, then their name), so
  rank 0 is the leader; where links were measured the others follow the ring that avoids slow ones.
- An exit is certain death: at once a view of the others. Silence is not: a report of it starts an
  inquiry. Members that do not answer a probe are evicted; if all answer, those who are blamed and
  are not blocked themselves (in a ring, everybody blames a neighbour); if nobody is to blame, the
  same members get a new epoch.
- A newcomer enters by a new view once all members are in the present one. Members in a working
  group go over to it between two steps; only a group with a lost member is ended under them.
- Where nodes share a job, an announced group counts once they agreed on it (``Agreed``), and they
  may go on without the workers of a lost node; those are away until their node is back.
- Killed by a signal: started again, up to ``max_restarts`` times; then the others go on alone. An
  exit with a code above 0, or code that raised: the job fails. After the first member has
  finished nobody is let in or started again.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, assert_never

from potluck.cluster.groups.events import (
    Action,
    Agreed,
    Announce,
    Away,
    Disconnected,
    EndGroup,
    Event,
    Exited,
    Failed,
    Finished,
    Installed,
    Interrupted,
    Kill,
    Log,
    Lost,
    NotAgreed,
    Placed,
    ProbeReply,
    Ready,
    SendProbe,
    Start,
    StopWorkers,
    Tick,
)
from potluck.cluster.groups.roster import (
    EXPECTED,
    Failure,
    Inquiry,
    LiveGroup,
    Phase,
    Policy,
    Report,
    State,
    Worker,
    name_exit,
)
from potluck.cluster.topology.graph import in_ring
from potluck.types import Member


def begin(names: Iterable[str], policy: Policy, epoch: int = 0) -> tuple[State, tuple[Action, ...]]:
    """A new job of workers ``names``; ``epoch`` is the highest one ever used for it."""
    state = State(policy, tuple(Worker(name) for name in names), epoch=epoch)
    return state, tuple(Start(worker.name, 0, "the job begins") for worker in state.workers)


def take_over(names: Iterable[str], policy: Policy, epoch: int, members: Iterable[Member]) -> State:
    """A job whose leader is gone, as the next one finds it: the group of ``epoch`` in the nodes'
    view, in rank order. All else its agents tell again: who is ready, installed, or has ended."""
    group = tuple(members)
    known = {member.worker: member for member in group}
    joined = {member.worker: rank - len(group) for rank, member in enumerate(group)}
    workers = tuple(
        Worker(name, Phase.MEMBER, known[name], joined=joined[name])
        if name in known
        else Worker(name, Phase.AWAY)
        for name in names
    )
    live = LiveGroup(epoch, tuple(member.worker for member in group))
    return State(policy, workers, epoch=epoch, groups=(live,) if group else ())


def handle(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The state after ``event`` and what is to be done, in this order. Never raises for an event
    that comes late, twice or from a worker that is out."""
    turn = _Turn(state, now)
    turn.take(event)
    turn.settle()
    return turn.state, tuple(turn.actions)


class _Turn:
    """One call of ``handle``: the state so far and the actions so far."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def take(self, event: Event) -> None:
        match event:
            case Ready():
                self.ready(event)
            case Installed(name, epoch):
                self.update(name, installed=max(epoch, self.state.worker(name).installed))
            case Lost():
                self.lost(event)
            case ProbeReply():
                self.probe_reply(event)
            case Finished(name):
                self.finished(self.state.worker(name))
            case Failed(name, text, secondary):
                if self.state.worker(name).alive:
                    self.update(name, failed=True)
                    self.fail(Failure(name, text, secondary=secondary))
            case Disconnected(name):
                self.disconnected(self.state.worker(name))
            case Exited(name, code):
                self.exited(self.state.worker(name), code)
            case Interrupted(number):
                self.interrupted(number)
            case Agreed():
                self.agreed(event)
            case NotAgreed():
                self.not_agreed(event)
            case Away(names, reason):
                self.away(names, reason)
            case Placed(name):
                self.placed(name)
            case Tick():
                pass
            case _:
                assert_never(event)

    # What is told.

    def ready(self, event: Ready) -> None:
        worker = self.state.worker(event.worker)
        if worker.phase in (Phase.STARTING, Phase.READY, Phase.EVICTED, Phase.AWAY):
            self.update(worker.name, phase=Phase.READY, member=event.member)
        elif worker.phase is Phase.MEMBER and event.after_epoch >= self.state.epoch:
            self.lost(Lost(worker.name, event.after_epoch, certain=True, cause="asked for a view"))

    def lost(self, event: Lost) -> None:
        worker = self.state.worker(event.worker)
        if worker.member is not None and worker.phase in (Phase.EVICTED, Phase.AWAY):
            self.update(worker.name, phase=Phase.READY)
        group = self.state.group(event.epoch)
        if worker.phase is not Phase.MEMBER or group is None:
            return
        blamed = group.members[event.rank] if 0 <= event.rank < len(group.members) else None
        if blamed is not None and self.state.worker(blamed).phase is not Phase.MEMBER:
            self.end_groups({event.epoch}, f"worker {blamed} has left")
            return
        inquiry = self.state.inquiry or self.open_inquiry(event)
        report = Report(worker.name, event.epoch, blamed, event.certain)
        self.change(
            inquiry=replace(
                inquiry,
                waiting=inquiry.waiting - {worker.name},
                reports=(*inquiry.reports, report),
            )
        )

    def open_inquiry(self, event: Lost) -> Inquiry:
        probe = self.state.num_probes + 1
        names = [worker.name for worker in self.state.having(Phase.MEMBER)]
        others = tuple(name for name in names if name != event.worker)
        reason = f"worker {event.worker} can't go on in epoch {event.epoch}: {event.cause}"
        self.change(num_probes=probe)
        self.actions.append(SendProbe(probe, others, reason))
        deadline = self.now + self.state.policy.probe_timeout_s
        return Inquiry(probe, deadline, frozenset(names), ())

    def probe_reply(self, event: ProbeReply) -> None:
        inquiry = self.state.inquiry
        if inquiry is not None and inquiry.probe == event.probe:
            blocked = inquiry.blocked | {event.worker} if event.blocked else inquiry.blocked
            waiting = inquiry.waiting - {event.worker}
            self.change(inquiry=replace(inquiry, waiting=waiting, blocked=blocked))

    def finished(self, worker: Worker) -> None:
        if worker.alive and worker.phase is not Phase.STOPPING:
            self.update(worker.name, phase=Phase.FINISHED, finished=worker.joined > 0)

    def disconnected(self, worker: Worker) -> None:
        if worker.phase in (Phase.READY, Phase.MEMBER, Phase.EVICTED):
            reason = f"worker {worker.name} closed its control link without finishing"
            self.remove({worker.name}, Phase.EVICTED, certain=False, reason=reason)
            self.actions.append(Kill((worker.name,), reason))

    def exited(self, worker: Worker, code: int) -> None:
        if not worker.alive:
            return
        reason = f"worker {worker.name} {name_exit(code)}"
        phase = Phase.GONE
        if worker.phase is Phase.STOPPING:
            self.judge_exit_of_stopped(worker, code, reason)
        elif code > 0:
            self.update(worker.name, phase=phase)
            self.fail(Failure(worker.name, reason, code=code))
        elif code < 0:
            phase, note = self.after_signal(worker, code, reason)
            reason += note
        elif worker.phase is Phase.MEMBER:
            reason += " without saying that it had finished"
        if worker.phase is Phase.MEMBER:
            self.update(worker.name, finished=code == 0)
            self.remove({worker.name}, phase, certain=True, reason=reason)
            return
        self.update(worker.name, phase=phase)
        if code != 0 and worker.phase is not Phase.STOPPING:
            self.actions.append(Log(reason))

    def judge_exit_of_stopped(self, worker: Worker, code: int, reason: str) -> None:
        """An exit that was asked for says nothing new, unless it is the cause of the failure."""
        failure = self.state.failure
        if failure is None or code <= 0:
            return
        if failure.worker == worker.name and failure.code is None:
            self.change(failure=replace(failure, code=code))
        elif failure.secondary and not worker.failed:
            self.change(failure=Failure(worker.name, reason, code=code))

    def after_signal(self, worker: Worker, code: int, reason: str) -> tuple[Phase, str]:
        """Whether a killed worker comes back, and the words for it."""
        policy = self.state.policy
        failure = Failure(worker.name, reason, code=128 - code)
        if worker.finished:
            self.change(failure=self.state.failure or failure)
            return Phase.GONE, " after it had finished"
        if self.state.num_finished:
            return Phase.GONE, "; not started again, others have finished already"
        if worker.restarts >= policy.max_restarts:
            self.change(casualty=failure)
            return Phase.GONE, f"; not started again after {worker.restarts} restarts"
        had_entered = worker.phase is Phase.MEMBER and worker.installed >= worker.joined
        in_vain = 0 if had_entered else worker.in_vain + 1
        delay = policy.restart_delay_s(in_vain)
        self.update(
            worker.name,
            restarts=worker.restarts + 1,
            in_vain=in_vain,
            restart_at=self.now + delay,
        )
        return Phase.WAITING, f"; starting it again in {delay:g} s" if delay else ""

    def interrupted(self, number: int) -> None:
        if self.state.interrupted:
            alive = tuple(each.name for each in self.state.workers if each.alive)
            self.actions.append(Kill(alive, "interrupted twice"))
            return
        self.change(interrupted=number)
        self.stop(f"interrupted by {signal.Signals(number).name}", number)

    def agreed(self, event: Agreed) -> None:
        """The view of nodes has the group, maybe in another epoch, maybe without some workers."""
        state = self.state
        if event.announced:
            for worker in state.workers:
                if worker.joined == event.announced:
                    self.update(worker.name, joined=event.epoch)
            groups = tuple(
                replace(group, epoch=event.epoch) if group.epoch == event.announced else group
                for group in state.groups
            )
            self.change(groups=groups, epoch=max(state.epoch, event.epoch))
        elif all(event.epoch > group.epoch for group in state.groups):
            gone = {worker.name for worker in state.having(Phase.MEMBER)} - set(event.members)
            self.remove(gone, Phase.AWAY, certain=False, reason=event.reason)
            group = LiveGroup(event.epoch, event.members)
            groups = (*self.state.groups, group)
            self.change(epoch=max(state.epoch, event.epoch), groups=groups, broken="")

    def not_agreed(self, event: NotAgreed) -> None:
        """Announce again, after a moment: whatever is in the way may take its time."""
        newest = self.state.view
        groups = tuple(group for group in self.state.groups if group.epoch != event.announced)
        self.change(groups=groups, epoch=max(self.state.epoch, event.floor))
        if newest is not None and newest.epoch == event.announced:
            again = self.now + self.state.policy.agree_again_s
            self.change(broken=event.reason, not_before=again)
            self.actions.append(Log(f"epoch {event.announced} is void: {event.reason}"))

    def away(self, names: Iterable[str], reason: str) -> None:
        """Nothing is heard of these till their nodes are back. A job that ends waits for none."""
        members = {worker.name for worker in self.state.having(Phase.MEMBER)} & set(names)
        if members and not self.state.stopping:
            self.remove(members, Phase.AWAY, certain=False, reason=reason)
        for worker in (self.state.worker(name) for name in names):
            is_done = self.state.stopping or worker.phase in (Phase.STOPPING, Phase.FINISHED)
            if worker.phase is not Phase.GONE:
                self.update(worker.name, phase=Phase.GONE if is_done else Phase.AWAY)

    def placed(self, name: str) -> None:
        """Start it; that does not count as a restart: its code did nothing wrong."""
        state = self.state
        if state.num_finished or state.stopping:
            return
        if all(worker.name != name for worker in state.workers):
            self.change(workers=(*state.workers, Worker(name)))
            self.actions.append(Start(name, 0, "its node came in"))
        elif state.worker(name).phase in (Phase.AWAY, Phase.GONE):
            self.update(name, phase=Phase.STARTING, member=None)
            self.update(name, returns=state.worker(name).returns + 1)
            attempt = self.state.worker(name).attempt
            self.actions.append(Start(name, attempt, "its node is back"))

    # What follows.

    def settle(self) -> None:
        if self.state.stopping:
            return
        self.judge_inquiry()
        self.give_up_or_wind_up()
        self.renew()
        for worker in self.state.having(Phase.WAITING):
            if worker.restart_at <= self.now:
                self.update(worker.name, phase=Phase.STARTING)
                why = f"restart {worker.restarts} of {self.state.policy.max_restarts}"
                self.actions.append(Start(worker.name, worker.attempt, why))

    def judge_inquiry(self) -> None:
        inquiry = self.state.inquiry
        if inquiry is None:
            return
        policy = self.state.policy
        members = {worker.name for worker in self.state.having(Phase.MEMBER)}
        reports = tuple(
            report
            for report in inquiry.reports
            if self.state.group(report.epoch) or (not report.certain and report.blamed in members)
        )
        waiting = inquiry.waiting & members
        inquiry = replace(inquiry, waiting=waiting, reports=reports)
        self.change(inquiry=inquiry if reports else None)
        if not reports:
            return
        if waiting and self.now >= inquiry.deadline:
            if self.now > inquiry.deadline + policy.late_s:
                self.change(inquiry=replace(inquiry, deadline=self.now + policy.probe_timeout_s))
                self.actions.append(Log("this agent was late itself: it waits for probes longer"))
                return
            self.change(inquiry=None)
            for name in sorted(waiting):
                reason = f"worker {name} gave no sign of life for {policy.probe_timeout_s:g} s"
                self.remove({name}, Phase.EVICTED, certain=False, reason=reason)
        elif not waiting and inquiry.closing_at is None:
            self.change(inquiry=replace(inquiry, closing_at=self.now + policy.grace_s))
        elif inquiry.closing_at is not None and self.now >= inquiry.closing_at:
            self.change(inquiry=None)
            self.conclude(inquiry, members)

    def conclude(self, inquiry: Inquiry, members: set[str]) -> None:
        """Everybody answered the probe: evict who holds the others up, or renew their group."""
        silences = [report for report in inquiry.reports if not report.certain]
        excused = inquiry.blocked | {report.worker for report in inquiry.reports}
        for report in silences:
            excused |= self.still_busy(report.epoch)
        blamed = {report.blamed for report in silences if report.blamed in members} - excused
        if silences and not blamed:
            groups = (self.state.group(report.epoch) for report in silences)
            blamed = {name for group in groups if group for name in group.members}
            blamed = (blamed & members) - excused
        for name in sorted(filter(None, blamed)):
            reason = f"worker {name} did not take part while others waited for it"
            self.remove({name}, Phase.EVICTED, certain=False, reason=reason)
        if not blamed:
            epochs = {report.epoch for report in inquiry.reports}
            self.end_groups(epochs, "its links failed and nobody is to blame")

    def still_busy(self, epoch: int) -> set[str]:
        """The members that rightly have not entered ``epoch``: as long as none of their group has,
        they are in a long step there, and only the newcomers wait."""
        seniors = [worker for worker in self.state.having(Phase.MEMBER) if worker.joined < epoch]
        if any(worker.installed >= epoch for worker in seniors):
            return set()
        return {worker.name for worker in seniors}

    def give_up_or_wind_up(self) -> None:
        """End what can't or need not go on."""
        state = self.state
        if state.num_finished:
            if not state.having(Phase.MEMBER):
                self.stop_workers("the members of the job have finished", 0, spared=Phase.FINISHED)
            return
        left = state.having(*(phase for phase in Phase if phase is not Phase.GONE))
        if 0 < len(left) < len(state.workers) and left == state.having(Phase.AWAY):
            self.stop_workers("all that can be reached have ended", 0)
        elif state.casualty is not None and len(left) < max(state.policy.min_workers, 1):
            self.fail(state.casualty)

    def renew(self) -> None:
        """Announce a view if the present one is broken or someone waits to come in."""
        if self.now >= self.state.not_before:
            self.change(not_before=0.0)
        state = self.state
        members = state.having(Phase.MEMBER)
        ready = () if state.num_finished or state.stopping else state.having(Phase.READY)
        if not members:
            if ready and not any(worker.phase in EXPECTED for worker in state.workers):
                self.announce(ready, ready, "all workers are ready")
        elif state.broken:
            if not state.not_before:
                self.announce((*members, *ready), ready, state.broken)
        elif ready and state.inquiry is None and self.all_entered():
            names = ", ".join(worker.name for worker in ready)
            self.announce((*members, *ready), ready, f"worker {names} comes in")

    def announce(
        self, workers: tuple[Worker, ...], joining: tuple[Worker, ...], reason: str
    ) -> None:
        epoch = self.state.epoch + 1
        for worker in joining:
            self.update(worker.name, phase=Phase.MEMBER, joined=epoch, installed=0)
        members = [self.state.worker(worker.name) for worker in workers]
        members.sort(key=lambda worker: worker.seniority)
        places = in_ring([w.member for w in members if w.member is not None], self.state.ring)
        assert len(places) == len(members), "a worker is ready and did not say where"
        group = LiveGroup(epoch, tuple(member.worker for member in places))
        groups = self.state.groups[-1:] if self.all_entered() else self.state.groups
        self.change(epoch=epoch, groups=(*groups, group), broken="")
        self.actions.append(Announce(epoch, places, tuple(w.name for w in joining), reason))

    def all_entered(self) -> bool:
        """Whether every member of the newest view said that it is in it."""
        view = self.state.view
        return view is not None and all(
            worker.installed >= view.epoch for worker in self.state.having(Phase.MEMBER)
        )

    # Means.

    def change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def update(self, name: str, **changes: Any) -> None:
        self.state = self.state.with_worker(replace(self.state.worker(name), **changes))

    def remove(self, names: set[str], phase: Phase, *, certain: bool, reason: str) -> None:
        """Take workers out of every live group and end those groups under the others."""
        view = self.state.view
        for name in sorted(names):
            others = tuple(worker.name for worker in self.state.having(Phase.MEMBER))
            self.update(name, phase=phase)
            to = tuple(other for other in others if other != name or phase is Phase.EVICTED)
            self.actions.append(EndGroup(self.state.epoch, name, certain, to, reason))
        if view is not None and names & set(view.members):
            self.change(broken="; ".join(filter(None, (self.state.broken, reason))))
        groups = (group for group in self.state.groups if not names & set(group.members))
        self.change(groups=tuple(groups))

    def end_groups(self, epochs: set[int], reason: str) -> None:
        """End exactly these groups; their members go on together in the newest view, or a new."""
        view = self.state.view
        members = {worker.name for worker in self.state.having(Phase.MEMBER)}
        for group in self.state.groups:
            if group.epoch in epochs:
                to = tuple(name for name in group.members if name in members)
                self.actions.append(EndGroup(group.epoch, "", True, to, reason))
        if view is not None and view.epoch in epochs:
            self.change(broken=reason)
        groups = (group for group in self.state.groups if group.epoch not in epochs)
        self.change(groups=tuple(groups))

    def fail(self, failure: Failure) -> None:
        """The job fails; a failure that only followed another gives way to that one."""
        first = self.state.failure
        if first is None or (first.secondary and not failure.secondary):
            self.change(failure=failure)
        elif first.worker == failure.worker and first.code is None:
            self.change(failure=replace(first, code=failure.code))
        if not self.state.stopping:
            self.stop(failure.text, 0)

    def stop(self, reason: str, number: int) -> None:
        """End the whole job."""
        self.change(stopping=reason, inquiry=None)
        self.stop_workers(reason, number)

    def stop_workers(self, reason: str, number: int, spared: Phase | None = None) -> None:
        """Ask all but the ``spared`` to end; nobody is started any more."""
        stopped = []
        for worker in self.state.workers:
            if worker.phase in (Phase.WAITING, Phase.AWAY):
                self.update(worker.name, phase=Phase.GONE)
            elif worker.alive and worker.phase not in (Phase.STOPPING, spared):
                self.update(worker.name, phase=Phase.STOPPING)
                stopped.append(worker.name)
        if stopped:
            self.actions.append(StopWorkers(tuple(stopped), number, reason))
