"""The interface of every way to find peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from potluck.cluster.discovery.advert import Hint, Presence

OnHint = Callable[[Hint], None]
"""Called in the loop, again and again for the same address; must not block."""


class Finder(Protocol):
    """One way to be found and to find, from ``start`` to ``close``, in one asyncio loop."""

    @property
    def name(self) -> str:
        """``mdns``, ``beacon`` or ``static``: the ``source`` of its hints."""

    async def start(self, presence: Presence, on_hint: OnHint) -> None:
        """Make ``presence`` known and report who else is there, until close().

        A network that does not work now (no interface is up, a port is taken) is tried again by
        and by; it is no error.
        """

    async def close(self) -> None:
        """Say goodbye where that is usual, and give everything back. Idempotent."""
