"""``Finder``: the interface of the ways to find peers; ``Presence``: this process's own adverts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from potluck._core.cluster.discovery.advert import (
    ADVERT_VERSION,
    Advert,
    Hint,
    is_genuine,
    make_advert,
    window_at,
)

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


@dataclass(frozen=True, slots=True)
class Presence:
    """The adverts that this process sends, and the keys by which it recognises others.

    ``keys()`` returns the keys of tags (32 bytes each): the first is used for this process's
    adverts, and adverts under any of them are recognised. With ``port`` 0 the process sends no
    adverts. ``clock`` is Unix time.
    """

    keys: Callable[[], Sequence[bytes]]
    port: int
    instance: bytes
    clock: Callable[[], float] = time.time

    def advert(self) -> Advert:
        """The advert to send now."""
        return make_advert(self.keys()[0], self.port, self.instance, self._window())

    def recognises(self, advert: Advert) -> bool:
        """Whether this advert was made by another process that holds one of the keys, at whatever
        time. Takes about 5 us."""
        if advert.version != ADVERT_VERSION or not advert.port or advert.instance == self.instance:
            return False
        return any(is_genuine(advert, key) for key in self.keys())

    def hint(self, advert: Advert, host: str, source: str) -> Hint:
        """The hint of ``advert``, which came from ``host`` by the finder ``source``."""
        is_current = abs(advert.window - self._window()) <= 1
        return Hint(host, advert.port, source, advert.instance.hex(), is_current)

    def _window(self) -> int:
        return window_at(self.clock())
