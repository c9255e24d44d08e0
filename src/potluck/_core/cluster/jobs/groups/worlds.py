"""Fixed worlds: the workers of a script that can't change its world while it runs.

Such a script calls torch's ``init_process_group`` and then needs every rank; or it has a context,
ends at its first loss, and so shows that it is not elastic. Rules:

- Its ranks meet in a group that is announced once all workers of the world are ready. A worker that
  dies before that is started again alone: no other rank depends on it yet.
- A world that lost a member after that, or a member's machine before, is *ended*: its processes are
  stopped. When they have ended, all workers that can be had are started as the next world, with
  ranks and a world size of its own. The script resumes from its own checkpoint.
- A death counts as a restart, up to ``max_restarts``; a machine that leaves does not.
- A member that fails because its connections failed, or that exits without a word, may only follow
  from a loss that is not known yet. It is in *doubt* for ``cause_s``. If no loss is reported until
  then, failed connections start the world again, and an exit fails the job. Code that raised
  anything else fails the job at once.
- A worker that is placed while there is a world waits for the next one: a restart would cost what
  the script has done since its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from potluck._core.cluster.jobs.groups import events
from potluck._core.cluster.jobs.groups.roster import (
    JobFailure,
    LiveGroup,
    Phase,
    Turn,
    WorkerState,
    WorldState,
    name_exit,
)
from potluck._core.types import Member
from potluck._core.wire.jobs import Disconnected, Exited, ProcessState, Stalled
from potluck._core.wire.worker_link import Failed, Ready

_KILLED = 128 + 9
_ENTERED = (Phase.MEMBER, Phase.FINISHED)
_STAYS = (Phase.STOPPING, Phase.AWAY, Phase.SPARE, Phase.GONE)


def fix(turn: Turn) -> None:
    """The script of a worker can't change its world."""
    world = turn.state.world
    if not world.is_fixed:
        turn.change(world=replace(world, is_fixed=True))
        reason = "the script forms a world of its own, which can't change while it runs"
        turn.actions.append(events.BeginWorld(world.number, world.members, True, reason))


def take(turn: Turn, event: events.Event) -> bool:
    """Deal with ``event`` if it means something else in a fixed world; whether it did."""
    if isinstance(event, Failed) and event.gave_up and not turn.state.world.is_fixed:
        _given_up(turn, event)
    state = turn.state
    if not state.world.is_fixed or state.stopping:
        return False
    match event:
        case Failed(name, text, secondary) if state.worker(name).alive:
            if secondary and state.worker(name).phase is Phase.MEMBER:
                _doubt(turn, JobFailure(name, text, secondary=True))
                return True
            return bool(state.world.broken)
        case Disconnected(name) if state.worker(name).phase is Phase.MEMBER:
            reason = f"worker {name} closed its link to the agent without finishing"
            turn.actions.append(events.Kill((name,), reason))
            end(turn, reason, (name,), JobFailure(name, reason))
            return True
        case Stalled(name, reason) if state.worker(name).phase is Phase.MEMBER:
            end(turn, reason, (name,), JobFailure(name, reason, code=_KILLED))
            return True
        case Exited(name, code, _, why):
            return _exited(turn, state.worker(name), code, why)
        case events.Away(names, reason):
            _away(turn, names, reason)
            return True
        case events.Placed(name):
            _placed(turn, name)
            return True
        case Ready() if state.worker(event.worker).phase in _ENTERED:
            _again(turn, state.worker(event.worker), event.member, event.after_epoch)
            return True
        case events.Agreed(epoch, members, 0, reason):
            _shrunk(turn, epoch, members, reason)
            return True
    return False


def seen(turn: Turn, event: ProcessState) -> None:
    """A process of another world than the present one, or of a worker that is out, ends."""
    worker, world = turn.state.worker(event.worker), turn.state.world
    attempt = max(worker.attempt, event.attempt)
    if worker.phase is Phase.STARTING and not event.is_alive:
        attempt = max(worker.attempt, event.attempt + 1)  # of a start that never arrived
    turn.update(worker.name, attempt=attempt)
    if not event.is_alive or not world.is_fixed or turn.state.stopping:
        return
    if event.world > world.number:  # begun by a lost leader, in a part of the nodes
        turn.change(world=replace(world, number=event.world))
        end(turn, "the leader of the job was lost while it started the world again", ())
    elif worker.phase is Phase.STOPPING:
        pass
    elif event.world < world.number or worker.phase in (Phase.AWAY, Phase.SPARE, Phase.GONE):
        turn.update(worker.name, phase=Phase.STOPPING)
        reason = f"worker {worker.name} is ended: the world that it was started for is over"
        turn.actions.append(events.Kill((worker.name,), reason))


