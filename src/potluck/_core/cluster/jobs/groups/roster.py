"""The nouns of membership: workers and their phases, live groups, an inquiry, the whole state.

All are frozen; ``membership.handle`` turns one state into the next. A ``Turn`` is one call of it:
the state and the actions so far, and the means to change both, which the rules of ``membership``,
``inquiry`` and ``worlds`` share."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from potluck._core.cluster.jobs.groups.events import Action, EndGroup, EndWorkers, Start
from potluck._core.types import Member
from potluck._core.wire.jobs import JobSpec

_CAUSE_S = 4.0
"""A worker may fail this long before the nodes know that another's machine is lost: 3 s, and some
time on the way."""
_CAUSE_S_LOCAL = 1.0
_LEAST_AGREE_S = 10.0
"""A new leader's first groups may be refused: it has not heard of all workers yet."""


Pairs = frozenset[tuple[str, str]]
"""Pairs of workers, each in rising order."""


class Phase(StrEnum):
    """What membership knows about a worker."""

    STARTING = "starting"
    """its process runs and has not asked for a group yet"""
    READY = "ready"
    """it asked for a group and is in none"""
    MEMBER = "member"
    """it is in the newest group"""
    EVICTED = "evicted"
    """it was put out of its group; its process still runs and may ask again"""
    AWAY = "away"
    """its node left the cluster's view; the fate of its process is known when it is back"""
    FINISHED = "finished"
    """it reported that it is done; its process still runs"""
    STOPPING = "stopping"
    """it was asked to end; its process still runs"""
    WAITING = "waiting"
    """its process is gone and will be started again"""
    SPARE = "spare"
    """it has no process and is started with the next fixed world"""
    GONE = "gone"
    """its process is gone for good"""


ALIVE = frozenset(Phase) - {Phase.WAITING, Phase.SPARE, Phase.GONE}
EXPECTED = frozenset({Phase.STARTING, Phase.WAITING})


_DEBUGGED_S = 3600.0
"""How long others wait for a rank that is debugged before it is ready."""


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """What the operator chose. Times are seconds.

    A worker that dies is started again at once. One that dies before it has entered a group again
    waits ``backoff_s`` from the second time on, doubled each further time in a row.
    ``late_s``: a deadline noticed this much too late is not the members' fault but the leader's.
    ``agree_again_s``: pause before a group is announced again that the nodes did not agree on.
    ``wait_s``: after this long the first group begins without workers that are not ready, if there
    are ``min_workers``. ``restarts_worlds``: a fixed world that lost a member is started again.
    ``cause_s``: for how long a member's failure may still turn out to follow from a loss.
    """

    max_restarts: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    min_workers: int = 1
    probe_timeout_s: float = 1.0
    grace_s: float = 0.3
    late_s: float = 0.5
    agree_again_s: float = 0.5
    wait_s: float = 60.0
    restarts_worlds: bool = True
    cause_s: float = _CAUSE_S_LOCAL

    @classmethod
    def of(cls, spec: JobSpec) -> JobPolicy:
        """What the operator chose for the job of ``spec``."""
        return cls(
            max_restarts=spec.max_restarts,
            restarts_worlds=spec.restarts_worlds,
            wait_s=spec.wait_s if spec.debug_rank < 0 else max(spec.wait_s, _DEBUGGED_S),
            min_workers=spec.min_workers,
            cause_s=_CAUSE_S_LOCAL if spec.is_local else _CAUSE_S,
        )

    @property
    def max_refused(self) -> int:
        """How many groups in a row the nodes may disagree on until the job fails: as many as are
        tried in ``wait_s``, and in 10 s at least."""
        return int(max(self.wait_s, _LEAST_AGREE_S) / self.agree_again_s)

    def restart_delay_s(self, in_vain: int) -> float:
        """How long a restart waits after ``in_vain`` starts in a row that led into no group."""
        if in_vain <= 1:
            return 0.0
        return min(self.backoff_s * 2.0 ** (in_vain - 2), self.max_backoff_s)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One place in the job.

    ``joined`` is the epoch of the first group of its present membership (0: none yet), ``entered``
    the newest epoch that it reported to have entered, ``in_vain`` how often in a row it died before
    it had entered one, ``attempt`` how often its process was started again, whatever for (-1: never
    started). ``after`` is the epoch of the group that its process had left when it asked for one
    (0: it had been in none). ``finished``: it left a group because it was done. ``failed``: it
    reported that its code raised. ``again``: it waits for the next group of its fixed world."""

    name: str
    phase: Phase = Phase.STARTING
    member: Member | None = None
    joined: int = 0
    entered: int = 0
    restarts: int = 0
    in_vain: int = 0
    attempt: int = 0
    restart_at: float = 0.0
    after: int = 0
    finished: bool = False
    failed: bool = False
    again: bool = False

    @property
    def alive(self) -> bool:
        return self.phase in ALIVE

    @property
    def seniority(self) -> tuple[int, int, str]:
        """Sorts the most senior first: by the group it joined in, then by name (2 before 10)."""
        return (self.joined, len(self.name), self.name)


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group that some members may still be working in: names in rank order."""

    epoch: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LossReport:
    """``worker`` reports that its group ``epoch`` does not work, and blames ``blamed`` if anyone.
    ``unreachable`` are the members that did not answer when it called them for a link."""

    worker: str
    epoch: int
    blamed: str | None
    certain: bool
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A group does not work and no member is known to have ended: which members are to blame?

    ``waiting`` have not answered the probe; ``blocked`` answered that they wait themselves. When
    all have answered, ``closing_at`` leaves a moment for their own reports to arrive.
    """

    probe: int
    deadline: float
    waiting: frozenset[str]
    reports: tuple[LossReport, ...]
    blocked: frozenset[str] = frozenset()
    closing_at: float | None = None


@dataclass(frozen=True, slots=True)
class JobFailure:
    """Why the job fails. ``code`` is the exit code of ``worker``, None while it still runs.
    A ``secondary`` failure only follows from another worker's, which may still be reported."""

    worker: str
    text: str
    code: int | None = None
    secondary: bool = False


