"""Views: how one follows from another; and what can happen to a node (events) and what is to be
done about it (actions).

Every action carries its reason in words a person can read, or is a message that has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from potluck.cluster.election import by_seniority
from potluck.types import MeasuredPath, Member
from potluck.wire.nodes import JobGroup, NodeMessage, Record, Seat, View

# What can happen.


@dataclass(frozen=True, slots=True)
class Linked:
    """There is an authenticated control link to ``node``, in its run ``life``."""

    node: str
    life: int


@dataclass(frozen=True, slots=True)
class Received:
    """``message`` came from ``node``, in its run ``life``."""

    node: str
    life: int
    message: NodeMessage


@dataclass(frozen=True, slots=True)
class Refused:
    """The host of ``node`` answered that nobody listens: run ``life`` of its agent has ended."""

    node: str
    life: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The record of ``Save(number)``, and all before it, are on disk."""

    number: int


@dataclass(frozen=True, slots=True)
class WantGroup:
    """This node's ``membership`` announced a group: have it agreed on.

    ``kept`` are the workers that stay from the group before and hold its state. ``fresh``: there
    are none, and every one that did is known to have ended. ``renew``: the group is a new one also
    if its members are those of the group before, which does not work any more. ``paths``: what was
    measured of the links between their nodes.
    """

    job: str
    members: tuple[Member, ...]
    kept: tuple[str, ...]
    reason: str
    fresh: bool = False
    renew: bool = False
    paths: tuple[MeasuredPath, ...] = ()


@dataclass(frozen=True, slots=True)
class JobOver:
    """``job`` has ended: its group leaves the view."""

    job: str


@dataclass(frozen=True, slots=True)
class Ban:
    """The operator bans ``node``."""

    node: str


@dataclass(frozen=True, slots=True)
class ContinueAlone:
    """The operator orders this paused node to go on without the others."""


@dataclass(frozen=True, slots=True)
class Found:
    """Found a lineage now, without listening for others first."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; see ``Node.next_wakeup``."""


Event = (
    Linked | Received | Refused | Saved | WantGroup | JobOver | Ban | ContinueAlone | Found | Tick
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
    record: Record


@dataclass(frozen=True, slots=True)
class Install:
    """``view`` is the one to use; its epoch is on disk. Its groups whose epoch is new go to this
    node's workers, and to the ``membership`` of its leader."""

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


# How one view follows from another.


def first_view(lineage: str, node: str, life: int, epoch: int, reason: str) -> View:
    """The first view of a lineage: one node."""
    return View(lineage, epoch, (Seat(node, life, epoch),), reason=reason)


def following(
    view: View,
    epoch: int,
    *,
    kept: Collection[str],
    joining: Iterable[tuple[str, int]] = (),
    wanted: Iterable[WantGroup] = (),
    over: Collection[str] = (),
    reason: str,
) -> View:
    """The view of ``epoch`` after ``view``: the ``kept`` nodes and those ``joining`` (node, life).

    A group that loses workers with their nodes goes on with the rest, in the new epoch. One that
    loses all that held its state stays on record as it was: only they can bring it back.
    """
    seats = [seat for seat in view.seats if seat.node in kept]
    seats += [Seat(node, life, epoch) for node, life in joining]
    nodes = {seat.node for seat in seats}
    groups = {group.job: _without(group, nodes, epoch) for group in view.groups}
    for want in wanted:
        groups[want.job] = _wanted(want, groups.get(want.job), epoch)
    kept_groups = tuple(group for job, group in sorted(groups.items()) if job not in over)
    return View(view.lineage, epoch, by_seniority(seats), kept_groups, reason, view.fork_of)


def objection_to(want: WantGroup, view: View) -> str:
    """Why the group that ``want`` asks for may not follow in ``view``; empty if it may."""
    away = sorted({member.node for member in want.members} - set(view.nodes))
    if away:
        return f"{', '.join(away)} is not in the cluster's view"
    group = view.group(want.job)
    if group is None or want.fresh:
        return ""
    before = {member.worker for member in group.members if member.node in view.nodes}
    if not before & set(want.kept):
        return (
            f"no worker of its group of epoch {group.epoch} is left to say what was committed; "
            "their nodes may still go on"
        )
    return ""


def describe(view: View) -> str:
    """``epoch 7: a, b (leader a)``."""
    return f"epoch {view.epoch}: {', '.join(view.nodes)} (leader {view.leader})"


def _wanted(want: WantGroup, before: JobGroup | None, epoch: int) -> JobGroup:
    """The group that ``want`` asks for. In the same members only ``entering`` changes, unless it is
    to be renewed: a group whose members all hold the state by now stays the group it is."""
    entering = tuple(m.worker for m in want.members if m.worker not in want.kept)
    if before is None or want.fresh:
        return JobGroup(want.job, epoch, want.members, epoch, entering, want.paths)
    is_the_same = want.members == before.members and not want.renew
    if is_the_same:
        return msgspec.structs.replace(before, entering=entering)
    return JobGroup(want.job, epoch, want.members, before.origin, entering, want.paths)


def _without(group: JobGroup, nodes: set[str], epoch: int) -> JobGroup:
    members = tuple(member for member in group.members if member.node in nodes)
    names = [member.worker for member in members]
    if members == group.members or set(names) <= set(group.entering):
        return group
    entering = tuple(name for name in group.entering if name in names)
    return msgspec.structs.replace(group, epoch=epoch, members=members, entering=entering)
