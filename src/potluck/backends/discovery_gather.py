"""How processes that know of each other agree on a group, the first or the next.

One of them gathers it: at first the process with the lowest id, later the most senior member that
is left. The others ask it to be let in, and wait for its word. Who gathers looks after those that
have not come: a process that is gone is not waited for. What is enough: ``discovery_rules.py``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

from potluck.backends.discovery_hall import Guest, Hall
from potluck.backends.discovery_paths import BUDGET_S, in_order, named, read, survey
from potluck.backends.discovery_peers import FORMED, Acquaintances
from potluck.backends.discovery_rules import FirstGroup, NextGroup
from potluck.backends.discovery_search import CALL_S, JOIN, MEET, Search
from potluck.cluster.discovery.advert import INSTANCE_BYTES
from potluck.errors import (
    ConfigurationError,
    Evicted,
    GroupError,
    LinkError,
    OperationTimeout,
    PotluckError,
    Refused,
)
from potluck.transport.blocking import has_come, receive, recv_exactly, send_all
from potluck.transport.credentials import Credentials
from potluck.transport.handshake import connect
from potluck.types import Member
from potluck.waiting import Reminder
from potluck.wire.gathering import ASKED, JOINING, READING, Formed, Joining, Reading, Seat
from potluck.wire.messages import Hello

_AGAIN_S = 0.05
_LOOK_S = 0.2
_PROBE_S = 1.0
_FIRST_PROBE_S = 0.1
"""After a loss: who still runs comes at once."""
_GRACE_S = 5.0
"""A guest waits so much longer than its deadline: who gathers decides at its own."""


class Found(Enum):
    """What came of calling a process."""

    RUNS = auto()
    GONE = auto()
    SILENT = auto()


class Situation(Protocol):
    """Which group is wanted, and whom it concerns. Ids are instances."""

    @property
    def last(self) -> Formed:
        """The group that this process was in last; epoch 0 and whom it has found before that."""

    def seat(self, instance: str) -> Seat:
        """How to call a process; KeyError if it does not matter any more."""

    def seniors(self) -> list[str]:
        """The processes that would gather the group rather than this one, in that order."""

    def absent(self, joined: list[str]) -> list[str]:
        """The processes that have not come and may yet."""

    def heard(self, instance: str, found: Found) -> None:
        """What came of calling a process."""

    def learn(self, guest: Guest) -> None:
        """A guest says which group it was in, or whom it knows. Evicted if that left me out."""

    def is_complete(self, joined: list[str]) -> bool:
        """Whether the group is formed now."""

    def must_go_on(self, joined: list[str]) -> bool:
        """At the deadline: whether the group is formed all the same; else the error is raised."""

    def refused(self, seat: Seat, error: Refused) -> None:
        """A process that was asked is in another group. Raises if that is the answer."""

    def chosen(self, joined: list[str]) -> list[str]:
        """The guests that get in, the most senior first."""


class Gathering:
    """One process's part in forming a group."""

    def __init__(
        self, me: Seat, world_size: int, credentials: Credentials, hall: Hall, search: Search
    ) -> None:
        """``world_size`` as in HELLO: 0 if it is whoever is found."""
        self._me = me
        self._world_size = world_size
        self._credentials = credentials
        self._hall = hall
        self._search = search
        self.tried = 0
        """The highest epoch that this process has tried to form."""

    def agree(self, situation: Situation, deadline: float) -> Formed:
        """What the group is. OperationTimeout if nobody said so by the deadline."""
        said = ""
        while time.monotonic() < deadline:
            seniors = situation.seniors()
            try:
                if seniors:
                    formed = self._ask(situation, situation.seat(seniors[0]), deadline)
                else:
                    formed = self._gather(situation, deadline)
            except LinkError as error:
                if isinstance(error, Refused) and error.code == FORMED:
                    raise
                said, formed = str(error), None
                time.sleep(_AGAIN_S)
            if formed is not None:
                self.tried = max(self.tried, formed.epoch)
                return formed
        raise OperationTimeout(
            f"no group came about in time{': ' if said else ''}{said}", operation="establish_ring"
        )

    def probe(self, seat: Seat) -> Found:
        """Whether the process of ``seat`` runs. Refused if it is in a group without this one."""
        hello = self._hello(MEET)
        member, until = seat.member, time.monotonic() + CALL_S
        try:
            link, _ = connect(
                member.host, member.port, hello, self._credentials, deadline=until, max_retries=0
            )
            with contextlib.closing(link):
                instance = recv_exactly(link, INSTANCE_BYTES, until).hex()
        except Refused as error:
            if error.code == FORMED:
                raise
            return Found.SILENT
        except PotluckError as error:
            return Found.GONE if _nobody_listens(error) else Found.SILENT
        return Found.RUNS if instance == seat.instance else Found.GONE

    # -- a guest

    def _ask(self, situation: Situation, senior: Seat, deadline: float) -> Formed | None:
        """Wait for the word of ``senior``. None if another is to be asked by now."""
        member = senior.member
        try:
            until = min(deadline, time.monotonic() + CALL_S)
            link, _ = connect(
                member.host,
                member.port,
                self._hello(JOIN),
                self._credentials,
                deadline=until,
                max_retries=0,
            )
        except Refused as error:
            if error.code == "world":
                raise ConfigurationError(str(error)) from error
            situation.heard(senior.instance, Found.RUNS)
            if error.code == FORMED:
                situation.refused(senior, error)
            raise
        except PotluckError as error:
            found = Found.GONE if _nobody_listens(error) else Found.SILENT
            situation.heard(senior.instance, found)
            raise
        situation.heard(senior.instance, Found.RUNS)
        reminder = Reminder(
            lambda: f"waiting for {member.host}:{member.port} to gather the group", deadline
        )
        last = situation.last
        with contextlib.closing(link):
            joining = Joining(last.epoch, self.tried, last.seats)
            send_all(link, JOINING.encode(joining), time.monotonic() + CALL_S)
            while time.monotonic() < deadline + _GRACE_S:
                if not has_come(link, _LOOK_S):
                    reminder.tick()
                    if situation.seniors()[:1] != [senior.instance]:
                        return None
                    continue
                asked = receive(link, ASKED, time.monotonic() + CALL_S)
                if isinstance(asked, Formed):
                    return self._seated(asked, link.peer_host)
                reading = self._measure(asked.seat, link.peer_host)
                send_all(link, READING.encode(reading), time.monotonic() + CALL_S)
        return None

    def _seated(self, formed: Formed, host: str) -> Formed:
        """``formed`` as who gathered it, at ``host``, said it: with hosts that hold from here."""
        if formed.rank_of(self._me.instance) < 0:
            raise LinkError(f"{host} formed a group without this process")
        seats = (
            Seat(seat.instance, replace(seat.member, host=host))
            if _is_there(seat.member.host)
            else seat
            for seat in formed.seats
        )
        return Formed(formed.epoch, tuple(seats), formed.paths)

    # -- who gathers

    def _gather(self, situation: Situation, deadline: float) -> Formed | None:
        """Wait for all who are to come, and tell them. None if another process gathers."""
        is_after_loss = situation.last.epoch > 0
        probe_at = time.monotonic() + (_FIRST_PROBE_S if is_after_loss else _PROBE_S)
        reminder = Reminder(lambda: self._missing(situation), deadline)
        self._hall.open()
        try:
            while True:
                guests = self._hall.guests()
                for guest in guests.values():
                    situation.learn(guest)
                joined = list(guests)
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
                    self._look_after(situation, situation.absent(joined))
                    probe_at = time.monotonic() + _PROBE_S
                reminder.tick()
                self._hall.wait(_LOOK_S)
            return self._form(situation, self._hall.seat(situation.chosen(joined)), deadline)
        finally:
            self._hall.seat(())

    def _look_after(self, situation: Situation, absent: list[str]) -> None:
        for instance in absent:
            with contextlib.suppress(KeyError):
                seat = situation.seat(instance)
                try:
                    situation.heard(instance, self.probe(seat))
                except Refused as error:
                    situation.refused(seat, error)

    def _missing(self, situation: Situation) -> str:
        guests = list(self._hall.guests())
        absent = []
        for instance in situation.absent(guests):
            with contextlib.suppress(KeyError):
                absent.append(str(situation.seat(instance).member))
        text = f"{len(guests)} other processes are waiting to form a group with this one"
        if absent:
            text += f"; found, but not there yet: {', '.join(absent)}"
        return text

    def _form(self, situation: Situation, guests: list[Guest], deadline: float) -> Formed:
        """Tell ``guests``, the most senior first, what the group is."""
        last = situation.last
        seats = [self._me]
        for guest in guests:
            seats.append(guest.seat)
        paths = last.paths
        if not last.epoch:
            budget_s = min(BUDGET_S, (deadline - time.monotonic()) / 3)
            links = [None, *(guest.link for guest in guests)]
            paths = survey(seats, links, lambda seat: self._measure(seat, ""), budget_s)
        ranked, known = in_order(seats, paths)
        if last.epoch:
            workers = {seat.instance: seat.member.worker for seat in last.seats}
            ranked = tuple(
                Seat(seat.instance, replace(seat.member, worker=workers[seat.instance]))
                for seat in ranked
            )
        else:
            ranked = named(ranked)
        tried = [each.joining.tried for each in guests]
        formed = Formed(max([last.epoch, self.tried, *tried]) + 1, ranked, known)
        word = ASKED.encode(formed)
        for guest in guests:
            with contextlib.closing(guest.link), contextlib.suppress(LinkError):
                send_all(guest.link, word, time.monotonic() + CALL_S)
        return formed

    def _measure(self, seat: Seat, gatherer: str) -> Reading:
        host = gatherer if _is_there(seat.member.host) else seat.member.host
        try:
            return self._search.run(read(seat, host, self._credentials))
        except LinkError:
            return Reading()

    def _hello(self, kind: str) -> Hello:
        return Hello(
            kind,
            self._credentials.namespace,
            worker=self._me.instance,
            port=self._me.member.port,
            world_size=self._world_size,
        )


