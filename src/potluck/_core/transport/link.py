"""``Link``: an ordered, reliable, authenticated byte channel between two ranks.

Links never block. One thread, the progress loop of the engine, makes every call on a link after
the handshake. Implementations: ``inproc.py`` (threads of one process; one for each loop),
``tcp.py`` (TLS 1.3). A link between workers of one node may have memory that both map
(``link_memory.py``), so that payloads need not cross the socket.

``Connector`` makes the links of one group for the progress loop. Implementations:
``engine/mesh.py`` (TCP), ``backends/inprocess.py`` (threads of one process). ``send_all``,
``receive`` and their kin use a link the plain way, for a few bytes before the engine takes over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from potluck._core.system import wait_ready
from potluck._core.transport.link_memory import LinkMemory
from potluck._core.transport.tcp import TcpLink
from potluck._core.wire.format import PREFIX_BYTES, MessageFormat
from potluck.errors import LinkError


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


Deliver = Callable[[int, Link], None]
"""``deliver(rank, link)``: a link to ``rank`` is there. Called from any thread."""

Fail = Callable[[int, Exception], None]
"""``fail(rank, error)``: no link to ``rank`` can be had."""


class Connector(Protocol):
    @property
    def is_native(self) -> bool:
        """Whether its links are the native core's, so that the native loop can run them."""

    def start(self, deliver: Deliver, fail: Fail) -> None:
        """Deliver links from now on, also those that peers have asked for."""

    def request(self, rank: int) -> None:
        """A link to ``rank`` is wanted. Returns at once; asking again changes nothing."""

    def close(self, error: BaseException) -> None:
        """No more links: attempts under way end, links delivered later are closed.

        ``error`` is why the group is over here; peers that ask for a link are told.
        """


T = TypeVar("T")


def send_all(link: TcpLink, data: bytes, deadline: float) -> None:
    """Send all of ``data``; LinkError if that takes longer than ``deadline`` (monotonic)."""
    left = memoryview(data)
    while left:
        taken = link.send(left)
        left = left[taken:]
        if not taken:
            _wait(link, deadline, write=True)


def recv_exactly(link: TcpLink, count: int, deadline: float) -> bytes:
    """The next ``count`` bytes; LinkError if they do not come by ``deadline`` (monotonic)."""
    buffer = bytearray(count)
    left = memoryview(buffer)
    while left:
        taken = link.recv_into(left)
        left = left[taken:]
        if not taken and not link.readable:
            _wait(link, deadline, write=False)
    return bytes(buffer)


def receive(link: TcpLink, messages: MessageFormat[T], deadline: float) -> T:
    """The next message; LinkError if it does not come by ``deadline`` (monotonic), ProtocolError if
    it is none of these."""
    length = messages.length(recv_exactly(link, PREFIX_BYTES, deadline))
    return messages.decode(recv_exactly(link, length, deadline))


def has_come(link: TcpLink, seconds: float) -> bool:
    """Whether there is something to receive, or the link has ended, within so long."""
    return link.readable or wait_ready(link.fileno(), write=False, timeout_s=seconds)


def _wait(link: TcpLink, deadline: float, *, write: bool) -> None:
    left = deadline - time.monotonic()
    if left <= 0 or not wait_ready(link.fileno(), write=write, timeout_s=left):
        raise LinkError(f"{link.peer} did not answer in time")
