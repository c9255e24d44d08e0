"""Forks: one node of a view goes on in a history of its own, without the others. Pure.

Inside of a history every decision needs a majority, whatever is banned: the other side of a cut may
not know of the ban yet. Where members that are banned keep the others from a decision, one of these
others goes on as a fork, and the rest of them join it. So a history never has two views of one
epoch, and ``merge.py`` brings the sides together.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from potluck._core.wire.nodes import JobGroup, View, ViewMember


def forked(view: View, first: View) -> View:
    """``first``, the first view of a history of one node, as a fork of ``view``: with this node's
    part in the groups of jobs. A fork of a fork is one of the same origin."""
    (node,) = first.nodes
    groups = []
    for group in view.groups:
        members = tuple(member for member in group.members if member.node == node)
        if members:
            groups.append(JobGroup(group.job, first.epoch, members, first.epoch, world=group.world))
    return msgspec.structs.replace(
        first, groups=tuple(groups), fork_of=view.fork_of or view.history
    )


def left_by_ban(
    view: View, subtracted: Collection[ViewMember], banned: Collection[str]
) -> tuple[ViewMember, ...]:
    """The members of ``view`` that are neither banned nor ``subtracted``, those that hold the state
    of a job first: the first of them forks. Empty if no member is banned."""
    left = [m for m in view.members if m not in subtracted and m.node not in banned]
    holders = {
        member.node
        for group in view.groups
        for member in group.members
        if member.worker not in group.entering
    }
    if set(view.nodes).isdisjoint(banned):
        return ()
    return tuple(sorted(left, key=lambda member: member.node not in holders))
