"""The roster: all members of a group, as rank 0 tells them at a rendezvous."""

from __future__ import annotations

from potluck.errors import ProtocolError
from potluck.types import Member
from potluck.wire.format import MessageFormat

MAX_ROSTER = 1 << 20

ROSTER: MessageFormat[tuple[Member, ...]] = MessageFormat(
    tuple[Member, ...], limit=MAX_ROSTER, name="a roster"
)


def checked(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """The members of a decoded roster; ProtocolError if one of them can't be called."""
    for member in members:
        if not 0 <= member.port < 65536:
            raise ProtocolError(f"not a roster: {member.port} is no port")
    return members