def end(turn: Turn, reason: str, lost: tuple[str, ...], failure: JobFailure | None = None) -> None:
    """The world can't go on without ``lost``: stop it, to start the next one, or fail the job.
    With a ``failure``, a death, that counts as a restart."""
    state, world, policy = turn.state, turn.state.world, turn.state.policy
    if world.broken or state.stopping:
        return
    named = failure or JobFailure(lost[0] if lost else "", reason)
    if not policy.restarts_worlds:
        turn.fail(replace(named, text=f"{reason}; not started again, by --on-loss fail"))
        return
    if failure is not None and world.restarts >= policy.max_restarts:
        text = f"{reason}; not started again after {world.restarts} restarts"
        turn.fail(replace(named, text=text))
        return
    restarts = world.restarts + (failure is not None)
    stopped = []
    for worker in state.workers:
        if worker.phase is Phase.WAITING:
            turn.update(worker.name, phase=Phase.SPARE)
        elif worker.phase not in _STAYS:
            turn.update(worker.name, phase=Phase.STOPPING)
            stopped.append(worker.name)
    turn.change(
        groups=(),
        broken="",
        not_before=0.0,
        ready_since=None,
        world=replace(world, broken=reason, restarts=restarts, doubts=(), judge_at=None),
    )
    counted = f" (restart {restarts} of {policy.max_restarts})" if failure is not None else ""
    text = f"{reason}: the script can't go on without it, so all workers start again{counted}"
    turn.actions.append(events.EndWorld(tuple(stopped), lost, reason, text))


def settle(turn: Turn) -> None:
    """What follows from the state as it is."""
    _judge(turn)
    state = turn.state
    if state.stopping:
        return
    if state.world.broken:
        _begin_next(turn)
        return
    members = [state.worker(name) for name in state.world.members]
    entered = state.world.members if state.newest_group is None else state.newest_group.members
    missing = tuple(name for name in state.world.members if name not in entered)
    if all(worker.finished for worker in members):
        if state.world.doubts:
            return  # one of them ended with an error after that
        turn.stop_workers("the members of the job have finished", 0, spared=Phase.FINISHED)
    elif state.newest_group is None:
        _gather(turn, members)
    elif missing:
        end(turn, f"worker {', '.join(missing)} is missing in the cluster's view", missing)
    elif any(worker.again for worker in members):
        _meet_again(turn, members)
    else:
        _dismiss_others(turn)


# Reports.


def _given_up(turn: Turn, event: Failed) -> None:
    """A script that was taken for elastic is not. If the loss is known, its world ends now."""
    state = turn.state
    if state.stopping or state.num_finished or state.worker(event.worker).phase is not Phase.MEMBER:
        return
    fix(turn)
    lost = [w for w in map(state.worker, state.world.members) if w.phase is not Phase.MEMBER]
    if lost:
        names = ", ".join(worker.name for worker in lost)
        failure = JobFailure(event.worker, event.text, secondary=True)
        is_counted = any(worker.phase is not Phase.AWAY for worker in lost)
        end(turn, f"worker {names} is lost", (), failure if is_counted else None)


def _exited(turn: Turn, worker: WorkerState, code: int, why: str) -> bool:
    reason = f"worker {worker.name} {name_exit(code, why)}"
    match worker.phase:
        case Phase.STOPPING | Phase.AWAY:  # of a world that is over, however it ended
            turn.update(worker.name, phase=Phase.SPARE)
            _say_that_it_waits(turn, worker.name)
        case Phase.MEMBER if code < 0:
            turn.update(worker.name, phase=Phase.SPARE)
            end(turn, reason, (worker.name,), JobFailure(worker.name, reason, code=128 - code))
        case Phase.MEMBER if code == 0:
            turn.update(worker.name, phase=Phase.GONE, finished=True)
        case Phase.MEMBER | Phase.FINISHED if code > 0:
            turn.update(worker.name, phase=Phase.SPARE)
            _doubt(turn, JobFailure(worker.name, reason, code=code))
        case _:
            return False
    return True


