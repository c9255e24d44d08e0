"""``Link``: an ordered, reliable, authenticated byte channel between two ranks.

Links never block. One thread, the progress loop of the engine, makes every call on a link after
the handshake. Implementations: ``inproc.py`` (threads of one process; one for each loop),
``tcp.py`` (TLS 1.3). A link between workers of one node may have memory that both map
(``link_memory.py``), so that payloads need not cross the socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from potluck._core.transport.link_memory import LinkMemory


class Link(Protocol):
    memory: LinkMemory | None
    """Shared memory for payloads, when both ends run on one node and could map it."""

    @property
    def stream(self) -> Any:
        """The native core's end of this link, None if there is none.

        A loop that takes it over makes no other call here but ``close``, when it no longer uses it.
        """

    @property
    def peer(self) -> str:
        """The other end, for errors: ``10.0.0.7:52416 (node 3f2a91)``."""

    def fileno(self) -> int:
        """A descriptor to select on, or -1: then the link calls its waker instead."""

    def bind(self, wake: Callable[[], None]) -> None:
        """If fileno() is -1: what to call, from any thread, when bytes or room may have come."""

    def send(self, data: memoryview) -> int:
        """Take some bytes of ``data``; 0 means: full now, try when writable.

        Bytes that were not taken must be offered again, before any others and no fewer: TLS may
        have encrypted them already. An empty view gives 0. Raises LinkError when the link has
        ended.
        """

    def recv_into(self, buffer: memoryview) -> int:
        """Put some bytes into ``buffer``; 0 means: none now.

        Raises LinkError at the end of the link, after the bytes that came before it. One call may
        give only part of what has come: call again until 0 or the error.
        """

    @property
    def readable(self) -> bool:
        """True when recv_into has bytes that the descriptor does not show (decrypted already)."""

    def close(self) -> None:
        """End the link at once. Idempotent."""
