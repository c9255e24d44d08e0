"""What can happen to a node of a cluster (events), and what is to be done about it (actions).

Every action carries its reason in words a person can read, or is a message that has one.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck._core.types import MeasuredPath, Member
from potluck._core.wire.nodes import NodeMessage, StableRecord, View

# What can happen.


@dataclass(frozen=True, slots=True)
class Linked:
    """There is an authenticated link to the agent of ``node``, in this ``incarnation``."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Received:
    """``message`` came from ``node``, in this ``incarnation``."""

    node: str
    incarnation: int
    message: NodeMessage


@dataclass(frozen=True, slots=True)
class ConnectionRefused:
    """The host of ``node`` refused a connection: this ``incarnation`` of its agent has ended."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The record of ``Save(number)``, and all before it, are on disk."""

    number: int


@dataclass(frozen=True, slots=True)
class WantGroup:
    """The job's membership (``jobs/groups/``) on this node announced a group: have it agreed on.

    ``kept`` are the workers that stay from the group before and hold its state. ``fresh``: there
    are none, and every one that did is known to have ended. ``renew``: the group is a new one also
    if its members are those of the group before, which does not work any more. ``paths``: what was
    measured of the links between their nodes. ``world``: the number of the world they are of.
    ``cut``: pairs of workers that can't reach each other.
    """

    job: str
    members: tuple[Member, ...]
    kept: tuple[str, ...]
    reason: str
    fresh: bool = False
    renew: bool = False
    paths: tuple[MeasuredPath, ...] = ()
    world: int = 0
    cut: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class JobOver:
    """``job`` has ended: its group leaves the view."""

    job: str


@dataclass(frozen=True, slots=True)
class Barred:
    """``nodes`` are all nodes that may not take part: the list of admitted keys revokes them, or
    their admission has ended."""

    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class ContinueAlone:
    """The operator orders this paused node to go on without the others."""


@dataclass(frozen=True, slots=True)
class FoundHistory:
    """Found a history now, without listening for others first."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; see ``next_wakeup`` of the decider."""


Event = (
    Linked
    | Received
    | ConnectionRefused
    | Saved
    | WantGroup
    | JobOver
    | Barred
    | ContinueAlone
    | FoundHistory
    | Tick
)


# What is to be done.


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``node``, if there is a link."""

    node: str
    message: NodeMessage


@dataclass(frozen=True, slots=True)
class Save:
    """Write ``record`` to disk, then tell ``Saved(number)``."""

    number: int
    record: StableRecord


@dataclass(frozen=True, slots=True)
class Install:
    """Use ``view``, whose epoch is on disk. Its groups whose epoch is new go to this node's
    workers, and on the leader to their job's membership (``jobs/groups/``)."""

    view: View
    reason: str


@dataclass(frozen=True, slots=True)
class GroupRefused:
    """The group that was wanted for ``job`` can't be had; try again after ``floor``, if at all."""

    job: str
    floor: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop the groups of this node's workers: nothing may commit here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """The pause is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """This node is in no view. With ``resync``, its workers must drop their state."""

    reason: str
    resync: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Something to tell a person."""

    reason: str


Action = Send | Save | Install | GroupRefused | Pause | Resume | Leave | Note
