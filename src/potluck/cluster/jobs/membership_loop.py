"""``MembershipLoop``: runs the pure ``groups.membership`` with real events and real time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from potluck.background import Alarm
from potluck.cluster.jobs.groups import events, membership
from potluck.cluster.jobs.groups.roster import JobPolicy, State, WorldState
from potluck.types import Member
from potluck.wire import jobs
from potluck.wire.nodes import JobGroup

_CAUSE_S = 4.0
"""A worker may fail this long before the nodes know that another's machine is lost: 3 s, and some
time on the way."""
_CAUSE_S_LOCAL = 1.0


def policy_of(spec: jobs.JobSpec) -> JobPolicy:
    """What the operator chose for the job of ``spec``."""
    return JobPolicy(
        max_restarts=spec.max_restarts,
        restarts_worlds=spec.restarts_worlds,
        wait_s=spec.wait_s,
        min_workers=spec.min_workers,
        cause_s=_CAUSE_S_LOCAL if spec.is_local else _CAUSE_S,
    )


def taken_over(
    names: tuple[str, ...],
    policy: JobPolicy,
    epoch: int,
    group: JobGroup | None,
    world: jobs.WorldSpec,
) -> State:
    """A job that another leader began: its ``group`` in the view of ``epoch``, and the ``world``
    that its workers were started for."""
    members = tuple[Member, ...]()
    if group is not None and group.world == world.number:
        epoch, members = group.epoch, group.members
    begun = WorldState(world.members, world.number, world.restarts, world.is_fixed)
    return membership.take_over(names, policy, epoch, members, begun)


class MembershipLoop:
    """Gives the actions that follow from each event to ``act``. ``over`` is set when the job has
    ended; ``crash`` is then the exception that ended it, if one did."""

    def __init__(self, state: State, act: Callable[[Sequence[events.Action]], None]) -> None:
        self.state = state
        self.over = asyncio.Event()
        self.crash: Exception | None = None
        self._act = act
        self._events: deque[events.Event] = deque()
        self._is_handling = False
        self._is_closed = False
        self._alarm = Alarm(lambda: self.handle(events.Tick()))

    def handle(self, event: events.Event) -> None:
        """Handle ``event``, then the events that its actions have caused."""
        self._events.append(event)
        if self._is_handling or self._is_closed or self.crash is not None:
            return
        self._is_handling = True
        try:
            while self._events:
                event = self._events.popleft()
                self.state, actions = membership.handle(self.state, event, time.monotonic())
                self._act(actions)
        except Exception as error:  # not the caller's fault: raised where the end is waited for
            self.crash = error
            self.over.set()
        finally:
            self._is_handling = False
        self._alarm.set(None if self._is_closed else self.state.next_wakeup())
        if self.state.over:
            self.over.set()

    def close(self) -> None:
        """Decide nothing any more; end the timer."""
        self._is_closed = True
        self._alarm.set(None)
