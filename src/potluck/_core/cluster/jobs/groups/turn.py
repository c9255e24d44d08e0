"""One call of ``membership.handle``: the state so far, the actions so far, and the means to change
both, which the rules of ``membership``, ``inquiry`` and ``worlds`` share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from potluck._core.cluster.jobs.groups.events import Action, EndGroup, EndWorkers, Start
from potluck._core.cluster.jobs.groups.roster import JobFailure, Phase, State


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
