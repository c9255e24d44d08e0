"""Seniority, majorities, and which members are kept when links are broken. Pure functions.

Seniority is the epoch in which a node joined, then its id. So remaining members keep their order,
newcomers come last, and the leader is the most senior member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from potluck._core.wire.nodes import ViewMember

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
