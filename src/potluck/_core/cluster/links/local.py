"""The connection between a command and the agent of its machine: both ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from potluck._core.background import Tasks, stop
from potluck._core.cluster.home.node_state import AgentRecord, find_agent
from potluck._core.cluster.trust.credentials import load_admissions, load_node_credentials
from potluck._core.settings import Settings
from potluck._core.transport import aio
from potluck._core.wire import local
from potluck._core.wire.greeting import Hello, Welcome, common_version
from potluck._core.wire.jobs import JobEnded
from potluck.errors import ConfigurationError, LinkError, PotluckError, Refused

CLIENT = "client"
"""The ``kind`` in the greeting of this machine's commands."""

_log = logging.getLogger(__name__)

_MAX_UNSENT = 8 << 20


class Client(Protocol):
    """A command of this machine, as the agent sees it."""

    @property
    def is_behind(self) -> bool:
        """Whether the command reads too slowly, so that workers here must stop writing."""

    def take(self, message: local.Reply) -> None:
        """Take ``message`` of the agent, without blocking."""


class _Connected:
    """A command with a connection. Replies to a command that does not read are dropped, so that
    workers never wait for it; the last reply, with the outcome, never is."""

    is_behind = False

    def __init__(self, link: aio.MessageLink[local.Request, local.Reply]) -> None:
        self._link = link

    def take(self, message: local.Reply) -> None:
        """Send ``message`` to the command, without blocking."""
        is_end = isinstance(message, local.CommandResult | JobEnded)
        if is_end or self._link.unsent < _MAX_UNSENT:
            self._link.send(message)


Answer = Callable[[Any, Client], Coroutine[Any, Any, local.Reply | None]]
"""``answer(request, client)``: the reply to a command; None if there is none, or several, which the
function gives to ``client`` by itself. A PotluckError or OSError is a CommandResult that is not
``ok``."""


class Commands:
    """The commands of this machine. Each request goes to the function that was registered for its
    type."""

    def __init__(self) -> None:
        self.on_gone: list[Callable[[Client], None]] = []
        """Called with each command that has left."""
        self._answers: dict[type, Answer] = {}

    def on(self, request: type[local.Request], answer: Answer) -> None:
        """Register ``answer`` for requests of this type. It runs as a task, which is cancelled when
        the command leaves."""
        self._answers[request] = answer

    async def greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        """Serve the connection of a command: answer its requests until it leaves."""
        await aio.write_greeting(writer, Welcome())
        link = aio.MessageLink(
            reader,
            writer,
            received=local.REQUEST,
            sent=local.REPLY,
            max_unsent=2 * _MAX_UNSENT,
            version=common_version(hello),
        )
        client = _Connected(link)
        tasks = Tasks()

        def answered(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a command's request could not be answered", exc_info=error)
                link.abort()

        try:
            while True:
                request = await link.receive()
                task = tasks.start(self.answer(request, client))
                task.add_done_callback(answered)
        except LinkError:  # the command has left
            pass
        finally:
            await stop(*tasks)
            for tell in self.on_gone:
                tell(client)

    async def answer(self, request: local.Request, client: Client) -> None:
        """Have the registered function answer ``request`` of ``client``."""
        reply: local.Reply | None
        try:
            reply = await self._answers[type(request)](request, client)
        except (PotluckError, OSError) as error:
            reply = local.CommandResult(False, str(error)[:4000])
        if reply is not None:
            client.take(reply)


def running_agent(settings: Settings) -> AgentRecord:
    """This machine's agent; ConfigurationError if none runs."""
    record = find_agent(settings.home)
    if record is None:
        raise ConfigurationError("no agent runs on this machine; start it with: potluck up")
    return record


async def call_agent(
    settings: Settings, agent: AgentRecord | None = None
) -> aio.MessageLink[local.Reply, local.Request]:
    """A connection to ``agent``, by default this machine's. ConfigurationError if none runs here,
    or if another node answers at its port; Refused if this machine is banned."""
    record = agent or running_agent(settings)
    credentials = load_node_credentials(settings)
    if reason := load_admissions(settings).objects_to(credentials.node_id):
        raise Refused(
            f"this machine is out of its cluster: {reason}. An admin takes a ban back with "
            f"`potluck unban {credentials.node_id[:12]}`; to enter another cluster: potluck join "
            "--replace",
            "revoked",
        )
    hello = Hello(CLIENT)
    try:
        reader, writer, welcome = await aio.connect(
            "127.0.0.1",
            record.port,
            hello,
            credentials,
            wanted=lambda node: node == credentials.node_id,
        )
    except aio.Unwanted as error:
        raise ConfigurationError(
            f"at port {record.port} of this machine, where its agent should be, answers {error}: "
            "another node's agent. Stop it, or start this one's again: potluck up"
        ) from None
    return aio.MessageLink(
        reader,
        writer,
        received=local.REPLY,
        sent=local.REQUEST,
        version=common_version(welcome),
    )


async def ask_agent(
    settings: Settings,
    request: local.Request,
    *,
    timeout_s: float,
    agent: AgentRecord | None = None,
) -> local.Reply:
    """The reply of ``agent``, by default this machine's, to ``request``.

    ConfigurationError if no agent runs here; LinkError if it does not answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            link = await call_agent(settings, agent)
            try:
                if not link.sent.is_known(request, link.version):
                    raise ConfigurationError(
                        "this machine's agent runs an older potluck, which can't do this: end it "
                        "and start it again: potluck up"
                    )
                link.send(request)
                return await link.receive()
            except LinkError as error:
                raise LinkError(f"this machine's agent did not answer: {error}") from error
            finally:
                await link.close()
    except TimeoutError as error:
        why = f"no answer within {timeout_s:g} s"
        raise LinkError(f"this machine's agent did not answer: {why}") from error
