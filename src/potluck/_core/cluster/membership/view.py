"""Views: seniority and majorities of members, and how one view follows from another. Pure.

Seniority is the epoch in which a node joined, then its id. So remaining members keep their order,
newcomers come last, and the leader is the most senior member."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from potluck._core.cluster.membership.events import WantGroup
from potluck._core.collectives.spanning_tree import connects, cut_of
from potluck._core.wire.format import MAX_PAIRS
from potluck._core.wire.nodes import MAX_GROUPS, MAX_VIEW_BYTES, JobGroup, View, ViewMember

_ROOM = 160 * 1024
"""Bytes of a view that groups leave free: for members that join, and names of entering workers."""


def first_view(history: str, node: str, incarnation: int, epoch: int, reason: str) -> View:
    """The first view of a history: one node."""
    return View(history, epoch, (ViewMember(node, incarnation, epoch),), reason=reason)


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
    """The view of ``epoch`` after ``view``: the ``kept`` nodes, and those ``joining`` (node,
    incarnation).

    A group that loses workers with their nodes goes on with the rest, in the new epoch. One that
    loses all that held its state stays on record as it was: only they can bring it back.
    """
    members = [member for member in view.members if member.node in kept]
    members += [ViewMember(node, incarnation, epoch) for node, incarnation in joining]
    nodes = {member.node for member in members}
    groups = {group.job: _without(group, nodes, epoch) for group in view.groups}
    for want in wanted:
        groups[want.job] = _wanted(want, groups.get(want.job), epoch)
    kept_groups = tuple(group for job, group in sorted(groups.items()) if job not in over)
    return View(view.history, epoch, by_seniority(members), kept_groups, reason, view.fork_of)


def objection_to(want: WantGroup, view: View) -> str:
    """Why the group that ``want`` asks for may not follow in ``view``; empty if it may."""
    away = sorted({member.node for member in want.members} - set(view.nodes))
    if away:
        return f"{', '.join(away)} is not in the cluster's view"
    others = tuple(group for group in view.groups if group.job != want.job)
    new = (*others, _group(want, view.epoch, 0, ()))
    size = len(msgspec.msgpack.encode(msgspec.structs.replace(view, groups=new)))
    if len(new) > MAX_GROUPS or size > MAX_VIEW_BYTES - _ROOM:
        return f"a view has no room for {len(new)} groups with {size} bytes"
    group = view.group(want.job)
    if group is None or want.fresh:
        return ""
    before = {member.worker for member in group.members if member.node in view.nodes}
    if not before & set(want.kept):
        may_hold = [m for m in group.members if m.worker not in group.entering] or group.members
        names = [f"worker {member.worker} on {member.node}" for member in may_hold]
        return (
            f"no worker of its group of epoch {group.epoch} is left to say what was committed; "
            f"their nodes may still go on: {', '.join(names[:8])}"
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
        return _group(want, epoch, epoch, entering)
    is_the_same = want.members == before.members and not want.renew
    if is_the_same:
        return msgspec.structs.replace(before, entering=entering)
    return _group(want, epoch, before.origin, entering)


def _group(want: WantGroup, epoch: int, origin: int, entering: tuple[str, ...]) -> JobGroup:
    return JobGroup(
        want.job, epoch, want.members, origin, entering, want.paths, want.world, want.cut
    )


def _without(group: JobGroup, nodes: set[str], epoch: int) -> JobGroup:
    members = tuple(member for member in group.members if member.node in nodes)
    names = [member.worker for member in members]
    if members == group.members or set(names) <= set(group.entering):
        return group
    entering = tuple(name for name in group.entering if name in names)
    cut = spared(group.cut, names)
    return msgspec.structs.replace(group, epoch=epoch, members=members, entering=entering, cut=cut)


def spared(cut: Iterable[tuple[str, str]], members: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The pairs of ``cut`` whose links a group of the workers ``members`` does without: none if the
    links that are left do not connect all, for then every link is tried; and none if they are more
    than a view has room for."""
    within = tuple(sorted(pair for pair in cut if set(pair) <= set(members)))
    ranks = cut_of(map(members.index, pair) for pair in within)
    return within if len(within) <= MAX_PAIRS and connects(len(members), ranks) else ()


Pair = frozenset[str]


def by_seniority(members: Iterable[ViewMember]) -> tuple[ViewMember, ...]:
    """``members``, the most senior first."""
    return tuple(sorted(members, key=lambda member: member.seniority))


def has_majority(
    members: Collection[ViewMember], acks: Collection[str], subtracted: Collection[str] = ()
) -> bool:
    """Whether ``acks`` may decide for ``members``: more than half of those not
    ``subtracted``, or half of them with the most senior. Only members whose end can't hide a
    decision may be ``subtracted``."""
    living = [member for member in by_seniority(members) if member.node not in subtracted]
    if not living:
        return False
    voting = sum(member.node in acks for member in living)
    if 2 * voting == len(living):
        return living[0].node in acks
    return 2 * voting > len(living)


def explain_minority(
    members: Collection[ViewMember], acks: Collection[str], subtracted: Collection[str] = ()
) -> str:
    """Why ``acks`` may not decide, in words."""
    living = [member for member in by_seniority(members) if member.node not in subtracted]
    voting = sum(member.node in acks for member in living)
    text = f"only {voting} of {len(living)} nodes can be reached from here"
    if living and 2 * voting == len(living):
        text += f", and the most senior, {living[0].node}, is not among them"
    return text


def keep(members: Iterable[ViewMember], broken: Collection[Pair]) -> tuple[ViewMember, ...]:
    """The members that remain when no two of them have a ``broken`` link. One by one the member
    with the most broken links is left out, of equals the least senior. All nodes with the same
    facts keep the same members."""
    kept = list(by_seniority(members))
    while True:
        names = {member.node for member in kept}
        count = dict.fromkeys(names, 0)
        for pair in broken:
            if pair <= names:
                for node in pair:
                    count[node] += 1
        worst = max(kept, key=lambda member: (count[member.node], member.seniority), default=None)
        if worst is None or not count[worst.node]:
            return tuple(kept)
        kept.remove(worst)


def newcomers(
    links: dict[str, Collection[str]], members: Collection[str], candidates: Iterable[str]
) -> tuple[str, ...]:
    """The candidates that may join together: linked in both directions to all members and to each
    other. ``links`` gives for each node the nodes that it has a working link with."""
    chosen: list[str] = []
    for node in sorted(candidates):
        others = [*members, *chosen]
        mine = links.get(node, ())
        if all(other in mine and node in links.get(other, ()) for other in others):
            chosen.append(node)
    return tuple(chosen)
