"""Agreement of processes that found each other on a group, the first or the next.

One process gathers the group: for the first group the process with the lowest id, for later groups
the most senior remaining member. The other processes ask the gathering process to join, and wait
for its answer. The gathering process probes absent processes, and does not wait for a process that
has ended. ``First`` and ``Next`` are the two situations; ``discovery_rules.py`` says when their
groups are complete.

Before the first group is formed, the gathering process orders measurements of the paths between
the nodes, as agents do: every pair of nodes is measured by one process of each node, in rounds in
which a node takes part in at most one measurement. Paths that are not measured within
``_SURVEY_S`` count as ordinary links.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from potluck._core.backends.discovery_rules import FirstGroup, NextGroup, in_order, named, rounds
from potluck._core.backends.discovery_search import CALL_S, FORMED, JOIN, MEET, KnownPeers, Search
from potluck._core.backends.rendezvous import Arrival, Rendezvous
from potluck._core.cluster.discovery.advert import INSTANCE_BYTES
from potluck._core.cluster.topology import measure
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.handshake import connect
from potluck._core.transport.link import has_come, receive, recv_exactly, send_all
from potluck._core.transport.listener import Admission
from potluck._core.transport.tcp import TcpLink
from potluck._core.types import MeasuredPath
from potluck._core.waiting import Reminder
from potluck._core.wire.facts import MEASURING, Measuring
from potluck._core.wire.gathering import (
    ASKED,
    JOINING,
    MAX_ATTEMPTS,
    READING,
    Attempt,
    Formed,
    Joining,
    Measure,
    Participant,
    Reading,
    checked,
)
from potluck._core.wire.greeting import Hello, Welcome
from potluck.errors import (
    ConfigurationError,
    Evicted,
    GroupError,
    LinkError,
    OperationTimeout,
    PotluckError,
    Refused,
)


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


_JOINING_S = 3.0
_SURVEY_S = 10.0
_READING_S = measure.MEASURE_S + 2.0
_AGAIN_S = 0.05
"""The pause before another process is called again, which can't tell when it is ready."""
_LOOK_S = 0.2
_PROBE_S = 1.0
_FIRST_PROBE_S = 0.1
"""The first probe after a loss comes early, because running processes join immediately."""
_GRACE_S = 5.0
"""A joining process waits this long beyond its deadline, for the decision that the gathering
process takes at its own deadline."""


