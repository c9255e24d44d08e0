"""What processes without an agent say to each other until they are a group.

On a connection with the HELLO kind ``join``: the caller says ``Joining``; the process that gathers
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
MAX_PARTICIPANTS = 4096

INSTANCE = re.compile(r"^[0-9a-f]{32}\Z")

MAX_ATTEMPTS = 64

Instance = Annotated[str, msgspec.Meta(pattern=INSTANCE.pattern)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Participant(msgspec.Struct, frozen=True):
    """A process, by its random id, and the member that it is or will be."""

    instance: Instance
    member: Member


Participants = Annotated[tuple[Participant, ...], msgspec.Meta(max_length=MAX_PARTICIPANTS)]


class Attempt(msgspec.Struct, frozen=True):
    """A group that a process agreed to, in rank order, and did not see complete: other members may
    have."""

    epoch: Epoch
    instances: Annotated[tuple[Instance, ...], msgspec.Meta(max_length=MAX_PARTICIPANTS)]


class Joining(msgspec.Struct, frozen=True, tag=True):
    """Let me into the group that the process ``host`` gathers. ``epoch`` is that of the last group
    this process was in, ``participants`` are that group's; or 0 and the processes that it has
    found. ``attempts`` are those since."""

    host: Instance
    epoch: Epoch
    participants: Participants
    attempts: Annotated[tuple[Attempt, ...], msgspec.Meta(max_length=MAX_ATTEMPTS)] = ()


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Measure the path from you to ``participant``; an empty host is mine."""

    participant: Participant


class Reading(msgspec.Struct, frozen=True, tag=True):
    """What was measured: seconds one way, bytes per second there and back; 0: it failed."""

    latency_s: Figure = 0.0
    outward: Figure = 0.0
    inward: Figure = 0.0


class Formed(msgspec.Struct, frozen=True, tag=True):
    """The group, in rank order. Empty hosts, and loopback ones, are on the machine of the process
    that sends this."""

    epoch: Epoch
    participants: Participants
    paths: Annotated[tuple[MeasuredPath, ...], msgspec.Meta(max_length=1024)] = ()

    def rank_of(self, instance: str) -> int:
        """The rank of a process; -1 if it is not in this group."""
        return next(
            (
                i
                for i, participant in enumerate(self.participants)
                if participant.instance == instance
            ),
            -1,
        )

    @property
    def name(self) -> str:
        """Another one for each membership: two processes that gather at once may choose one epoch,
        and no member of one group may link to the other."""
        text = ",".join(participant.instance for participant in self.participants)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


JOINING: MessageFormat[Joining] = MessageFormat(Joining, limit=MAX_GATHERING, name="a join request")
READING: MessageFormat[Reading] = MessageFormat(Reading, limit=1024, name="a reading")
ASKED: MessageFormat[Measure | Formed] = MessageFormat(
    Measure | Formed, limit=MAX_GATHERING, name="an answer of the gathering process"
)


def checked(participants: tuple[Participant, ...]) -> tuple[Participant, ...]:
    """The participants of a decoded message; ProtocolError if one of them can't be called."""
    for participant in participants:
        try:
            ipaddress.ip_address(participant.member.host.partition("%")[0] or "::")
        except ValueError as error:
            raise ProtocolError(
                f"not a participant: {participant.member.host!r} is no address"
            ) from error
    return participants
