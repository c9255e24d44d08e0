"""Control links: bounded messages over the asyncio streams of a greeted connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from potluck.errors import LinkError
from potluck.transport.aio import end
from potluck.wire import control
from potluck.wire.prefix import PREFIX_BYTES

T = TypeVar("T")

_MAX_UNSENT = 4 << 20


class ControlLink(Generic[T]):
    """One end of a control connection; ``decode`` turns a body into what the other end may say.

    Sending never blocks: a peer that does not read makes the link end once ``_MAX_UNSENT`` bytes
    wait for it.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decode: Callable[[bytes], T],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decode = decode

    async def receive(self) -> T:
        """The next message; LinkError at the end, ProtocolError for anything else."""
        try:
            prefix = await self._reader.readexactly(PREFIX_BYTES)
            body = await self._reader.readexactly(control.message_length(prefix))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkError(f"the control link ended: {error}") from error
        return self._decode(body)

    def send(self, message: control.FromClient | control.FromAgent) -> None:
        """Have ``message`` sent. What follows the end of the link is dropped."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(control.encode(message))
        if transport.get_write_buffer_size() > _MAX_UNSENT:
            transport.abort()

    async def flush(self, timeout_s: float) -> None:
        """Wait until what was sent is on its way, at most ``timeout_s``."""
        transport = self._writer.transport
        transport.set_write_buffer_limits(high=1, low=0)  # with 0 and 0 drain() never returns
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()

    def abort(self) -> None:
        """End the link at once; receive() raises."""
        self._writer.transport.abort()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Have everything sent, then end."""
        await self.flush(timeout_s)
        await end(self._writer)