@dataclass(eq=False, repr=False)
class Gathering:
    """The part of one process in forming a group.

    ``world_size`` is as in HELLO; 0: all processes that are found.
    """

    me: Participant
    world_size: int
    credentials: Credentials
    rendezvous: Rendezvous[Joining]
    search: Search

    def __post_init__(self) -> None:
        self.attempts: list[Attempt] = []
        """The groups that this process agreed to since the last group that it saw complete."""

    def agree(self, situation: Situation, deadline: float) -> Formed:
        """Take part until a group is formed. OperationTimeout if there is none by ``deadline``."""
        said = ""
        for attempt in self.attempts:
            situation.attempted(attempt)
        while time.monotonic() < deadline:
            seniors = situation.seniors()
            try:
                if seniors:
                    formed = self._ask(situation, situation.participant(seniors[0]), deadline)
                else:
                    formed = self._gather(situation, deadline)
            except LinkError as error:
                said, formed = str(error), None
                time.sleep(_AGAIN_S)
            if formed is not None:
                self._remember(formed)
                return formed
        raise OperationTimeout(
            f"no group was formed in time{': ' if said else ''}{said}", operation="establish_ring"
        )

    def _remember(self, formed: Formed) -> None:
        """Record that this process agreed to ``formed``, before it enters the group: other members
        may see the group complete, even if this process does not."""
        agreed = Attempt(formed.epoch, tuple(each.instance for each in formed.participants))
        others = [each for each in self.attempts if each.instances != agreed.instances]
        if len(others) >= MAX_ATTEMPTS:
            raise GroupError(
                f"{len(others)} different groups were agreed on, and none was complete. Start all "
                "processes again, from their last checkpoint"
            )
        self.attempts = [*others, agreed]

    def probe(self, participant: Participant) -> Found:
        """Call ``participant``. Refused if it is in a group without this process."""
        until = time.monotonic() + CALL_S
        try:
            with contextlib.closing(self._call(participant, MEET, until)) as link:
                instance = recv_exactly(link, INSTANCE_BYTES, until).hex()
        except Refused as error:
            if error.code == FORMED:
                raise
            return Found.SILENT
        except PotluckError as error:
            return Found.GONE if _is_not_listening(error) else Found.SILENT
        return Found.RUNS if instance == participant.instance else Found.GONE

    # -- a joining process

    def _ask(self, situation: Situation, senior: Participant, deadline: float) -> Formed | None:
        """Ask ``senior`` to join, and wait for the group. None if another process is to be
        asked."""
        member = senior.member
        try:
            found = self.probe(senior)
            situation.heard(senior.instance, found)
            if found is not Found.RUNS:
                time.sleep(_AGAIN_S)
                return None
            link = self._call(senior, JOIN, min(deadline, time.monotonic() + CALL_S))
        except Refused as error:
            if error.code == "world":
                raise ConfigurationError(str(error)) from error
            situation.heard(senior.instance, Found.RUNS)
            if error.code == FORMED:
                situation.refused(senior, error)
            raise
        except PotluckError as error:
            found = Found.GONE if _is_not_listening(error) else Found.SILENT
            situation.heard(senior.instance, found)
            raise
        reminder = Reminder(
            lambda: f"waiting for {member.host}:{member.port} to gather the group", deadline
        )
        last = situation.last
        with contextlib.closing(link):
            joining = Joining(senior.instance, last.epoch, last.participants, tuple(self.attempts))
            send_all(link, JOINING.encode(joining), time.monotonic() + CALL_S)
            probe_at = time.monotonic() + _PROBE_S
            while time.monotonic() < deadline + _GRACE_S:
                if not has_come(link, _LOOK_S):
                    reminder.tick()
                    # The link of a host that is cut off, or of a stopped process, does not end.
                    if last.epoch and time.monotonic() >= probe_at:
                        situation.heard(senior.instance, self.probe(senior))
                        probe_at = time.monotonic() + _PROBE_S
                    if situation.seniors()[:1] != [senior.instance]:
                        return None
                    continue
                asked = receive(link, ASKED, time.monotonic() + CALL_S)
                checked(asked.participants if isinstance(asked, Formed) else (asked.participant,))
                if isinstance(asked, Formed):
                    return self._entered(asked, link.peer_host, max(self._epochs(situation)))
                reading = self._measure(asked.participant, link.peer_host)
                send_all(link, READING.encode(reading), time.monotonic() + CALL_S)
        return None

    def _epochs(self, situation: Situation) -> list[int]:
        """The epochs that this process knows to be in use."""
        return [situation.last.epoch, *(attempt.epoch for attempt in self.attempts)]

    def _entered(self, formed: Formed, host: str, used: int) -> Formed:
        """``formed``, as received from ``host``, with addresses that are valid on this machine.

        ``used`` is the highest epoch that this process knows.
        """
        if formed.rank_of(self.me.instance) < 0:
            raise LinkError(f"{host} formed a group without this process")
        if formed.epoch <= used:
            raise LinkError(f"{host} formed epoch {formed.epoch}; this process is past {used}")
        participants = (
            Participant(participant.instance, replace(participant.member, host=host))
            if _is_there(participant.member.host)
            else participant
            for participant in formed.participants
        )
        return Formed(formed.epoch, tuple(participants), formed.paths)

    # -- the gathering process

    def _gather(self, situation: Situation, deadline: float) -> Formed | None:
        """Wait for the other processes and form the group. None if another process gathers it."""
        is_after_loss = situation.last.epoch > 0
        probe_at = time.monotonic() + (_FIRST_PROBE_S if is_after_loss else _PROBE_S)
        reminder = Reminder(lambda: self._missing(situation), deadline)
        self.rendezvous.open()
        try:
            while True:
                arrivals = self.rendezvous.arrivals()
                for arrival in arrivals.values():
                    situation.learn(arrival)
                joined = list(arrivals)
                if situation.seniors():
                    return None
                if situation.is_complete(joined):
                    break
                now = time.monotonic()
                if now >= deadline:
                    if situation.must_go_on(joined):
                        break
                    raise OperationTimeout(
                        f"the group is not complete: {self._missing(situation)}",
                        operation="establish_ring",
                    )
                if now >= probe_at:
                    self._probe_absent(situation, situation.absent(joined))
                    probe_at = time.monotonic() + _PROBE_S
                reminder.tick()
                self.rendezvous.wait(_LOOK_S)
            return self._form(situation, self.rendezvous.take(situation.chosen(joined)), deadline)
        finally:
            self.rendezvous.take(())

    def _probe_absent(self, situation: Situation, absent: list[str]) -> None:
        for instance in absent:
            with contextlib.suppress(KeyError):
                participant = situation.participant(instance)
                try:
                    situation.heard(instance, self.probe(participant))
                except Refused as error:
                    situation.refused(participant, error)

    def _missing(self, situation: Situation) -> str:
        joined = list(self.rendezvous.arrivals())
        absent = []
        for instance in situation.absent(joined):
            with contextlib.suppress(KeyError):
                absent.append(str(situation.participant(instance).member))
        text = f"{len(joined)} other processes are waiting to form a group with this one"
        if absent:
            text += f"; found, but not joined yet: {', '.join(absent)}"
        return text

    def _form(
        self, situation: Situation, arrivals: list[Arrival[Joining]], deadline: float
    ) -> Formed:
        """Form the group of this process and ``arrivals`` (the most senior first), and send it to
        them."""
        last = situation.last
        participants = [
            self.me,
            *(Participant(each.member.worker, each.member) for each in arrivals),
        ]
        paths = last.paths
        if not last.epoch:
            budget_s = min(_SURVEY_S, (deadline - time.monotonic()) / 3)
            links = [None, *(each.link for each in arrivals)]
            paths = _survey(
                participants, links, lambda participant: self._measure(participant, ""), budget_s
            )
        ranked, known = in_order(participants, paths)
        ranked = named(ranked, last.participants if last.epoch else ())
        theirs = [tried.epoch for each in arrivals for tried in each.said.attempts]
        joined = [each.said.epoch for each in arrivals]
        epoch = 1 + max([*self._epochs(situation), *joined, *theirs])
        formed = Formed(epoch, ranked, known)
        word = ASKED.encode(formed)
        for arrival in arrivals:
            with contextlib.closing(arrival.link), contextlib.suppress(LinkError):
                send_all(arrival.link, word, time.monotonic() + CALL_S)
        return formed

    def _measure(self, participant: Participant, gatherer: str) -> Reading:
        host = gatherer if _is_there(participant.member.host) else participant.member.host
        try:
            return self.search.run(_read(participant, host, self.credentials), _READING_S)
        except LinkError:
            return Reading()

    def _call(self, participant: Participant, kind: str, deadline: float) -> TcpLink:
        """A link to ``participant``, by a single attempt to connect."""
        member = participant.member
        hello = Hello(
            kind,
            worker=self.me.instance,
            port=self.me.member.port,
            world_size=self.world_size,
            engine=self.me.member.engine,
            site=self.me.member.site,
        )
        link, _ = connect(
            member.host, member.port, hello, self.credentials, deadline=deadline, max_retries=0
        )
        return link