@dataclass(frozen=True, slots=True)
class WorldState:
    """The world that workers are started for; see ``worlds``.

    ``members`` have their index as RANK. ``number`` counts how often the world was started again,
    ``restarts`` those times that ``max_restarts`` limits. ``is_fixed``: the script can't change it
    while it runs. ``broken`` is why it is being stopped; then the next one begins, without the
    ``excluded`` workers. ``doubts`` are failures that may follow from a loss that is not known yet;
    they are judged at ``judge_at``.
    """

    members: tuple[str, ...] = ()
    number: int = 0
    restarts: int = 0
    is_fixed: bool = False
    broken: str = ""
    excluded: frozenset[str] = frozenset()
    doubts: tuple[JobFailure, ...] = ()
    judge_at: float | None = None
    give_up_at: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """All that membership knows.

    ``groups`` are live, oldest first; the last is the newest. ``broken`` is why the newest
    group has to be replaced, ``not_before`` when at the earliest (0: at once); ``num_refused``: how
    many groups in a row the nodes did not agree on. ``casualty`` is the last worker that was killed
    and not replaced. ``ring`` are nodes in the order of the ring that avoids slow links.
    ``ready_since``: when the first worker was ready for a group while there was none. ``world`` is
    what the workers were started for. ``cut`` are workers that can't reach each other, ``mended``
    is why a new group has more links, ``severed`` are those whose agents can't reach each other
    either.
    """

    policy: JobPolicy
    workers: tuple[WorkerState, ...]
    epoch: int = 0
    groups: tuple[LiveGroup, ...] = ()
    inquiry: Inquiry | None = None
    num_probes: int = 0
    broken: str = ""
    not_before: float = 0.0
    num_refused: int = 0
    stopping: str = ""
    interrupted: int = 0
    failure: JobFailure | None = None
    casualty: JobFailure | None = None
    ring: tuple[str, ...] = ()
    ready_since: float | None = None
    world: WorldState = WorldState()
    cut: Pairs = frozenset()
    mended: str = ""
    severed: Pairs = frozenset()

    def worker(self, name: str) -> WorkerState:
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise KeyError(name)

    def having(self, *phases: Phase) -> tuple[WorkerState, ...]:
        """The workers in one of ``phases``, the most senior first."""
        found = (worker for worker in self.workers if worker.phase in phases)
        return tuple(sorted(found, key=lambda worker: worker.seniority))

    def with_worker(self, changed: WorkerState) -> State:
        return replace(
            self,
            workers=tuple(
                changed if worker.name == changed.name else worker for worker in self.workers
            ),
        )

    def group(self, epoch: int) -> LiveGroup | None:
        """The live group of ``epoch``, None if there is none (any more)."""
        for group in self.groups:
            if group.epoch == epoch:
                return group
        return None

    @property
    def newest_group(self) -> LiveGroup | None:
        """The newest live group."""
        return self.groups[-1] if self.groups else None

    @property
    def num_finished(self) -> int:
        """How many workers have left a group because they were done."""
        return sum(worker.finished for worker in self.workers)

    @property
    def over(self) -> bool:
        """Every process is gone for good."""
        return all(worker.phase is Phase.GONE for worker in self.workers)

    @property
    def exit_code(self) -> int:
        """What the job's command should exit with if its summary has no other problem: 128 + the
        signal of an interrupt, the first failing worker's code, or 0."""
        if self.interrupted:
            return 128 + self.interrupted
        if self.failure is not None:
            return self.failure.code or 1
        return 0

    def next_wakeup(self) -> float | None:
        """When a Tick is due, in the clock of ``now``; None when only an event can change this."""
        times = [worker.restart_at for worker in self.having(Phase.WAITING)]
        if self.not_before:
            times.append(self.not_before)
        if self.inquiry is not None:
            closing = self.inquiry.closing_at
            times.append(self.inquiry.deadline if closing is None else closing)
        if self.ready_since is not None and self.has_enough_ready:
            times.append(self.ready_since + self.policy.wait_s)
        times += [at for at in (self.world.judge_at, self.world.give_up_at) if at is not None]
        return None if self.stopping else min(times, default=None)

    @property
    def has_enough_ready(self) -> bool:
        """Whether a first group may begin without the workers that are not ready. A fixed world may
        if all of those keep dying: a slow worker is waited for."""
        missing = (self.worker(name) for name in self.world.members if self.world.is_fixed)
        if any(w.phase not in (Phase.READY, Phase.MEMBER) and not w.in_vain for w in missing):
            return False
        return len(self.having(Phase.READY)) >= max(self.policy.min_workers, 1)


