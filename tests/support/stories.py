"""Membership told as stories: a job's events one by one, and what is done about each."""

from __future__ import annotations

from typing import TypeVar

from potluck._core.cluster.jobs.groups import membership
from potluck._core.cluster.jobs.groups.events import Action, Announce, Event, Start
from potluck._core.cluster.jobs.groups.roster import JobPolicy, Phase

A = TypeVar("A", bound=Action)


class Story:
    """A job whose events are told one by one; ``did`` holds the actions of the last call."""

    def __init__(self, num_workers: int, policy: JobPolicy | None = None) -> None:
        self.now = 0.0
        self.names = [str(index) for index in range(num_workers)]
        self.state, self.did = membership.begin(self.names, policy or JobPolicy())

    def tell(self, *events: Event, at: float | None = None) -> tuple[Action, ...]:
        """The actions that follow from ``events``, at the time ``at`` (by default: no later)."""
        if at is not None:
            assert at >= self.now, "a story is told in order"
            self.now = at
        did: list[Action] = []
        for event in events:
            self.state, actions = membership.handle(self.state, event, self.now)
            did += actions
        self.did = tuple(did)
        assert all(action.reason for action in did if not isinstance(action, Start | Announce))
        return self.did

    def all(self, kind: type[A]) -> list[A]:
        """The last actions of this kind."""
        return [action for action in self.did if isinstance(action, kind)]

    def only(self, kind: type[A]) -> A:
        """The one last action of this kind."""
        (action,) = self.all(kind)
        return action

    def phase(self, name: str) -> Phase:
        """Where worker ``name`` stands."""
        return self.state.worker(name).phase