def read_joining(link: TcpLink, me: str) -> Joining:
    """The request of a process to join the group of ``me``; PotluckError if it is not valid."""
    joining = receive(link, JOINING, time.monotonic() + _JOINING_S)
    checked(joining.participants)
    if joining.host != me:  # meant for a process that had this port before
        raise LinkError(f"it wants to join {joining.host}, not this process")
    return joining


def _is_not_listening(error: BaseException) -> bool:
    """Whether the error shows that no process listens at the port, or another program."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, ConnectionRefusedError):
            return True
        each = each.__cause__
    return not isinstance(error, LinkError)


def _is_there(host: str) -> bool:
    """Whether ``host`` stands for the machine of the process that sent it."""
    return not host or ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _survey(
    participants: Sequence[Participant],
    links: Sequence[TcpLink | None],
    here: Callable[[Participant], Reading],
    budget_s: float,
) -> tuple[MeasuredPath, ...]:
    """Measure the paths between the nodes of ``participants`` over ``links``, within ``budget_s``
    seconds. The link of this process is None; it measures by ``here``."""
    first: dict[str, int] = {}
    for index, participant in enumerate(participants):
        first.setdefault(participant.member.node, index)
    chosen = list(first.values())
    until = time.monotonic() + budget_s
    paths: list[MeasuredPath] = []
    for of_nodes in rounds(len(chosen)):
        if time.monotonic() >= until:
            break
        pairs = [(chosen[a], chosen[b]) for a, b in of_nodes]
        for (a, b), reading in zip(
            pairs, _measure_round(pairs, participants, links, here), strict=True
        ):
            near, far = participants[a].member.node, participants[b].member.node
            if reading.outward and reading.inward:
                paths.append(MeasuredPath(near, far, reading.latency_s, reading.outward))
                paths.append(MeasuredPath(far, near, reading.latency_s, reading.inward))
    return tuple(paths)


def _measure_round(
    pairs: Sequence[tuple[int, int]],
    participants: Sequence[Participant],
    links: Sequence[TcpLink | None],
    here: Callable[[Participant], Reading],
) -> list[Reading]:
    """One round: other processes measure on request, this process at the same time."""
    readings: dict[tuple[int, int], Reading] = {}
    deadline = time.monotonic() + _READING_S
    for a, b in pairs:
        link = links[a]
        if link is not None:
            with contextlib.suppress(LinkError):
                send_all(link, ASKED.encode(Measure(participants[b])), deadline)
    for a, b in pairs:
        if links[a] is None:
            readings[a, b] = here(participants[b])
    for a, b in pairs:
        link = links[a]
        if link is not None:
            with contextlib.suppress(PotluckError):  # a lost process is noticed when links are made
                readings[a, b] = receive(link, READING, deadline)
    return [readings.get(pair, Reading()) for pair in pairs]


async def _read(participant: Participant, host: str, credentials: Credentials) -> Reading:
    """Measure the path to ``participant`` at ``host``."""
    member = participant.member
    try:
        found = await measure.measure(
            host, member.port, member.node, credentials, may_go_on=lambda: True
        )
    except (PotluckError, measure.Stopped, TimeoutError, OSError):
        return Reading()
    return Reading(found.latency_s, found.outward, found.inward)


def answer_measurement(hello: Hello, node: str) -> Admission:
    """Serve the measurement of a path by another process."""

    def deliver(link: TcpLink) -> None:
        with contextlib.closing(link):
            connection = _BlockingConnection(link, time.monotonic() + measure.MEASURE_S)
            asyncio.run(measure.serve(connection, may_go_on=lambda: True))

    return Admission(Welcome(), deliver)


class _BlockingConnection:
    """A measuring connection over a blocking link. It blocks the event loop, which has no other
    task."""

    def __init__(self, link: TcpLink, deadline: float) -> None:
        self._link = link
        self._deadline = deadline

    def send(self, message: Measuring) -> None:
        send_all(self._link, MEASURING.encode(message), self._deadline)

    async def drain(self) -> None:
        """Return at once: ``send`` has waited until the system took the bytes."""

    async def receive(self) -> Measuring:
        return receive(self._link, MEASURING, self._deadline)
