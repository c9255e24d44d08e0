"""Greetings and messages over asyncio streams, for the control plane: the TLS, limits and errors of
links.

``connect`` is the client's half of a greeting, ``Server`` the server's. A ``MessageLink`` carries
the messages that follow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Generic, TypeVar

from potluck._core import forks
from potluck._core.background import OnBroken, start_task, stop
from potluck._core.transport import broker, listener
from potluck._core.transport.binding import source_for
from potluck._core.transport.credentials import Credentials, Identity, identity_of_certificate
from potluck._core.transport.failures import translated
from potluck._core.transport.handshake import check_identity, hear_knock, knock, objection, welcomed
from potluck._core.transport.tcp import tune
from potluck._core.wire.format import PREFIX_BYTES, MessageFormat, UnknownMessage
from potluck._core.wire.greeting import (
    GREETING,
    Greeting,
    Hello,
    Welcome,
    sent_greeting,
)
from potluck._core.wire.versions import NEWEST
from potluck.errors import LinkError, ProtocolError, Refused, SecurityError

_log = logging.getLogger(__name__)

_MAX_TOLD = 16

T = TypeVar("T")
Received = TypeVar("Received")
Sent = TypeVar("Sent")

Greeted = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Hello, str], Awaitable[None]]
"""``greeted(reader, writer, hello, node)`` answers an authenticated client and serves it."""


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
    writer.write(sent_greeting(message))
    await writer.drain()


def peer_identity(writer: asyncio.StreamWriter) -> Identity:
    """The identity that the peer's certificate proved."""
    tls = writer.get_extra_info("ssl_object")
    return identity_of_certificate(tls.getpeercert(binary_form=True))


class Unwanted(Exception):
    """``connect`` found a node that its caller does not want; nothing was said to it."""


async def connect(
    host: str,
    port: int,
    hello: Hello,
    credentials: Credentials,
    *,
    timeout_s: float = 5.0,
    bind: str = "",
    wanted: Callable[[str], bool] = lambda node: True,
    opened: socket.socket | None = None,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Welcome]:
    """One attempt to connect and be welcomed; errors as for ``handshake.connect``.

    ``bind``: the interface or address to call from; empty for any. ``wanted(node)`` is asked once
    the server has proved its identity, before HELLO; Unwanted if not. ``opened`` is a connection to
    the server, which is closed if this fails; without one it is called.
    """
    peer, doing = f"{host}:{port}", "connecting"
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            sock = opened or await dial(host, port, bind)
            doing = "knocking"
            try:
                if not broker.is_needed():  # which has knocked
                    await listener.finish(knock(sock, credentials.eras), sock)
            except BaseException:
                sock.close()
                raise
            doing = "setting up TLS"
            # Not ``start_tls``: the streams are not told of a handshake that fails, and a wait for
            # their end would not return.
            create = asyncio.get_running_loop().create_connection
            context = credentials.client_context
            reader, writer = await _streams(
                partial(create, sock=sock, ssl=context, server_hostname="")
            )
            server = peer_identity(writer)
            peer = f"{peer} (node {server.node[:12]})"
            check_identity(server, peer, credentials)
            if not wanted(server.node):
                raise Unwanted(peer)
            doing = "waiting for WELCOME"
            await write_greeting(writer, hello)
            answer = await read_greeting(reader)
        return reader, writer, welcomed(answer, peer)
    except BaseException as error:
        if writer is not None:
            await end(writer)
        if isinstance(error, OSError):
            raise translated(error, peer, doing) from error
        if isinstance(error, ProtocolError | SecurityError):
            raise type(error)(f"{peer}, {doing}: {error}") from error
        raise


async def dial(host: str, port: int, bind: str = "") -> socket.socket:
    """A connected non-blocking socket to the first address of ``host`` that answers, called from
    the interface or address ``bind`` (empty: any); OSError if none does. In a sandbox the broker
    has knocked there. No deadline."""
    if broker.is_needed():
        with broker.dialling(host, port) as (asking, steps):
            return await listener.finish(steps, asking)
    loop = asyncio.get_running_loop()
    kind = socket.SOCK_STREAM
    try:
        addresses = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name: the system looks it up, in a thread
        addresses = await loop.getaddrinfo(host, port, type=kind)
    failure = OSError(f"the name {host!r} has no address")
    for family, kind, protocol, _, address in addresses:
        with forks.opening() as mine:
            sock = mine(socket.socket(family, kind, protocol))
        try:
            sock.setblocking(False)
            tune(sock)
            source = source_for(bind, str(address[0]))
            if source:
                numeric = socket.AI_NUMERICHOST
                sock.bind(socket.getaddrinfo(source, 0, family, flags=numeric)[0][4])
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


