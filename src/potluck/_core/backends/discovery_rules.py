"""The rules by which processes that found each other form a group. Pure; times are seconds of a
monotonic clock.

The first group has all processes that were found, when there are enough of them and no new process
was found for a while. A later group has the remaining members of the last group, if they are a
majority of that group and of each group that was agreed on since, not counting processes that
certainly ended. In an even split the half with the most senior process goes on. So the two sides of
a partitioned network never both train. Its ranks follow the ring whose slowest link is fastest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from potluck._core.cluster.topology.graph import Topology, in_ring
from potluck._core.types import MeasuredPath
from potluck._core.wire.facts import LinkFacts, NodeFacts
from potluck._core.wire.gathering import Participant

SETTLE_S = 2.0
"""Seconds without a new process before the first group is formed: the interval of beacons."""

SILENT_S = 5.0
"""Seconds without an answer after which a member is left out of the next group."""

ESTABLISHED_S = 5.0
"""Seconds of refusals after which a group counts as established, not as about to end."""


@dataclass(slots=True)
class FirstGroup:
    """The rule of the first group: it needs ``world_size`` processes; if that is 0, at least
    ``min_peers`` other processes."""

    world_size: int
    min_peers: int
    settle_s: float = SETTLE_S
    _seen: frozenset[str] = frozenset()
    _since: float = float("-inf")

    def is_complete(self, known: Collection[str], joined: Collection[str], now: float) -> bool:
        """Whether to form the group now, of the other processes that ``joined``. The group waits
        for all ``known`` processes, up to ``world_size``."""
        if self.world_size:
            return len(joined) >= self.world_size - 1
        seen = frozenset((*known, *joined))
        if seen != self._seen:
            self._seen, self._since = seen, now
        is_quiet = now - self._since >= self.settle_s
        return is_quiet and len(joined) >= self.min_peers and set(known) <= set(joined)


@dataclass(slots=True)
class NextGroup:
    """The rule of a later group, of the remaining ``members`` (in rank order) of the last one."""

    members: Sequence[str]
    gone: set[str] = field(default_factory=set)
    attempts: Collection[Sequence[str]] = ()
    """Groups that were agreed on since and may exist on some hosts. The next group needs a majority
    of each of them, or two groups could go on."""
    _silent: dict[str, float] = field(default_factory=dict)

    def answered(self, member: str) -> None:
        """Note that ``member`` runs."""
        self._silent.pop(member, None)

    def ended(self, member: str) -> None:
        """Note that the process of ``member`` certainly ended."""
        self.gone.add(member)

    def unanswered(self, member: str, now: float) -> None:
        """Note that ``member`` did not answer at the time ``now``."""
        self._silent.setdefault(member, now)

    def is_silent(self, member: str, now: float) -> bool:
        """Whether ``member`` has not answered for ``SILENT_S`` and is left out."""
        return member in self._silent and now - self._silent[member] >= SILENT_S

    def absent(self, present: Collection[str]) -> list[str]:
        """The members that are not ``present`` and may still run."""
        return [
            member for member in self.members if member not in self.gone and member not in present
        ]

    def is_complete(self, present: Collection[str], now: float) -> bool:
        """Whether to form the group of the ``present`` members now."""
        if self.objection(present):
            return False
        return all(self.is_silent(member, now) for member in self.absent(present))

    def objection(self, present: Collection[str]) -> str:
        """The reason why the ``present`` members may not go on alone; empty if they may."""
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
    """Groups that have refused this process, by the address of the refusal.

    A group that may be about to end (of the previous run) is waited for; a refusal by a group that
    goes on is final.
    """

    _refusals: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)

    def refused(self, place: tuple[str, int], reason: str, now: float) -> None:
        """Note that the process at ``place`` refused with ``reason``."""
        since, _ = self._refusals.get(place, (now, ""))
        self._refusals[place] = since, reason

    def ended(self, place: tuple[str, int]) -> None:
        """Forget the refusal of ``place``."""
        self._refusals.pop(place, None)

    def __bool__(self) -> bool:
        return bool(self._refusals)

    def answer(self, now: float) -> str:
        """The reason given by an established group; empty without one."""
        for since, reason in self._refusals.values():
            if now - since >= ESTABLISHED_S:
                return reason
        return ""

    def reasons(self) -> str:
        """All reasons, for an error text."""
        return "; ".join(sorted({reason for _, reason in self._refusals.values()}))


def in_order(
    participants: Sequence[Participant], paths: Sequence[MeasuredPath]
) -> tuple[tuple[Participant, ...], tuple[MeasuredPath, ...]]:
    """Order ``participants`` (the most senior first) by the best ring; also returns the known paths
    between their nodes."""
    nodes = {each.member.node for each in participants}
    links = [
        LinkFacts(path.source, path.target, path.latency_s, path.bandwidth)
        for path in paths
        if path.source in nodes and path.target in nodes
    ]
    topology = Topology([NodeFacts(node) for node in nodes], links)
    by_member = {id(participant.member): participant for participant in participants}
    ranked = in_ring([each.member for each in participants], topology.ring())
    return tuple(by_member[id(member)] for member in ranked), topology.paths(nodes)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` nodes, in rounds in which each node is in at most one pair.

    The circle method of tournament schedules: the first node stays, the others rotate by one place
    a round, and opposite places are a pair. For an odd number of nodes, -1 fills the last place.
    """
    circle = [*range(count), *([-1] if count % 2 else [])]
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def named(
    participants: Sequence[Participant], last: Sequence[Participant] = ()
) -> tuple[Participant, ...]:
    """``participants`` with the workers' names of the ``last`` group; in a first group the names
    are the ranks."""
    names = {each.instance: each.member.worker for each in last} or {
        each.instance: str(rank) for rank, each in enumerate(participants)
    }
    return tuple(
        Participant(each.instance, replace(each.member, worker=names[each.instance]))
        for each in participants
    )