def _doubt(turn: Turn, failure: JobFailure) -> None:
    """``failure`` may follow from a loss; an exit code is added to its worker's earlier report."""
    world = turn.state.world
    if world.broken:
        return
    doubts = {each.worker: each for each in world.doubts}
    earlier = doubts.get(failure.worker)
    doubts[failure.worker] = failure if earlier is None else replace(earlier, code=failure.code)
    judge_at = world.judge_at or turn.now + turn.state.policy.cause_s
    turn.change(world=replace(world, doubts=tuple(doubts.values()), judge_at=judge_at))


def _away(turn: Turn, names: Iterable[str], reason: str) -> None:
    lost = []
    for worker in (turn.state.worker(name) for name in names):
        if worker.name in turn.state.world.members and not worker.finished:
            lost.append(worker.name)
        if worker.phase is not Phase.GONE:
            turn.update(worker.name, phase=Phase.AWAY)
    if lost:
        end(turn, reason, tuple(lost))


def _placed(turn: Turn, name: str) -> None:
    state = turn.state
    if all(worker.name != name for worker in state.workers):
        turn.change(workers=(*state.workers, WorkerState(name, Phase.SPARE, attempt=-1)))
    elif state.worker(name).phase in (Phase.AWAY, Phase.GONE) and not state.worker(name).finished:
        turn.update(name, phase=Phase.SPARE)
    else:
        return
    _say_that_it_waits(turn, name)


def _again(turn: Turn, worker: WorkerState, member: Member, after_epoch: int) -> None:
    """A script that ended its process group forms one again. A repeated report changes nothing."""
    if worker.phase is Phase.FINISHED or after_epoch >= turn.state.epoch:
        turn.update(worker.name, phase=Phase.MEMBER, member=member, finished=False, again=True)


def _say_that_it_waits(turn: Turn, name: str) -> None:
    if not turn.state.world.broken:
        turn.actions.append(
            events.Note(f"worker {name} can run, and waits until the world starts again")
        )


def _shrunk(turn: Turn, epoch: int, members: tuple[str, ...], reason: str) -> None:
    """The nodes agreed on a group without some members."""
    group = turn.state.newest_group
    turn.change(epoch=max(turn.state.epoch, epoch))
    gone = () if group is None else tuple(n for n in group.members if n not in members)
    for name in gone:
        if turn.state.worker(name).phase is Phase.MEMBER:
            turn.update(name, phase=Phase.AWAY)
    if gone:
        end(turn, reason, gone)


# What follows.


def _judge(turn: Turn) -> None:
    """No loss explains the failures in doubt."""
    state, world = turn.state, turn.state.world
    if world.judge_at is None or turn.now < world.judge_at:
        return
    own = [failure for failure in world.doubts if not failure.secondary]
    first = (own or world.doubts)[0]
    turn.change(world=replace(world, doubts=(), judge_at=None))
    if own or state.num_finished:
        turn.fail(first)
    else:
        reason = f"worker {first.worker} lost its connections ({first.text})"
        end(turn, reason, (first.worker,), first)


def _begin_next(turn: Turn) -> None:
    """Start the next world once the processes of the last one have ended."""
    state, world, policy = turn.state, turn.state.world, turn.state.policy
    if any(worker.alive and worker.phase is not Phase.AWAY for worker in state.workers):
        return
    names = sorted(
        (
            worker.name
            for worker in state.workers
            if worker.phase is Phase.SPARE or (worker.phase is Phase.GONE and worker.finished)
            if worker.name not in world.excluded
        ),
        key=lambda name: (len(name), name),
    )
    if len(names) < max(policy.min_workers, 1):
        _await_machines(turn, len(names))
        return
    begun = WorldState(tuple(names), world.number + 1, world.restarts, is_fixed=True)
    turn.change(world=begun)
    turn.actions.append(
        events.BeginWorld(begun.number, begun.members, True, "the world starts again")
    )
    for name in names:
        turn.update(name, finished=False, failed=False, joined=0, entered=0, in_vain=0, again=False)
        turn.start(name, "the world starts again", alone=False)


