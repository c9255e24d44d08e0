"""The message in which an agent tells the others whose jobs its machine runs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck._core.wire.names import Name

MAX_DECISIONS = 1024

Rule = Literal["all", "ask", "none"]
"""What holds for members that the owner has not decided about: their jobs run; they don't until the
owner, who is asked, allows it; they don't."""
Nodes = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_DECISIONS)]


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Whose jobs the sender runs: those of ``allowed`` nodes, none of ``denied`` nodes, those of
    other nodes by ``rule``. A node that ``is_paused`` runs no jobs, not even its own."""

    rule: Rule = "ask"
    allowed: Nodes = ()
    denied: Nodes = ()
    is_paused: bool = False
