"""The messages between processes without an agent until they have formed a group.

They use a connection with the HELLO kind ``join``. The joining process sends ``Joining``. The
process that gathers the group may send requests to ``Measure`` paths, each answered by a
``Reading``; its last message is ``Formed``.

At a rendezvous of processes with a known rank 0 there is one message: the ``ROSTER``, by which rank
0 tells the members of the group.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from typing import Annotated

import msgspec

from potluck._core.types import MeasuredPath, Member
from potluck._core.wire.facts import Figure
from potluck._core.wire.format import MessageFormat
from potluck.errors import ProtocolError

MAX_GATHERING = 1 << 20
MAX_PARTICIPANTS = 4096

INSTANCE = re.compile(r"^[0-9a-f]{32}\Z")

MAX_ATTEMPTS = 64

Instance = Annotated[str, msgspec.Meta(pattern=INSTANCE.pattern)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Participant(msgspec.Struct, frozen=True):
    """A process by its random id, with the member that it is or will be."""

    instance: Instance
    member: Member


Participants = Annotated[tuple[Participant, ...], msgspec.Meta(max_length=MAX_PARTICIPANTS)]


class Attempt(msgspec.Struct, frozen=True):
    """A group (its processes in rank order) that a process agreed to and did not see complete;
    other members may have seen it complete."""

    epoch: Epoch
    instances: Annotated[tuple[Instance, ...], msgspec.Meta(max_length=MAX_PARTICIPANTS)]


class Joining(msgspec.Struct, frozen=True, tag=True):
    """A request to join the group that the process ``host`` gathers. ``epoch`` and ``participants``
    are those of the sender's last group; without one, 0 and the processes that the sender has
    found. ``attempts`` are the attempts since."""

    host: Instance
    epoch: Epoch
    participants: Participants
    attempts: Annotated[tuple[Attempt, ...], msgspec.Meta(max_length=MAX_ATTEMPTS)] = ()


class Measure(msgspec.Struct, frozen=True, tag=True):
    """A request to measure the path to ``participant``; an empty host is the sender's."""

    participant: Participant


class Reading(msgspec.Struct, frozen=True, tag=True):
    """A measurement: one-way latency in seconds, bytes per second in both directions; 0: failed."""

    latency_s: Figure = 0.0
    outward: Figure = 0.0
    inward: Figure = 0.0


class Formed(msgspec.Struct, frozen=True, tag=True):
    """The group that was formed, in rank order. Empty hosts and loopback addresses belong to the
    machine of the sender."""

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
        """A hash of the members: two processes that gather groups at the same time may choose equal
        epochs, and members of different groups must not link to each other."""
        text = ",".join(participant.instance for participant in self.participants)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


JOINING: MessageFormat[Joining] = MessageFormat(Joining, limit=MAX_GATHERING, name="a join request")
READING: MessageFormat[Reading] = MessageFormat(Reading, limit=1024, name="a reading")
ASKED: MessageFormat[Measure | Formed] = MessageFormat(
    Measure | Formed, limit=MAX_GATHERING, name="an answer of the gathering process"
)


def checked(participants: tuple[Participant, ...]) -> tuple[Participant, ...]:
    """The participants of a decoded message; ProtocolError if a host is no address."""
    for participant in participants:
        try:
            ipaddress.ip_address(participant.member.host.partition("%")[0] or "::")
        except ValueError as error:
            raise ProtocolError(
                f"not a participant: {participant.member.host!r} is no address"
            ) from error
    return participants


MAX_ROSTER = 1 << 20

ROSTER: MessageFormat[tuple[Member, ...]] = MessageFormat(
    tuple[Member, ...], limit=MAX_ROSTER, name="a roster"
)
