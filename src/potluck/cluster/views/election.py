"""Who is senior, who is kept when links are broken, and what a majority is. Pure functions.

Seniority is the epoch a node came in with, then its id: survivors keep their order, newcomers come
last, and the leader is the most senior.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from potluck.wire.nodes import Seat

Pair = frozenset[str]


def by_seniority(seats: Iterable[Seat]) -> tuple[Seat, ...]:
    """The most senior first."""
    return tuple(sorted(seats, key=lambda seat: seat.seniority))


def has_majority(
    seats: Collection[Seat], acks: Collection[str], dead: Collection[str] = ()
) -> bool:
    """Whether ``acks`` may decide for ``seats``: more than half of those not ``dead``, or half of
    them with the most senior. ``dead`` are only deaths that can't hide a decision."""
    living = [seat for seat in by_seniority(seats) if seat.node not in dead]
    if not living:
        return False
    voting = sum(seat.node in acks for seat in living)
    if 2 * voting == len(living):
        return living[0].node in acks
    return 2 * voting > len(living)


def explain_minority(
    seats: Collection[Seat], acks: Collection[str], dead: Collection[str] = ()
) -> str:
    """Why ``acks`` may not decide, for people."""
    living = [seat for seat in by_seniority(seats) if seat.node not in dead]
    voting = sum(seat.node in acks for seat in living)
    text = f"only {voting} of {len(living)} nodes can be reached from here"
    if living and 2 * voting == len(living):
        text += f", and the most senior, {living[0].node}, is not among them"
    return text


def keep(seats: Iterable[Seat], broken: Collection[Pair]) -> tuple[Seat, ...]:
    """The seats left when no two of them have a ``broken`` link: out goes who has the most broken
    ones, of equals the least senior. All nodes with the same facts keep the same ones."""
    kept = list(by_seniority(seats))
    while True:
        names = {seat.node for seat in kept}
        count = dict.fromkeys(names, 0)
        for pair in broken:
            if pair <= names:
                for node in pair:
                    count[node] += 1
        worst = max(kept, key=lambda seat: (count[seat.node], seat.seniority), default=None)
        if worst is None or not count[worst.node]:
            return tuple(kept)
        kept.remove(worst)


def newcomers(
    links: dict[str, Collection[str]], members: Collection[str], candidates: Iterable[str]
) -> tuple[str, ...]:
    """The candidates that may come in at once: linked both ways to all members and to each other.
    ``links`` says for each node whom it has a working link with."""
    chosen: list[str] = []
    for node in sorted(candidates):
        others = [*members, *chosen]
        mine = links.get(node, ())
        if all(other in mine and node in links.get(other, ()) for other in others):
            chosen.append(node)
    return tuple(chosen)
