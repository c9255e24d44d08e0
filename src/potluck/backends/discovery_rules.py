"""The rules by which processes that found each other form a group. Pure; times are seconds of one
clock.

The first group has all processes that were found, once there are enough and no new process has been
found for a while. A later group has the remaining members of the last one, if they are a majority
of it and of each group that was agreed on since, not counting processes that are certainly gone. In
an even split the half with the most senior process goes on. So no two sides of a cut network train.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

SETTLE_S = 2.0
"""Seconds without a new process before the first group is formed: a beacon's interval."""

SILENT_S = 5.0
"""Seconds without an answer after which a member is left out of the next group."""

ESTABLISHED_S = 5.0
"""A group that has refused this process for so many seconds is not about to end."""


@dataclass(slots=True)
class FirstGroup:
    """What the first group needs: ``world_size`` processes, or (0: any) ``min_peers`` others."""

    world_size: int
    min_peers: int
    settle_s: float = SETTLE_S
    _seen: frozenset[str] = frozenset()
    _since: float = float("-inf")

    def is_complete(self, known: Collection[str], joined: Collection[str], now: float) -> bool:
        """Whether to form the group now, of the processes that ``joined``. ``known`` are all others
        that were found: the group waits for them, up to ``world_size``."""
        if self.world_size:
            return len(joined) >= self.world_size - 1
        seen = frozenset((*known, *joined))
        if seen != self._seen:
            self._seen, self._since = seen, now
        is_quiet = now - self._since >= self.settle_s
        return is_quiet and len(joined) >= self.min_peers and set(known) <= set(joined)


@dataclass(slots=True)
class NextGroup:
    """The remaining members of a group, whose members were ``members`` in rank order."""

    members: Sequence[str]
    gone: set[str] = field(default_factory=set)
    attempts: Collection[Sequence[str]] = ()
    """Groups that were agreed on since and may exist on some hosts. The next group needs a majority
    of each, or two groups could go on."""
    _silent: dict[str, float] = field(default_factory=dict)

    def answered(self, member: str) -> None:
        """``member`` runs."""
        self._silent.pop(member, None)

    def ended(self, member: str) -> None:
        """The process of ``member`` is certainly gone."""
        self.gone.add(member)

    def unanswered(self, member: str, now: float) -> None:
        """``member`` did not answer."""
        self._silent.setdefault(member, now)

    def is_silent(self, member: str, now: float) -> bool:
        """Whether ``member`` has not answered for so long that the others go on without it."""
        return member in self._silent and now - self._silent[member] >= SILENT_S

    def absent(self, present: Collection[str]) -> list[str]:
        """The members that are not ``present`` and not certainly gone."""
        return [
            member for member in self.members if member not in self.gone and member not in present
        ]

    def is_complete(self, present: Collection[str], now: float) -> bool:
        """Whether to go on with those ``present`` now: no other member is expected."""
        if self.objection(present):
            return False
        return all(self.is_silent(member, now) for member in self.absent(present))

    def objection(self, present: Collection[str]) -> str:
        """Why those ``present`` may not go on alone; empty if they may."""
        for members in (self.members, *self.attempts):
            if text := self._minority(members, present):
                return text
        return ""

    def _minority(self, members: Sequence[str], present: Collection[str]) -> str:
        alive = [member for member in members if member not in self.gone]
        count = sum(member in present for member in alive)
        if 2 * count > len(alive) or (2 * count == len(alive) and alive[0] in present):
            return ""
        half = "is not a majority"
        if 2 * count == len(alive):
            half = "is half of them without the most senior"
        return (
            f"{count} of {len(alive)} members that may still run {half}: the others may go on, and "
            "two groups must not train apart"
        )


@dataclass(slots=True)
class ExistingGroups:
    """Groups that exist already and have refused this process, by the address of the refusal.

    One that is about to end (the run before this one) is waited for; one that goes on is an answer.
    """

    _told: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)

    def refused(self, place: tuple[str, int], reason: str, now: float) -> None:
        """The process at ``place`` belongs to a group, as ``reason`` says."""
        since, _ = self._told.get(place, (now, ""))
        self._told[place] = since, reason

    def ended(self, place: tuple[str, int]) -> None:
        """The process at ``place`` says so no longer."""
        self._told.pop(place, None)

    def __bool__(self) -> bool:
        return bool(self._told)

    def answer(self, now: float) -> str:
        """The reason of a group that goes on; empty if there is none, or it may be ending."""
        for since, reason in self._told.values():
            if now - since >= ESTABLISHED_S:
                return reason
        return ""

    def reasons(self) -> str:
        """All that was said, for an error text."""
        return "; ".join(sorted({reason for _, reason in self._told.values()}))