class First:
    """The situation of processes that have found each other and were in no group yet."""

    def __init__(self, me: str, rule: FirstGroup, peers: Acquaintances, search: Search) -> None:
        self._me = me
        self._rule = rule
        self._peers = peers
        self._search = search
        self._told: set[str] = set()

    @property
    def last(self) -> Formed:
        peers = self._peers.peers
        return Formed(0, tuple(self.seat(peer.instance) for peer in peers))

    def seat(self, instance: str) -> Seat:
        peer = self._peers.get(instance)
        return Seat(instance, Member("", peer.node, peer.host, peer.port))

    def seniors(self) -> list[str]:
        self._peers.check_standing()
        if self._rule.world_size == 1:
            return []
        return [peer.instance for peer in self._peers.peers if peer.instance < self._me]

    def absent(self, joined: list[str]) -> list[str]:
        return [p.instance for p in self._peers.peers if p.instance not in joined]

    def heard(self, instance: str, found: Found) -> None:
        if found is not Found.RUNS:
            self._peers.lost(instance)
            self._search.lost(instance)

    def learn(self, guest: Guest) -> None:
        if guest.seat.instance in self._told:
            return
        self._told.add(guest.seat.instance)
        known = {self._me, *(peer.instance for peer in self._peers.peers)}
        for seat in guest.joining.seats:
            if seat.instance not in known and seat.member.host:
                self._search.look_at(seat.member.host, seat.member.port)

    def is_complete(self, joined: list[str]) -> bool:
        if self._peers.is_late:
            return False
        known = [peer.instance for peer in self._peers.peers]
        return self._rule.is_complete(known, joined, time.monotonic())

    def must_go_on(self, joined: list[str]) -> bool:
        return False

    def refused(self, seat: Seat, error: Refused) -> None:
        member = seat.member
        self._peers.lost(seat.instance)
        self._peers.refused(member.host, member.port, error)
        self._search.look_at(member.host, member.port)

    def chosen(self, joined: list[str]) -> list[str]:
        return sorted(joined)[: self._rule.world_size - 1 if self._rule.world_size else None]


