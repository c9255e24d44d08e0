"""The knock, for tests that speak to a port byte by byte: on sockets, and as asyncio streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time

from potluck._core.transport.credentials import Credentials
from potluck._core.transport.handshake import drive, hear_knock, knock
from potluck._core.transport.knock import ANSWER_BYTES, Knock
from support.links import new_credentials


def raw(port: int) -> socket.socket:
    """A blocking connection to ``port`` of this machine, on which nothing was said."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(30)
    return sock


def do_knock(sock: socket.socket, credentials: Credentials | None = None) -> None:
    """The caller's half, on a connected socket; without ``credentials`` of a new node."""
    eras = (credentials or new_credentials()).eras
    drive(knock(sock, eras), sock, time.monotonic() + 30, "knocking", "the server")


def do_hear(sock: socket.socket, credentials: Credentials) -> None:
    """The server's half, on an accepted socket."""
    drive(hear_knock(sock, credentials.eras), sock, time.monotonic() + 30, "hearing", "the caller")


def knocked(port: int) -> socket.socket:
    """A blocking connection to ``port`` on which TLS is to begin."""
    sock = raw(port)
    try:
        do_knock(sock)
    except BaseException:
        sock.close()
        raise
    return sock


async def knocked_streams(
    port: int, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over TLS of ``context``, after a right knock."""
    sock = await asyncio.to_thread(knocked, port)
    sock.setblocking(False)
    return await asyncio.open_connection(sock=sock, ssl=context, server_hostname="")


def begin_knock(port: int, mine: Knock) -> tuple[socket.socket, bytes]:
    """A connection on which the call of ``mine`` was sent, and what the server answered."""
    sock = raw(port)
    sock.sendall(mine.call)
    answer = b""
    with contextlib.suppress(ConnectionError):
        while len(answer) < ANSWER_BYTES and (some := sock.recv(ANSWER_BYTES - len(answer))):
            answer += some
    return sock, answer


def untrusting(*, tls_1_2: bool = False) -> ssl.SSLContext:
    """A client that shows no certificate and takes whatever the server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if tls_1_2:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def client_hello() -> bytes:
    """What a TLS client says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        untrusting().wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()