def name_exit(code: int, why: str = "") -> str:
    """``killed by SIGKILL (9)`` or ``exited with code 3``, with ``: why`` if that is known."""
    if code >= 0:
        text = f"exited with code {code}"
    else:
        try:
            text = f"killed by {signal.Signals(-code).name} ({-code})"
        except ValueError:
            text = f"killed by signal {-code}"
    return f"{text}: {why}" if why else text


class Turn:
    """``now`` is any monotonic clock in seconds."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def update(self, name: str, **changes: Any) -> None:
        self.state = self.state.with_worker(replace(self.state.worker(name), **changes))

    def has_waited(self) -> bool:
        """Whether a first group is to begin without the workers that are not ready."""
        state = self.state
        is_over = state.ready_since is not None and (
            self.now >= state.ready_since + state.policy.wait_s
        )
        return is_over and state.has_enough_ready

    def start(self, name: str, reason: str, *, alone: bool = True) -> None:
        """Start the process of worker ``name``, once more or for the first time."""
        attempt = self.state.worker(name).attempt + 1
        self.update(name, phase=Phase.STARTING, attempt=attempt, member=None)
        self.actions.append(Start(name, attempt, reason, alone))

    def remove(self, names: set[str], phase: Phase, *, certain: bool, reason: str) -> None:
        """Take workers out of every live group and end those groups under the others."""
        newest = self.state.newest_group
        for name in sorted(names):
            others = tuple(worker.name for worker in self.state.having(Phase.MEMBER))
            self.update(name, phase=phase)
            to = tuple(other for other in others if other != name or phase is Phase.EVICTED)
            self.actions.append(EndGroup(self.state.epoch, name, certain, to, reason))
        if newest is not None and names & set(newest.members):
            self.change(broken="; ".join(filter(None, (self.state.broken, reason))))
        groups = (group for group in self.state.groups if not names & set(group.members))
        self.change(groups=tuple(groups))

    def end_groups(self, epochs: set[int], reason: str) -> None:
        """End exactly the groups of ``epochs``, under their members. If the newest group is one of
        them, it is marked as broken, so that a new group of the same members is announced."""
        newest = self.state.newest_group
        members = {worker.name for worker in self.state.having(Phase.MEMBER)}
        for group in self.state.groups:
            if group.epoch in epochs:
                to = tuple(name for name in group.members if name in members)
                self.actions.append(EndGroup(group.epoch, "", True, to, reason))
        if newest is not None and newest.epoch in epochs:
            self.change(broken=reason)
        groups = (group for group in self.state.groups if group.epoch not in epochs)
        self.change(groups=tuple(groups))

    def fail(self, failure: JobFailure) -> None:
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
        """Ask all workers but the ``spared`` to end; no worker is started any more."""
        stopped = []
        for worker in self.state.workers:
            if worker.phase in (Phase.WAITING, Phase.AWAY, Phase.SPARE):
                self.update(worker.name, phase=Phase.GONE)
            elif worker.alive and worker.phase not in (Phase.STOPPING, spared):
                self.update(worker.name, phase=Phase.STOPPING)
                stopped.append(worker.name)
        if stopped:
            self.actions.append(EndWorkers(tuple(stopped), number, reason))