class Next:
    """The situation of those that remain of ``last``."""

    def __init__(self, me: str, last: Formed, cause: BaseException | None) -> None:
        self._me = me
        self._last = last
        self._cause = cause
        self._rule = NextGroup([seat.instance for seat in last.seats])

    @property
    def last(self) -> Formed:
        return self._last

    def seat(self, instance: str) -> Seat:
        return self._last.seats[self._last.rank_of(instance)]

    def seniors(self) -> list[str]:
        now, mine = time.monotonic(), self._last.rank_of(self._me)
        return [
            instance
            for instance in self._rule.seats[:mine]
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

    def learn(self, guest: Guest) -> None:
        """A guest that was in a newer group than this process: those that remain are its."""
        joining = guest.joining
        if joining.epoch <= self._last.epoch:
            return
        mine = {seat.instance: seat for seat in self._last.seats}
        seats = tuple(mine[each.instance] for each in joining.seats if each.instance in mine)
        if self._me not in {seat.instance for seat in seats}:
            raise self._evicted("a newer group was formed without this process")
        self._last = Formed(joining.epoch, seats, self._last.paths)
        gone = self._rule.gone
        self._rule = NextGroup([seat.instance for seat in seats], gone)

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

    def refused(self, seat: Seat, error: Refused) -> None:
        raise self._evicted(str(error)) from error

    def chosen(self, joined: list[str]) -> list[str]:
        return [instance for instance in self._rule.seats if instance in joined]

    def _evicted(self, reason: str) -> Evicted:
        return Evicted(
            f"the others have gone on without this process: {reason}",
            rank=self._last.rank_of(self._me),
            epoch=self._last.epoch,
        )


def _nobody_listens(error: BaseException) -> bool:
    """Whether the host answered that no process listens at that port, or another program does."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, ConnectionRefusedError):
            return True
        each = each.__cause__
    return not isinstance(error, LinkError)


def _is_there(host: str) -> bool:
    """Whether a host is the machine of the process that named it."""
    return not host or ipaddress.ip_address(host.partition("%")[0]).is_loopback
