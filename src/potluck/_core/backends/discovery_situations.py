"""The two situations in which a group is formed: the first group, of processes that found each
other (``First``), and a later group, of the remaining members of the last group (``Next``).
``discovery_rules.py`` says when each group is complete.
"""

from __future__ import annotations

import time
from enum import Enum, auto

from potluck._core.backends.discovery_peers import KnownPeers
from potluck._core.backends.discovery_rules import FirstGroup, NextGroup
from potluck._core.backends.discovery_search import Search
from potluck._core.backends.rendezvous import Arrival
from potluck._core.wire.gathering import Attempt, Formed, Joining, Participant
from potluck.errors import Evicted, GroupError, Refused


class Found(Enum):
    """The outcome of a probe of a process."""

    RUNS = auto()
    GONE = auto()
    SILENT = auto()


class First:
    """The situation of processes that found each other and were in no group yet.

    ``Next`` has the same methods.
    """

    def __init__(self, me: str, rule: FirstGroup, peers: KnownPeers, search: Search) -> None:
        self._me = me
        self._rule = rule
        self._peers = peers
        self._search = search
        self._learned: set[str] = set()

    @property
    def last(self) -> Formed:
        """The last group of this process; before the first, epoch 0 and the processes found."""
        return Formed(0, self._peers.peers)

    def participant(self, instance: str) -> Participant:
        """The address of a process; KeyError if it is no longer known."""
        return self._peers.get(instance)

    def seniors(self) -> list[str]:
        """The processes that come before this one as gathering process, the most senior first."""
        self._peers.check_existing()
        if self._rule.world_size == 1:
            return []
        return [peer.instance for peer in self._peers.peers if peer.instance < self._me]

    def absent(self, joined: list[str]) -> list[str]:
        """The processes that have not joined and still may."""
        return [p.instance for p in self._peers.peers if p.instance not in joined]

    def heard(self, instance: str, found: Found) -> None:
        """Note the outcome of a probe."""
        if found is not Found.RUNS:
            self._peers.lost(instance)
            self._search.lost(instance)

    def learn(self, arrival: Arrival[Joining]) -> None:
        """Use the content of a request to join: the last group of the process, or the processes
        that it has found. Evicted if that group was formed without this process."""

        if arrival.member.worker in self._learned:
            return
        self._learned.add(arrival.member.worker)
        known = {self._me, *(peer.instance for peer in self._peers.peers)}
        for participant in arrival.said.participants:
            if participant.instance not in known and participant.member.host:
                self._search.look_at(participant.member.host, participant.member.port)

    def attempted(self, attempt: Attempt) -> None:
        """Note a group that was agreed on and may exist on some hosts. Nothing to do: its members
        are peers, for which the group waits."""

    def is_complete(self, joined: list[str]) -> bool:
        """Whether to form the group now, of the processes that ``joined``."""
        if self._peers.is_late:
            return False
        known = [peer.instance for peer in self._peers.peers]
        return self._rule.is_complete(known, joined, time.monotonic())

    def must_go_on(self, joined: list[str]) -> bool:
        """Whether to form the group at the deadline; if not, the caller raises."""
        return False

    def refused(self, participant: Participant, error: Refused) -> None:
        """Note that a process is in another group. Raises if that is final."""
        member = participant.member
        self._peers.lost(participant.instance)
        self._peers.refused(member.host, member.port, error)
        self._search.look_at(member.host, member.port)

    def chosen(self, joined: list[str]) -> list[str]:
        """The processes of the group, without this one, the most senior first."""
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
        """If the process was in a newer group than this one, take that group as the last."""
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
        """The attempts since the last group that was complete."""
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
            f"the other members have gone on without this process: {reason}",
            rank=self._last.rank_of(self._me),
            epoch=self._last.epoch,
        )


Situation = First | Next
"""The group that is to be formed. Processes are named by their instances (random ids)."""
