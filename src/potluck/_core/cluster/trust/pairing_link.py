"""What both machines of a pairing share over the network: deadlines, messages, the question.

``pairing_host.py`` is the machine that shows a code, ``pairing_joiner.py`` the machine that enters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from potluck._core.background import stop
from potluck._core.wire import pairing as wire
from potluck.errors import LinkError

STEP_S = 5.0
"""Deadline of one run of the protocol, from the opening to the proofs, on either machine."""
CONFIRM_S = 180.0
"""How long the two people may take to compare the words and say yes."""

Confirm = Callable[[str, str, str], Awaitable[bool]]
"""``confirm(words, name, node)``: whether the person says that both screens show these words; about
the machine that calls itself ``name`` (empty: not known yet)."""


async def receive(reader: asyncio.StreamReader, *kinds: int) -> bytes:
    """The body of the next message, of one of ``kinds``; LinkError if the connection ends."""
    try:
        prefix = await reader.readexactly(wire.PREFIX_BYTES)
        _, length = wire.decode_prefix(prefix, *kinds)
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkError("the peer closed the connection before pairing was complete") from error


async def agreed(
    question: Awaitable[bool],
    hearing: Coroutine[Any, Any, bytes],
    say_yes: Callable[[], None] = lambda: None,
) -> bytes | None:
    """What the other machine says by ``hearing``, once this machine's person has answered
    ``question`` with yes, which ``say_yes`` tells the other machine; None after a no.

    If the other machine leaves first, the error of ``hearing`` ends the question.
    """
    asked, heard = asyncio.ensure_future(question), asyncio.ensure_future(hearing)
    try:
        await asyncio.wait((asked, heard), return_when=asyncio.FIRST_COMPLETED)
        if heard.done():
            heard.result()
        if not await asked:
            return None
        say_yes()
        return await heard
    finally:
        await stop(asked, heard)


async def first(*events: asyncio.Future[Any]) -> None:
    """Wait for one of ``events``."""
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