def _await_machines(turn: Turn, num_here: int) -> None:
    """Too few workers are left; machines may come back, for a while."""
    world, policy = turn.state.world, turn.state.policy
    needed = f"{num_here} of at least {max(policy.min_workers, 1)} workers can be started"
    if not turn.state.having(Phase.AWAY):
        turn.fail(turn.state.casualty or JobFailure("", f"{world.broken}; {needed}"))
    elif world.give_up_at is None:
        turn.change(world=replace(world, give_up_at=turn.now + policy.wait_s))
        turn.actions.append(
            events.Note(f"{needed}: waiting {policy.wait_s:g} s for machines to come back")
        )
    elif turn.now >= world.give_up_at:
        turn.fail(JobFailure("", f"{world.broken}; {needed}, and no machine came in time"))


def _gather(turn: Turn, members: list[WorkerState]) -> None:
    """Announce the world's group when all are there; end the world if that can't be any more."""
    state = turn.state
    out = tuple(w.name for w in members if w.phase in (Phase.AWAY, Phase.SPARE, Phase.GONE))
    left = [worker for worker in members if _has_left(turn, worker)]
    if left:
        reason = f"worker {left[0].name} ended before it called init_process_group: no rank may"
        turn.fail(JobFailure(left[0].name, reason))
        return
    if out:
        end(turn, f"worker {', '.join(out)} left before all had met", out)
        return
    if turn.now >= state.not_before:
        turn.change(not_before=0.0)
    here = [worker for worker in members if worker.phase in (Phase.READY, Phase.MEMBER)]
    if len(here) == len(members):
        if not turn.state.not_before:
            _announce(turn, members)
    elif turn.has_waited():
        failing = [worker for worker in members if worker not in here]
        names = tuple(worker.name for worker in failing)
        times = ", ".join(f"worker {w.name} died {w.in_vain} times" for w in failing)
        turn.change(world=replace(state.world, excluded=frozenset(names)))
        end(turn, f"{times} while it started, for {state.policy.wait_s:g} s", names)


def _has_left(turn: Turn, worker: WorkerState) -> bool:
    """Whether ``worker`` ended by itself, with code 0, before its ranks had met."""
    is_killed = turn.state.casualty is not None and (
        worker.restarts >= turn.state.policy.max_restarts
    )
    return worker.phase is Phase.GONE and not worker.finished and not is_killed


def _meet_again(turn: Turn, members: list[WorkerState]) -> None:
    """Announce the next group of the same world once all members have left the last."""
    gone = [worker for worker in members if worker.phase is Phase.GONE]
    if gone:
        others = ", ".join(worker.name for worker in members if worker.again)
        reason = f"worker {gone[0].name} has ended; worker {others} can't meet it once more"
        turn.fail(JobFailure(gone[0].name, reason))
    elif all(worker.again for worker in members):
        _announce(turn, members, "all workers are ready once more")


def _announce(
    turn: Turn, members: list[WorkerState], reason: str = "all workers are ready"
) -> None:
    epoch = turn.state.epoch + 1
    for worker in members:
        turn.update(worker.name, phase=Phase.MEMBER, joined=epoch, entered=0, again=False)
    places = tuple(worker.member for worker in members if worker.member is not None)
    assert len(places) == len(members), "a ready worker has an address"
    names = tuple(worker.name for worker in members)
    turn.change(epoch=epoch, groups=(LiveGroup(epoch, names),), broken="", ready_since=None)
    number = turn.state.world.number
    turn.actions.append(events.Announce(epoch, places, names, reason, number))


def _dismiss_others(turn: Turn) -> None:
    """Workers that were started before the world was known to be fixed wait for the next one."""
    state = turn.state
    others = tuple(
        worker.name
        for worker in state.workers
        if worker.name not in state.world.members and worker.phase not in (*_STAYS, Phase.WAITING)
    )
    for worker in state.workers:
        if worker.name in others:
            turn.update(worker.name, phase=Phase.STOPPING)
        elif worker.name not in state.world.members and worker.phase is Phase.WAITING:
            turn.update(worker.name, phase=Phase.SPARE)
    if others:
        reason = f"worker {', '.join(others)} came after the world had formed, and waits"
        turn.actions.append(events.Kill(others, reason))
