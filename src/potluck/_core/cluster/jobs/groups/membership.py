"""The membership of a job's groups: which workers are in, which are out, and why. Pure.

``handle(state, event, now) -> (state, actions)`` sees no socket, process, clock or disk. ``now``
is any monotonic clock in seconds. Rules:

- The epoch only rises. The first group waits for all expected workers.
- A group's members are in order of seniority (the epoch they joined in, then their name), so
  rank 0 is the most senior; where links were measured the others follow the ring that avoids slow
  ones.
- An exit is certain death: the other members get a new group at once. Silence is not: a report of
  it starts an inquiry. A member that does not answer a probe is evicted. If all answer, the members
  that are blamed and not blocked themselves are evicted (in a ring, each rank blames its
  neighbour). If no member is to blame, the same members get a new epoch. Of two members that can't
  reach each other neither is to blame: the group goes on without their link (``cut_links.py``).
- A newcomer enters by a new group once all members are in the present one. Members of a working
  group go over to the new one between two steps; only a group with a lost member is ended at once.
- An announced group counts once the nodes have agreed on it (``Agreed``). The nodes may agree on a
  group without the workers of a lost node, which are away until their node is back.
- A worker that was killed by a signal is started again, up to ``max_restarts`` times; then the
  others go on alone. An exit with a code above 0, or code that raised, fails the job. After the
  first member has finished no worker is let in or started again; a member that had not yet received
  the job's state is stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from potluck._core.cluster.jobs.groups import cut_links, events, inquiry, worlds
from potluck._core.cluster.jobs.groups.roster import (
    EXPECTED,
    JobFailure,
    JobPolicy,
    LiveGroup,
    Phase,
    State,
    Turn,
    WorkerState,
    WorldState,
    name_exit,
)
from potluck._core.cluster.membership.view import spared
from potluck._core.cluster.topology.graph import in_ring
from potluck._core.types import Member
from potluck._core.wire.jobs import Disconnected, Exited, ProcessState, Stalled, WorldSpec
from potluck._core.wire.nodes import JobGroup
from potluck._core.wire.worker_link import (
    Entered,
    Failed,
    Finished,
    Lost,
    Mended,
    ProbeReply,
    Ready,
)


def begin(
    names: Iterable[str], policy: JobPolicy, epoch: int = 0
) -> tuple[State, tuple[events.Action, ...]]:
    """A new job of workers ``names``; ``epoch`` is the highest one ever used for it."""
    workers = tuple(WorkerState(name) for name in names)
    world = WorldState(tuple(worker.name for worker in workers))
    state = State(policy, workers, epoch=epoch, world=world)
    return state, tuple(events.Start(worker.name, 0, "the job begins") for worker in state.workers)


def take_over(
    names: Iterable[str],
    policy: JobPolicy,
    epoch: int,
    group: JobGroup | None,
    world: WorldSpec,
) -> State:
    """The state of a job with which a new leader begins: its ``group`` in the nodes' view of
    ``epoch``, and the ``world`` that the workers were started for. The agents report the rest
    again: which workers are ready, have entered a group, or have ended."""
    members = tuple[Member, ...]()
    if group is not None and group.world == world.number:
        epoch, members = group.epoch, group.members
    known = {member.worker: member for member in members}
    joined = {member.worker: rank - len(members) for rank, member in enumerate(members)}

    def worker(name: str) -> WorkerState:
        if name in known:
            return WorkerState(name, Phase.MEMBER, known[name], joined=joined[name])
        if not world.is_fixed:
            return WorkerState(name, Phase.AWAY)
        return WorkerState(name, Phase.STARTING if name in world.members else Phase.SPARE)

    live = LiveGroup(epoch, tuple(member.worker for member in members))
    return State(
        policy,
        tuple(worker(name) for name in names),
        epoch=epoch,
        groups=(live,) if members else (),
        world=WorldState(world.members, world.number, world.restarts, world.is_fixed),
        cut=frozenset() if group is None else frozenset(group.cut),
    )


def handle(
    state: State, event: events.Event, now: float
) -> tuple[State, tuple[events.Action, ...]]:
    """The state after ``event``, and the actions to carry out in this order. Never raises for an
    event that comes late, twice or from a worker that is out."""
    turn = _Turn(state, now)
    turn.take(event)
    turn.settle()
    return turn.state, tuple(turn.actions)


class _Turn(Turn):
    """What each event means, and what follows."""

    def take(self, event: events.Event) -> None:
        if isinstance(event, Exited) and event.attempt >= 0:
            if event.attempt < self.state.worker(event.worker).attempt:
                return
            self.update(event.worker, attempt=event.attempt)
        if worlds.take(self, event):
            return
        match event:
            case Ready():
                self.ready(event)
            case Entered(name, epoch):
                self.update(name, entered=max(epoch, self.state.worker(name).entered))
            case Lost():
                inquiry.lost(self, event)
            case ProbeReply():
                inquiry.probe_reply(self, event)
            case Mended():
                cut_links.mended(self, event)
            case Stalled(name, reason):
                if self.state.worker(name).phase is Phase.MEMBER:
                    self.remove({name}, Phase.EVICTED, certain=False, reason=reason)
            case Finished(name):
                self.finished(self.state.worker(name))
            case Failed(name, text, secondary):
                worker = self.state.worker(name)
                # Of a job that does not fail, a worker that is asked to end may raise for that.
                is_asked = worker.phase is Phase.STOPPING and self.state.failure is None
                if worker.alive and not is_asked:
                    self.update(name, failed=True)
                    self.fail(JobFailure(name, text, secondary=secondary))
            case Disconnected(name):
                self.disconnected(self.state.worker(name))
            case Exited(name, code, _, why):
                self.exited(self.state.worker(name), code, why)
            case events.Interrupted(number):
                self.interrupted(number)
            case events.Agreed():
                self.agreed(event)
            case events.NotAgreed():
                self.not_agreed(event)
            case events.Away(names, reason):
                self.away(names, reason)
            case events.Placed(name):
                self.placed(name)
            case events.Severed():
                cut_links.severed(self, event)
            case ProcessState():
                worlds.seen(self, event)
            case events.Tick():
                pass
            case _:
                assert_never(event)

    # Reports.

    def ready(self, event: Ready) -> None:
        if event.is_fixed:
            worlds.fix(self)
        worker = self.state.worker(event.worker)
        if worker.phase is Phase.EVICTED and event.after_epoch < worker.entered:
            return  # repeated by its node; since then it has asked for nothing
        if worker.phase in (Phase.STARTING, Phase.READY, Phase.EVICTED, Phase.AWAY):
            self.asks(event)
            if self.state.ready_since is None and not self.state.groups:
                self.change(ready_since=self.now)
        elif worker.phase is Phase.MEMBER and _is_another_process(worker, event):
            # Its group was agreed on under a leader that was lost after it had it started again.
            reason = f"worker {worker.name} was started again"
            self.remove({worker.name}, Phase.READY, certain=True, reason=reason)
            self.asks(event)
        elif worker.phase is Phase.MEMBER and event.after_epoch >= self.state.epoch:
            asked = Lost(worker.name, event.after_epoch, certain=True, cause="asked for a group")
            inquiry.lost(self, asked)

    def asks(self, event: Ready) -> None:
        """A worker that is in no group asks for one."""
        phase, after = Phase.READY, event.after_epoch
        self.update(event.worker, phase=phase, member=event.member, after=after)

    def finished(self, worker: WorkerState) -> None:
        if worker.alive and worker.phase is not Phase.STOPPING:
            self.update(worker.name, phase=Phase.FINISHED, finished=worker.joined != 0)

    def disconnected(self, worker: WorkerState) -> None:
        if worker.phase in (Phase.READY, Phase.MEMBER, Phase.EVICTED):
            reason = f"worker {worker.name} closed its link to the agent without finishing"
            self.remove({worker.name}, Phase.EVICTED, certain=False, reason=reason)
            self.actions.append(events.Kill((worker.name,), reason))

    def exited(self, worker: WorkerState, code: int, why: str) -> None:
        if not worker.alive:
            return
        reason = f"worker {worker.name} {name_exit(code, why)}"
        phase = Phase.GONE
        if worker.phase is Phase.STOPPING:
            self.judge_exit_of_stopped(worker, code, reason, why)
        elif code > 0:
            self.update(worker.name, phase=phase)
            self.fail(JobFailure(worker.name, reason, code=code))
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
            self.actions.append(events.Note(reason))

    def judge_exit_of_stopped(self, worker: WorkerState, code: int, reason: str, why: str) -> None:
        """An exit that was asked for is no news, unless it is the cause of the failure."""
        failure = self.state.failure
        if failure is None:
            return
        if failure.worker == worker.name and failure.code is None:
            text = f"{failure.text}; {why}" if why else failure.text
            # The signal that stopped it while it ended by itself is no exit code of its own.
            self.change(failure=replace(failure, code=code if code > 0 else None, text=text))
        elif code > 0 and failure.secondary and not worker.failed:
            self.change(failure=JobFailure(worker.name, reason, code=code))

    def after_signal(self, worker: WorkerState, code: int, reason: str) -> tuple[Phase, str]:
        """Whether a killed worker comes back, and the words for it."""
        policy = self.state.policy
        failure = JobFailure(worker.name, reason, code=128 - code)
        if worker.finished:
            self.change(failure=self.state.failure or failure)
            return Phase.GONE, " after it had finished"
        if self.state.num_finished:
            return Phase.GONE, "; not started again, others have finished already"
        if worker.restarts >= policy.max_restarts:
            self.change(casualty=failure)
            return Phase.GONE, f"; not started again after {worker.restarts} restarts"
        had_entered = worker.phase is Phase.MEMBER and worker.entered >= worker.joined
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
            self.actions.append(events.Kill(alive, "interrupted twice"))
            return
        self.change(interrupted=number)
        self.stop(f"interrupted by {signal.Signals(number).name}", number)

    def agreed(self, event: events.Agreed) -> None:
        """The nodes' view has the group, maybe in another epoch, maybe without some workers."""
        self.change(num_refused=0)
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
            members = {worker.name for worker in state.having(Phase.MEMBER)}
            to = tuple(name for name in event.members if name in members)
            if to and state.group(event.announced) is None and not state.stopping:
                # It was ended by the number that it was announced with, before it had this one.
                reason = "another group was announced while the nodes agreed on this one"
                self.actions.append(events.EndGroup(event.epoch, "", True, to, reason))
        elif all(event.epoch > group.epoch for group in state.groups):
            gone = {worker.name for worker in state.having(Phase.MEMBER)} - set(event.members)
            self.remove(gone, Phase.AWAY, certain=False, reason=event.reason)
            group = LiveGroup(event.epoch, event.members)
            groups = (*self.state.groups, group)
            self.change(epoch=max(state.epoch, event.epoch), groups=groups, broken="")

    def not_agreed(self, event: events.NotAgreed) -> None:
        """Announce again, after a moment: whatever is in the way may take its time, but not for
        ever."""
        newest = self.state.newest_group
        groups = tuple(group for group in self.state.groups if group.epoch != event.announced)
        self.change(groups=groups, epoch=max(self.state.epoch, event.floor))
        if newest is not None and newest.epoch == event.announced:
            policy, num_refused = self.state.policy, self.state.num_refused + 1
            self.change(
                broken=event.cause or event.reason,
                not_before=self.now + policy.agree_again_s,
                num_refused=num_refused,
            )
            if num_refused == 1:
                self.actions.append(events.Note(f"epoch {event.announced} is void: {event.reason}"))
            elif num_refused >= policy.max_refused:
                seconds, names = num_refused * policy.agree_again_s, ", ".join(newest.members)
                text = f"the machines agreed on no group of worker {names} for {seconds:g} s"
                self.fail(JobFailure("", f"{text}: {event.reason}"))

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
            self.change(workers=(*state.workers, WorkerState(name, attempt=-1)))
            self.start(name, "its node came in")
        elif state.worker(name).phase in (Phase.AWAY, Phase.GONE):
            self.start(name, "its node is back")

    # What follows.

    def settle(self) -> None:
        if self.state.stopping:
            return
        if self.state.world.is_fixed:
            worlds.settle(self)
        else:
            inquiry.judge(self)
            self.give_up_or_wind_up()
            self.renew()
        if self.state.stopping:
            return
        for worker in self.state.having(Phase.WAITING):
            if worker.restart_at <= self.now:
                why = f"restart {worker.restarts} of {self.state.policy.max_restarts}"
                self.start(worker.name, why)

    def give_up_or_wind_up(self) -> None:
        """End what can't or need not go on."""
        state = self.state
        if state.num_finished:
            # No finished worker gave the job's state to a member that joined after the last group
            # in which one was (0: not reported). Alone, that member would train on from an older
            # step.
            last = max(worker.entered for worker in state.workers if worker.finished)
            may_go_on = [w for w in state.having(Phase.MEMBER) if last == 0 or w.joined <= last]
            if not may_go_on:
                self.stop_workers("the members of the job have finished", 0, spared=Phase.FINISHED)
            return
        left = state.having(*(phase for phase in Phase if phase is not Phase.GONE))
        if 0 < len(left) < len(state.workers) and left == state.having(Phase.AWAY):
            self.stop_workers("all that can be reached have ended", 0)
        elif state.casualty is not None and len(left) < max(state.policy.min_workers, 1):
            self.fail(state.casualty)

    def renew(self) -> None:
        """Announce a group if the present one is broken or a ready worker waits to come in."""
        if self.now >= self.state.not_before:
            self.change(not_before=0.0)
        state = self.state
        members = state.having(Phase.MEMBER)
        ready = () if state.num_finished or state.stopping else state.having(Phase.READY)
        if not members:
            if ready and not any(worker.phase in EXPECTED for worker in state.workers):
                self.announce(ready, ready, "all workers are ready")
            elif self.has_waited():
                late = ", ".join(worker.name for worker in state.having(*EXPECTED))
                reason = (
                    f"beginning with {len(ready)} workers: worker {late} is not ready after "
                    f"{state.policy.wait_s:g} s and comes in later"
                )
                self.actions.append(events.Note(reason))
                self.announce(ready, ready, reason)
        elif state.broken:
            if not state.not_before:
                self.announce((*members, *ready), ready, state.broken)
        elif (ready or state.mended) and state.inquiry is None and self.all_entered():
            names = ", ".join(worker.name for worker in ready)
            reasons = [state.mended, f"worker {names} comes in" if ready else ""]
            self.announce((*members, *ready), ready, "; ".join(filter(None, reasons)))

    def announce(
        self, workers: tuple[WorkerState, ...], joining: tuple[WorkerState, ...], reason: str
    ) -> None:
        epoch = self.state.epoch + 1
        for worker in joining:
            self.update(worker.name, phase=Phase.MEMBER, joined=epoch, entered=0)
        members = [self.state.worker(worker.name) for worker in workers]
        members.sort(key=lambda worker: worker.seniority)
        places = in_ring([w.member for w in members if w.member is not None], self.state.ring)
        assert len(places) == len(members), "a ready worker has an address"
        group = LiveGroup(epoch, tuple(member.worker for member in places))
        cut = spared(self.state.cut, group.members)
        groups = self.state.groups[-1:] if self.all_entered() else self.state.groups
        self.change(epoch=epoch, groups=(*groups, group), broken="", mended="", ready_since=None)
        joined = tuple(worker.name for worker in joining)
        back = tuple(worker.name for worker in joining if worker.after)
        self.actions.append(events.Announce(epoch, places, joined, reason, cut=cut, back=back))

    def all_entered(self) -> bool:
        """Whether every member of the newest group has reported that it entered it."""
        newest = self.state.newest_group
        return newest is not None and all(
            worker.entered >= newest.epoch for worker in self.state.having(Phase.MEMBER)
        )


def _is_another_process(worker: WorkerState, event: Ready) -> bool:
    """Whether ``event`` is of a process of a member that is in no group, not even an earlier one,
    and listens elsewhere than the member."""
    return event.after_epoch == 0 and worker.member is not None and event.port != worker.member.port
