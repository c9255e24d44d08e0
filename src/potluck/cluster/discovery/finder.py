"""``Finder``: the interface of each way to find peers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from potluck.cluster.discovery.advert import Hint, Presence

OnHint = Callable[[Hint], None]
"""Called in the loop, again and again for the same address; must not block."""


class Finder(Protocol):
    """One way to find peers and be found, in one asyncio loop, from ``start`` to ``close``."""

    @property
    def name(self) -> str:
        """``mdns``, ``beacon`` or ``static``: the ``source`` of its hints."""

    async def start(self, presence: Presence, on_hint: OnHint) -> None:
        """Advertise ``presence`` and report the hints of other nodes, until close().

        A network that does not work at the moment (no interface is up, a port is taken) is no
        error: it is tried again.
        """

    async def close(self) -> None:
        """Withdraw the advert where the protocol can, and release everything. Idempotent."""


@contextlib.asynccontextmanager
async def looking_around(
    finders: Sequence[Finder], presence: Presence, on_hint: OnHint
) -> AsyncIterator[None]:
    """All ``finders`` at work while the body runs."""
    try:
        for finder in finders:
            await finder.start(presence, on_hint)
        yield
    finally:
        for finder in finders:
            await finder.close()
