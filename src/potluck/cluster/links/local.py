"""The connection between a command and the agent of its machine: both ends."""

from __future__ import annotations

import asyncio

from potluck.cluster.home.node_state import find_agent
from potluck.cluster.trust.credentials import load_credentials
from potluck.errors import ConfigurationError, LinkError
from potluck.settings import Settings
from potluck.transport import aio
from potluck.wire import local
from potluck.wire.jobs import JobEnded
from potluck.wire.messages import Hello

CLIENT = "client"
"""The ``kind`` in the greeting of this machine's commands."""

_MAX_UNSENT = 8 << 20


class Waiting:
    """A command that waits for its job, as the agent sees it. What it does not read in time is
    left out, but for how the job ended."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    @property
    def unsent(self) -> int:
        """Bytes that wait to be read by it."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: local.Reply) -> None:
        """Tell it, without blocking."""
        is_end = isinstance(message, local.Outcome | JobEnded)
        if not self._writer.transport.is_closing() and (is_end or self.unsent < _MAX_UNSENT):
            self._writer.write(local.REPLY.encode(message))


async def read_request(reader: asyncio.StreamReader) -> local.Request | None:
    """What the command asks next; None when it is gone."""
    try:
        return await aio.receive(reader, local.REQUEST)
    except (asyncio.IncompleteReadError, OSError):
        return None


async def read_reply(reader: asyncio.StreamReader) -> local.Reply:
    """What the agent answers next; IncompleteReadError or OSError when it is gone."""
    return await aio.receive(reader, local.REPLY)


async def call_agent(settings: Settings) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to this machine's agent; ConfigurationError if none runs here."""
    record = find_agent(settings.home)
    if record is None:
        raise ConfigurationError("no agent runs on this machine; start it with: potluck up")
    credentials = load_credentials(settings)
    hello = Hello(CLIENT, credentials.namespace)
    reader, writer, _ = await aio.connect("127.0.0.1", record.port, hello, credentials)
    return reader, writer


async def ask_agent(settings: Settings, request: local.Request, *, timeout_s: float) -> local.Reply:
    """What this machine's agent answers to ``request``.

    ConfigurationError if none runs here; LinkError if it does not answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await call_agent(settings)
            try:
                writer.write(local.REQUEST.encode(request))
                return await read_reply(reader)
            finally:
                await aio.end(writer)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        why = str(error) or f"no answer within {timeout_s:g} s"
        raise LinkError(f"this machine's agent did not answer: {why}") from error
