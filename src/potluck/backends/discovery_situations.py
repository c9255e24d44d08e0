"""The two situations in which a group is formed: the first group, of processes that have found each
other, and a later group, of the remaining members of the last one. ``discovery_rules.py`` says when
each is complete.
"""

from __future__ import annotations

import time
from enum import Enum, auto

from potluck.backends.discovery_peers import Acquaintances
from potluck.backends.discovery_rules import FirstGroup, NextGroup
from potluck.backends.discovery_search import Search
from potluck.backends.rendezvous import Arrival
from potluck.errors import Evicted, GroupError, Refused
from potluck.wire.gathering import Attempt, Formed, Joining, Participant


class Found(Enum):
    """The outcome of calling a process."""

    RUNS = auto()
    GONE = auto()
    SILENT = auto()


class First:
    """The situation of processes that have found each other and were in no group yet.

    The methods of ``Next`` mean the same.
    """

    def __init__(self, me: str, rule: FirstGroup, peers: Acquaintances, search: Search) -> None:
        self._me = me
        self._rule = rule
        self._peers = peers
        self._search = search
        self._told: set[str] = set()

    @property
    def last(self) -> Formed:
        """The last group of this process; before the first, epoch 0 and the processes found."""
        return Formed(0, self._peers.peers)

    def participant(self, instance: str) -> Participant:
        """How to call a process; KeyError if it is no longer needed."""
        return self._peers.get(instance)

    def seniors(self) -> list[str]:
        """The processes that would gather the group rather than this one, in that order."""
        self._peers.check_existing()
        if self._rule.world_size == 1:
            return []
        return [peer.instance for peer in self._peers.peers if peer.instance < self._me]

    def absent(self, joined: list[str]) -> list[str]:
        """The processes that have not come and may yet."""
        return [p.instance for p in self._peers.peers if p.instance not in joined]

    def heard(self, instance: str, found: Found) -> None:
        """A process was called, with the outcome ``found``."""
        if found is not Found.RUNS:
            self._peers.lost(instance)
            self._search.lost(instance)

    def learn(self, arrival: Arrival[Joining]) -> None:
        """Take in what an arrival says: its last group, or the processes that it has found.

        Evicted if that group was formed without this process."""
        if arrival.member.worker in self._told:
            return
        self._told.add(arrival.member.worker)
        known = {self._me, *(peer.instance for peer in self._peers.peers)}
        for participant in arrival.said.participants:
            if participant.instance not in known and participant.member.host:
                self._search.look_at(participant.member.host, participant.member.port)

    def attempted(self, attempt: Attempt) -> None:
        """A group was agreed on that may exist on some hosts. Its members are peers, which are
        waited for anyway."""

    def is_complete(self, joined: list[str]) -> bool:
        """Whether the group is formed now."""
        if self._peers.is_late:
            return False
        known = [peer.instance for peer in self._peers.peers]
        return self._rule.is_complete(known, joined, time.monotonic())

    def must_go_on(self, joined: list[str]) -> bool:
        """At the deadline: whether the group is formed all the same; else the error is raised."""
        return False

    def refused(self, participant: Participant, error: Refused) -> None:
        """A process that was asked is in another group. Raises if that is the answer."""
        member = participant.member
        self._peers.lost(participant.instance)
        self._peers.refused(member.host, member.port, error)
        self._search.look_at(member.host, member.port)

    def chosen(self, joined: list[str]) -> list[str]:
        """The arrivals that get in, the most senior first."""
        return sorted(joined)[: self._rule.world_size - 1 if self._rule.world_size else None]


class Next:
    """The situation of the remaining members of ``last``."""

    def __init__(self, me: str, last: Formed, cause: BaseException | None) -> None:
        self._me = me
        self._last = last
        self._cause = cause
        self._rule = NextGroup([each.instance for each in last.participants])
        self._attempts: dict[tuple[str, ...], int] = {}

    @property
    def last(self) -> Formed:
        return self._last

    def participant(self, instance: str) -> Participant:
        return self._last.participants[self._last.rank_of(instance)]

    def seniors(self) -> list[str]:
        now, mine = time.monotonic(), self._last.rank_of(self._me)
        return [
            instance
            for instance in self._rule.members[:mine]
            if instance not in self._rule.gone and not self._rule.is_silent(instance, now)
        ]

    def absent(self, joined: list[str]) -> list[str]:
        return self._rule.absent([self._me, *joined])

    def heard(self, instance: str, found: Found) -> None:
        if found is Found.RUNS:
            self._rule.answered(instance)
        elif found is Found.GONE:
            self._rule.ended(instance)
        else:
            self._rule.unanswered(instance, time.monotonic())

    def learn(self, arrival: Arrival[Joining]) -> None:
        """If the arrival was in a newer group than this process, that is the last group."""
        joining = arrival.said
        for attempt in joining.attempts:
            self.attempted(attempt)
        if joining.epoch <= self._last.epoch:
            return
        mine = {each.instance: each for each in self._last.participants}
        participants = tuple(
            mine[each.instance] for each in joining.participants if each.instance in mine
        )
        if self._me not in {each.instance for each in participants}:
            raise self._evicted("a newer group was formed without this process")
        self._last = Formed(joining.epoch, participants, self._last.paths)
        gone = self._rule.gone
        self._rule = NextGroup([each.instance for each in participants], gone)
        self._rule.attempts = self._open_attempts()

    def attempted(self, attempt: Attempt) -> None:
        before = self._attempts.get(attempt.instances, 0)
        self._attempts[attempt.instances] = max(before, attempt.epoch)
        self._rule.attempts = self._open_attempts()

    def _open_attempts(self) -> list[tuple[str, ...]]:
        """Those since the last group that is known to have come about."""
        return [each for each, epoch in self._attempts.items() if epoch > self._last.epoch]

    def is_complete(self, joined: list[str]) -> bool:
        return self._rule.is_complete([self._me, *joined], time.monotonic())

    def must_go_on(self, joined: list[str]) -> bool:
        objection = self._rule.objection([self._me, *joined])
        if objection:
            last = self._last
            raise GroupError(
                f"no group after epoch {last.epoch}: {objection}. Start all processes again, from "
                "their last checkpoint",
                rank=last.rank_of(self._me),
                epoch=last.epoch,
            ) from self._cause
        return True

    def refused(self, participant: Participant, error: Refused) -> None:
        raise self._evicted(str(error)) from error

    def chosen(self, joined: list[str]) -> list[str]:
        return [instance for instance in self._rule.members if instance in joined]

    def _evicted(self, reason: str) -> Evicted:
        return Evicted(
            f"the others have gone on without this process: {reason}",
            rank=self._last.rank_of(self._me),
            epoch=self._last.epoch,
        )


Situation = First | Next
"""Which group is wanted, and which processes it concerns, by their instances."""
