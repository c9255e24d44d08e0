"""What processes without an agent say to each other until they are a group.

On a connection with the HELLO kind ``join``: the guest says ``Joining``; the process that gathers
the group may ask it to ``Measure`` paths, each answered by ``Reading``, and ends with ``Formed``.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from typing import Annotated

import msgspec

from potluck.errors import ProtocolError
from potluck.types import MeasuredPath, Member
from potluck.wire.facts import Figure
from potluck.wire.format import MessageFormat

MAX_GATHERING = 1 << 20
MAX_SEATS = 4096

INSTANCE = re.compile(r"^[0-9a-f]{32}\Z")

MAX_ATTEMPTS = 64

Instance = Annotated[str, msgspec.Meta(pattern=INSTANCE.pattern)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Seat(msgspec.Struct, frozen=True):
    """A process, by its random id, and the member that it is or will be."""

    instance: Instance
    member: Member


Seats = Annotated[tuple[Seat, ...], msgspec.Meta(max_length=MAX_SEATS)]


class Attempt(msgspec.Struct, frozen=True):
    """A group that a process agreed to, in rank order, and did not see complete: other members may
    have."""

    epoch: Epoch
    instances: Annotated[tuple[Instance, ...], msgspec.Meta(max_length=MAX_SEATS)]


class Joining(msgspec.Struct, frozen=True, tag=True):
    """A guest, at the process ``host``. ``epoch`` is that of the last group it was in and ``seats``
    are that group's; or 0 and the processes that it has found. ``attempts`` are those since."""

    host: Instance
    epoch: Epoch
    seats: Seats
    attempts: Annotated[tuple[Attempt, ...], msgspec.Meta(max_length=MAX_ATTEMPTS)] = ()


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Measure the path from you to ``seat``; an empty host is mine."""

    seat: Seat


class Reading(msgspec.Struct, frozen=True, tag=True):
    """What was measured: seconds one way, bytes per second there and back; 0: it failed."""

    latency_s: Figure = 0.0
    outward: Figure = 0.0
    inward: Figure = 0.0


class Formed(msgspec.Struct, frozen=True, tag=True):
    """The group, in rank order. Empty hosts, and loopback ones, are on the machine of the process
    that sends this."""

    epoch: Epoch
    seats: Seats
    paths: Annotated[tuple[MeasuredPath, ...], msgspec.Meta(max_length=1024)] = ()

    def rank_of(self, instance: str) -> int:
        """The rank of a process; -1 if it is not in this group."""
        return next((i for i, seat in enumerate(self.seats) if seat.instance == instance), -1)

    @property
    def name(self) -> str:
        """Another one for each membership: two processes that gather at once may choose one epoch,
        and no member of one group may link to the other."""
        text = ",".join(seat.instance for seat in self.seats)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


JOINING: MessageFormat[Joining] = MessageFormat(Joining, limit=MAX_GATHERING, name="a join request")
READING: MessageFormat[Reading] = MessageFormat(Reading, limit=1024, name="a reading")
ASKED: MessageFormat[Measure | Formed] = MessageFormat(
    Measure | Formed, limit=MAX_GATHERING, name="an answer of the gathering process"
)


def checked(seats: tuple[Seat, ...]) -> tuple[Seat, ...]:
    """The seats of a decoded message; ProtocolError if one of them can't be called."""
    for seat in seats:
        if not 0 <= seat.member.port < 65536:
            raise ProtocolError(f"not a seat: {seat.member.port} is no port")
        try:
            ipaddress.ip_address(seat.member.host.partition("%")[0] or "::")
        except ValueError as error:
            raise ProtocolError(f"not a seat: {seat.member.host!r} is no address") from error
    return seats
