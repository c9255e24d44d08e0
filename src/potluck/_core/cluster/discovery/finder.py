"""``Finder``: the interface of the ways to find peers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.discovery.presence import Presence

OnHint = Callable[[Hint], None]
"""``on_hint(hint)`` is called in the event loop, repeatedly for the same address. Must not
block."""


class Finder(Protocol):
    """A way to find peers and be found, in an asyncio loop, from ``start`` to ``close``."""

    @property
    def name(self) -> str:
        """The ``source`` of its hints: ``mdns``, ``beacon`` or ``static``."""

    async def start(self, presence: Presence, on_hint: OnHint) -> None:
        """Advertise ``presence`` and report hints about other nodes, until ``close``.

        If the network does not work (no interface is up, a port is taken), it tries again, without
        an error.
        """

    async def close(self) -> None:
        """Withdraw the advert, if the protocol can, and release all resources. Idempotent."""


@contextlib.asynccontextmanager
async def running_finders(
    finders: Sequence[Finder], presence: Presence, on_hint: OnHint
) -> AsyncIterator[None]:
    """Run ``finders`` while the body runs."""
    try:
        for finder in finders:
            await finder.start(presence, on_hint)
        yield
    finally:
        for finder in finders:
            await finder.close()
