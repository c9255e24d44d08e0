"""The roster: the message of rank 0 with all members of a group, at a rendezvous."""

from __future__ import annotations

from potluck._core.types import Member
from potluck._core.wire.format import MessageFormat

MAX_ROSTER = 1 << 20

ROSTER: MessageFormat[tuple[Member, ...]] = MessageFormat(
    tuple[Member, ...], limit=MAX_ROSTER, name="a roster"
)
