"""The control link between a worker and its agent: bounded messages over a greeted connection."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Generic, TypeVar

from potluck.errors import LinkError
from potluck.transport.aio import end, receive
from potluck.wire.format import MessageFormat

Received = TypeVar("Received")
Sent = TypeVar("Sent")

_MAX_UNSENT = 4 << 20


class ControlLink(Generic[Received, Sent]):
    """One end of a control link. ``received`` and ``sent`` are the formats of the messages that the
    other end and this end may send.

    Sending never blocks. If the other end does not read, the link ends once ``_MAX_UNSENT`` bytes
    wait to be sent.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        received: MessageFormat[Received],
        sent: MessageFormat[Sent],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._received = received
        self._sent = sent

    async def receive(self) -> Received:
        """The next message. LinkError when the link has ended, ProtocolError for bytes that are no
        message."""
        try:
            return await receive(self._reader, self._received)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkError(f"the control link ended: {error}") from error

    def send(self, message: Sent) -> None:
        """Send ``message``, without blocking; dropped if the link has ended."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(self._sent.encode(message))
        if transport.get_write_buffer_size() > _MAX_UNSENT:
            transport.abort()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all sent messages were handed to the system, at most ``timeout_s``."""
        transport = self._writer.transport
        transport.set_write_buffer_limits(high=1, low=0)  # with 0 and 0 drain() never returns
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()

    def abort(self) -> None:
        """End the link at once; receive() raises."""
        self._writer.transport.abort()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Flush, at most ``timeout_s``, then end the link."""
        await self.flush(timeout_s)
        await end(self._writer)
