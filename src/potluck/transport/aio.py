"""The same greeting for asyncio streams, for the control plane: same TLS, same bounds, same errors.

``serve`` is the listener's twin: at most ``max_pending`` callers that have not proved who they are,
each with ``hello_timeout_s`` in all. ``connect`` is the client's half.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

from potluck.errors import LinkError, PotluckError, ProtocolError
from potluck.transport.credentials import (
    Credentials,
    namespace_of_certificate,
    node_id_of_certificate,
)
from potluck.transport.door import Door
from potluck.transport.failures import translated
from potluck.transport.handshake import check_node, objection, welcomed
from potluck.transport.listener import listening_socket
from potluck.transport.rate import RateLimitedLog
from potluck.transport.tcp import tune
from potluck.wire.format import PREFIX_BYTES, MessageFormat
from potluck.wire.messages import GREETING, Greeting, Hello, Welcome

T = TypeVar("T")

_log = logging.getLogger(__name__)

Greeted = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Hello, str], Awaitable[None]]
"""``greeted(reader, writer, hello, node)``: a caller proved itself; answer it and talk to it."""


async def receive(reader: asyncio.StreamReader, messages: MessageFormat[T]) -> T:
    """The next message; IncompleteReadError or OSError at the end of the stream, ProtocolError for
    anything else. No deadline."""
    prefix = await reader.readexactly(PREFIX_BYTES)
    return messages.decode(await reader.readexactly(messages.length(prefix)))


async def read_greeting(reader: asyncio.StreamReader) -> Greeting:
    """The next greeting; LinkError if the peer ends, ProtocolError if it is none. No deadline."""
    try:
        return await receive(reader, GREETING)
    except asyncio.IncompleteReadError as error:
        raise LinkError("the peer closed the connection before its greeting was whole") from error


async def write_greeting(writer: asyncio.StreamWriter, message: Greeting) -> None:
    """Send one greeting and wait until the socket took it. No deadline."""
    writer.write(GREETING.encode(message))
    await writer.drain()


def peer_node(writer: asyncio.StreamWriter) -> str:
    """The node id that the peer's certificate proved."""
    tls = writer.get_extra_info("ssl_object")
    return node_id_of_certificate(tls.getpeercert(binary_form=True))


def shown_namespace(writer: asyncio.StreamWriter) -> str:
    """The cluster under whose secret the peer's certificate was issued."""
    tls = writer.get_extra_info("ssl_object")
    return namespace_of_certificate(tls.getpeercert(binary_form=True))


class Unwanted(Exception):
    """``connect`` found a node that its caller does not want; nothing was said to it."""


async def connect(
    host: str,
    port: int,
    hello: Hello,
    credentials: Credentials,
    *,
    timeout_s: float = 5.0,
    wanted: Callable[[str], bool] = lambda node: True,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Welcome]:
    """One attempt to connect and be welcomed; errors as for ``handshake.connect``.

    ``wanted(node)`` is asked once the server has proved who it is, before HELLO; Unwanted if not.
    """
    peer = f"{host}:{port}"
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=credentials.client_context, server_hostname=""
            )
            node = peer_node(writer)
            peer = f"{peer} (node {node[:12]})"
            check_node(node, peer, credentials)
            if not wanted(node):
                raise Unwanted(peer)
            await write_greeting(writer, hello)
            answer = await read_greeting(reader)
        return reader, writer, welcomed(answer, peer)
    except BaseException as error:
        if writer is not None:
            await end(writer)
        if isinstance(error, OSError):
            raise translated(error, peer, "connecting") from error
        raise


class Server:
    """The listener's twin for asyncio: see ``serve``. ``port`` is the one it listens on."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        greeted: Greeted,
        hello_timeout_s: float,
        max_pending: int,
    ) -> None:
        self.port: int = sock.getsockname()[1]
        self._credentials = credentials
        self._greeted = greeted
        self._hello_timeout_s = hello_timeout_s
        self._max_pending = max_pending
        self._complain = RateLimitedLog(_log)
        # In order of arrival, each with its socket until its task begins and takes it over.
        self._strangers: dict[asyncio.Task[None], socket.socket | None] = {}
        self._known: set[asyncio.Task[None]] = set()
        self._door = Door(sock, self._arrived, self._complain)

    async def close(self) -> None:
        """Stop listening and end every connection; waits until their tasks are gone."""
        self._door.close()
        tasks = [*self._strangers, *self._known]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _arrived(self, sock: socket.socket, peer: str) -> None:
        if len(self._strangers) >= self._max_pending:
            self._drop_oldest()
            self._complain.warning(
                f"more than {self._max_pending} connections have not said HELLO: "
                "dropping the oldest"
            )
        task = asyncio.create_task(self._greet(sock, peer))
        self._strangers[task] = sock
        task.add_done_callback(self._forget)

    def _drop_oldest(self) -> None:
        """End who has been silent longest. It leaves the count now, not when its task has ended: of
        a crowd that arrives in one turn of the loop each makes another one go."""
        task = next(iter(self._strangers))
        sock = self._strangers.pop(task)
        if sock is not None:
            sock.close()
        self._known.add(task)
        task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        sock = self._strangers.pop(task, None)
        if sock is not None:  # cancelled before it began
            sock.close()
        self._known.discard(task)

    async def _greet(self, sock: socket.socket, peer: str) -> None:
        writer = None
        task = asyncio.current_task()
        assert task is not None
        self._strangers[task] = None
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                tune(sock)
                await _readable(sock)  # who says nothing costs no TLS state (300 KiB)
                self._strangers[task] = self._strangers.pop(task)  # not among the silent any more
                reader, writer = await _secure(sock, self._credentials, self._hello_timeout_s)
                node = peer_node(writer)
                hello = await read_greeting(reader)
                if not isinstance(hello, Hello):
                    raise ProtocolError("the peer began with something else than HELLO")
                refusal = objection(hello, node, self._credentials)
                if refusal is not None:
                    await write_greeting(writer, refusal)
                    return
            self._strangers.pop(task, None)
            self._known.add(task)
            await self._greeted(reader, writer, hello, node)
        except TimeoutError:
            self._complain.warning(f"dropped {peer}: no HELLO in {self._hello_timeout_s:g} s")
        except OSError as error:
            self._complain.warning(str(translated(error, peer, "greeting it")))
        except PotluckError as error:
            self._complain.warning(f"dropped {peer}: {error}")
        except Exception:
            _log.exception("the connection of %s failed", peer)
        finally:
            if writer is None:
                sock.close()
            else:
                await end(writer)


async def serve(
    host: str,
    port: int,
    credentials: Credentials,
    greeted: Greeted,
    *,
    hello_timeout_s: float = 5.0,
    max_pending: int = 64,
) -> Server:
    """Listen on ``host:port`` (0: any) and run ``greeted`` in a task of its own for each caller.

    A caller reaches ``greeted`` once TLS is up and its HELLO has this version and cluster;
    ``greeted`` writes WELCOME or REFUSAL. The connection ends when it returns.
    ConfigurationError if the port can't be had.
    """
    sock = listening_socket(host, port)
    return Server(sock, credentials, greeted, hello_timeout_s, max_pending)


async def _secure(
    sock: socket.socket, credentials: Credentials, timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over the server's side of TLS (``asyncio.start_server`` can't bound who waits)."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=GREETING.limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        sock,
        ssl=credentials.server_context,
        ssl_handshake_timeout=timeout_s,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(sock, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(sock)


async def end(writer: asyncio.StreamWriter) -> None:
    """End the connection at once, whatever the peer does."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