class Server:
    """Listens on ``host:port`` (0: any; see ``port``) from construction to ``close``, and runs
    ``greeted`` in a task of its own for each caller.

    A caller reaches ``greeted`` once TLS is up and its HELLO has a version that is spoken here;
    ``greeted`` writes WELCOME or REFUSAL. The connection ends when it returns. After
    ``on_broken(error)`` no connection is accepted. ConfigurationError if the port can't be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        greeted: Greeted,
        *,
        limits: listener.Limits = listener.LIMITS,
        on_broken: OnBroken = lambda error: None,
    ) -> None:
        self._sock = listener.listening_socket(host, port)
        self.port = self._sock.port
        self._credentials = credentials
        self._greeted = greeted
        self._limits = limits
        acceptor = listener.Acceptor(self._sock, self._greet, limits, awaits="HELLO")
        self._accepting = start_task(
            acceptor.run, name=f"accepting connections on port {self.port}", on_broken=on_broken
        )

    async def close(self) -> None:
        """Stop listening and end every connection; waits until their tasks are gone."""
        await stop(self._accepting)
        self._sock.close()  # for a task that had not begun

    async def _greet(self, caller: listener.Caller) -> None:
        await listener.finish(hear_knock(caller.sock, self._credentials.eras), caller.sock)
        reader, writer = await _secure(caller.sock, self._credentials, self._limits.timeout_s)
        try:
            client = peer_identity(writer)
            refusal = self._credentials.refusal_of(client)
            if refusal is not None:  # before anything that it says is read
                caller.has_spoken = False  # the first to go where room is needed
                await write_greeting(writer, refusal)
                await _drain(reader, self._limits.drain_bytes)
                raise Refused(
                    f"node {client.node[:12]} was refused: {refusal.reason}", refusal.code
                )
            try:
                hello = await read_greeting(reader)
            except LinkError as error:  # a member that has a link to here by another address
                _log.debug("%s: %s", caller.peer, error)
                return
            if not isinstance(hello, Hello):
                raise ProtocolError("the peer began with something else than HELLO")
            refusal = objection(hello, client, self._credentials)
            if refusal is not None:
                await write_greeting(writer, refusal)
                return
            caller.authenticated()
            await self._greeted(reader, writer, hello, client.node)
        finally:
            await end(writer)


async def _secure(
    sock: socket.socket, credentials: Credentials, timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over the server's side of TLS (``asyncio.start_server`` can't bound who waits)."""
    create = asyncio.get_running_loop().connect_accepted_socket
    context = credentials.server_context
    return await _streams(
        partial(create, sock=sock, ssl=context, ssl_handshake_timeout=timeout_s),
        limit=GREETING.limit,
    )


class _KeepsItsTransport(asyncio.StreamReaderProtocol):
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        super().connection_made(transport)


async def _streams(
    create: Callable[[Callable[[], _KeepsItsTransport]], Awaitable[object]], limit: int = 1 << 16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over the connection that ``create(make_protocol)`` makes. asyncio leaves one open
    that is made in the moment in which its maker is cancelled: it waits for the peer to end it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = _KeepsItsTransport(reader, loop=loop)
    try:
        await create(lambda: protocol)
        assert protocol.transport is not None
        return reader, asyncio.StreamWriter(protocol.transport, protocol, reader, loop)
    except BaseException:
        if protocol.transport is not None:
            protocol.transport.abort()
        raise


async def _drain(reader: asyncio.StreamReader, count: int) -> None:
    """Discard what the caller sends until it hangs up: to end the connection over unread bytes
    would reset it, and the refusal would be lost."""
    with contextlib.suppress(OSError):  # which a TimeoutError is, too
        async with asyncio.timeout(listener.DRAIN_S):
            while count > 0 and (some := await reader.read(GREETING.limit)):
                count -= len(some)


async def end(writer: asyncio.StreamWriter) -> None:
    """End the connection at once, whatever the peer does."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@dataclass(eq=False, repr=False)
class MessageLink(Generic[Received, Sent]):
    """Messages in both directions over a greeted connection; ``received`` and ``sent`` are the
    formats of those that the other side and this side may send.

    Sending never blocks. If the other side does not read, the link ends once ``max_unsent`` bytes
    wait to be sent. ``version`` is the one of the protocol that both sides speak: a message that
    the other side does not know is not sent, one that this side does not know is dropped.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _: KW_ONLY
    received: MessageFormat[Received]
    sent: MessageFormat[Sent]
    max_unsent: int = 4 << 20
    version: int = NEWEST

    def __post_init__(self) -> None:
        self.reason = ""
        """Why this side ended the link; empty if it did not."""
        self._dropped: set[str] = set()

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return self.writer.transport.get_write_buffer_size()

    async def receive(self) -> Received:
        """The next message. LinkError when the link has ended, ProtocolError for bytes that are no
        message. No deadline."""
        while True:
            try:
                return await receive(self.reader, self.received)
            except UnknownMessage as error:
                self.drop(error)
            except (asyncio.IncompleteReadError, OSError) as error:
                raise LinkError(self.reason or "the other side ended the link") from error

    def drop(self, unknown: UnknownMessage) -> None:
        """A message of another release was dropped: say so, once for each type."""
        if unknown.kind not in self._dropped and len(self._dropped) < _MAX_TOLD:
            self._dropped.add(unknown.kind)
            _log.warning("dropped a message of another release of potluck: %s", unknown)

    def send(self, message: Sent) -> bool:
        """Send ``message``, without blocking; False, and dropped, if the link has ended or the
        other side does not know such messages."""
        if self.writer.transport.is_closing() or not self.sent.is_known(message, self.version):
            return False
        self.writer.write(self.sent.encode(message))
        if self.unsent > self.max_unsent:
            self.abort("it does not read what it is sent")
        return True

    async def flush(self, timeout_s: float) -> None:
        """Wait until all sent messages were handed to the system, at most ``timeout_s``."""
        transport = self.writer.transport
        transport.set_write_buffer_limits(high=1, low=0)  # with 0 and 0 drain() never returns
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                await self.writer.drain()

    def abort(self, reason: str = "") -> None:
        """End the link at once; ``receive`` raises."""
        self.reason = reason
        self.writer.transport.abort()

    async def close(self) -> None:
        """End the link at once, whatever the other side does. Returns when it has ended."""
        await end(self.writer)
