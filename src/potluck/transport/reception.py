"""The loop that greets strangers: everything before a caller has proved who it is.

One thread, non-blocking sockets. A connection here costs a socket and a few KiB. There are at most
``max_pending`` of them: one more makes the oldest silent one go, so a crowd of idle connections
can't lock out a peer. Each has ``hello_timeout_s`` in all to get as far as its HELLO, however
slowly it drips. What goes wrong with one of them ends that one only, and is worth one log line a
second, whoever sends what. If the loop itself breaks, nobody is greeted any more: ``on_broken``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from potluck.errors import PotluckError
from potluck.service import OnBroken, start_thread, why
from potluck.transport.credentials import Credentials
from potluck.transport.failures import translated
from potluck.transport.handshake import Steps, receive_hello
from potluck.transport.native_tls import TlsSocket
from potluck.transport.rate import RateLimitedLog
from potluck.transport.tcp import secured, tune
from potluck.wire.messages import Hello

_log = logging.getLogger(__name__)

_DRAIN_S = 1.0
_DRAIN_BYTES = 256 * 1024
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Greeted = Callable[[TlsSocket, str, Hello, str], None]
"""``greeted(sock, peer, hello, node)``: takes over a caller that proved to be ``node``."""


@dataclass(slots=True, eq=False)
class _Stranger:
    sock: TlsSocket
    peer: str
    steps: Steps[tuple[Hello, str] | None]
    deadline: float
    waits_for: int = selectors.EVENT_READ
    spoke: bool = False


class Reception:
    """Accepts from ``sock`` until close(), in a thread of its own; calls ``greeted`` there."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        greeted: Greeted,
        *,
        hello_timeout_s: float,
        max_pending: int,
        on_broken: OnBroken,
    ) -> None:
        self._socket = sock
        self._credentials = credentials
        self._greeted = greeted
        self._hello_timeout_s = hello_timeout_s
        self._max_pending = max_pending
        self._complain = RateLimitedLog(_log)
        self._strangers: list[_Stranger] = []
        self._resume_accept_at = 0.0
        self._closing = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = start_thread(
            self._run, name=f"potluck-listener-{sock.getsockname()[1]}", on_broken=on_broken
        )

    def close(self) -> None:
        """Stop listening, drop every stranger, join the thread. Call once."""
        self._closing = True
        with contextlib.suppress(OSError):  # the loop may have seen it and be gone
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for stranger in list(self._strangers):
                self._drop(stranger)
            self._selector.close()
            self._socket.close()

    def _turn(self) -> None:
        now = time.monotonic()
        wakes = [stranger.deadline for stranger in self._strangers]
        if self._resume_accept_at:
            wakes.append(self._resume_accept_at)
        timeout = max(0.0, min(wakes) - now) if wakes else None
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._socket:
                self._accept()
            elif isinstance(key.data, _Stranger) and key.data in self._strangers:
                key.data.spoke = True
                self._advance(key.data)
        now = time.monotonic()
        if self._resume_accept_at and now >= self._resume_accept_at:
            self._resume_accept_at = 0.0
            self._selector.register(self._socket, selectors.EVENT_READ)
        for stranger in [each for each in self._strangers if each.deadline <= now]:
            self._complain.warning(
                f"dropped {stranger.peer}: no HELLO within {self._hello_timeout_s:g} s"
            )
            self._drop(stranger)

    def _accept(self) -> None:
        try:
            sock, address = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self._complain.warning(f"can't accept connections: {error}")
                self._selector.unregister(self._socket)
                self._resume_accept_at = time.monotonic() + 0.1
            return  # else: the peer was gone before it was greeted
        peer = f"{address[0]}:{address[1]}"
        try:
            sock.setblocking(False)
            tune(sock)
            tls = secured(sock, self._credentials, server_side=True)
        except OSError as error:
            sock.close()
            self._complain.warning(str(translated(error, peer, "greeting it")))
            return
        if len(self._strangers) >= self._max_pending:
            silent = [each for each in self._strangers if not each.spoke]
            self._drop((silent or self._strangers)[0])
            self._complain.warning(
                f"more than {self._max_pending} connections have not said HELLO: "
                "dropping the oldest"
            )
        deadline = time.monotonic() + self._hello_timeout_s
        stranger = _Stranger(tls, peer, receive_hello(tls), deadline)
        self._strangers.append(stranger)
        self._selector.register(tls, selectors.EVENT_READ, stranger)
        self._advance(stranger)

    def _advance(self, stranger: _Stranger) -> None:
        try:
            event = next(stranger.steps)
        except StopIteration as stop:
            if stop.value is None:
                self._drop(stranger)
            else:
                self._strangers.remove(stranger)
                self._selector.unregister(stranger.sock)
                self._hand_on(stranger, *stop.value)
        except ssl.SSLError as error:
            self._complain.warning(str(translated(error, stranger.peer, "greeting it")))
            self._drain(stranger)
        except (OSError, PotluckError) as error:
            if isinstance(error, OSError):
                error = translated(error, stranger.peer, "greeting it")
            self._complain.warning(f"dropped {stranger.peer}: {error}")
            self._drop(stranger)
        except Exception as error:  # whatever one stranger causes, the others are greeted
            self._complain.warning(f"dropped {stranger.peer}: greeting it broke: {why(error)}")
            self._drop(stranger)
        else:
            if event != stranger.waits_for:
                stranger.waits_for = event
                self._selector.modify(stranger.sock, event, stranger)

    def _hand_on(self, stranger: _Stranger, hello: Hello, node: str) -> None:
        try:
            self._greeted(stranger.sock, stranger.peer, hello, node)
        except Exception as error:  # no thread left for it, say
            self._complain.warning(f"dropped {stranger.peer}: {why(error)}")
            stranger.sock.close()

    def _drain(self, stranger: _Stranger) -> None:
        """Let our TLS alert arrive: closing on unread bytes would reset the connection over it."""
        try:
            socket.socket.shutdown(stranger.sock, socket.SHUT_WR)
        except OSError:
            self._drop(stranger)
            return
        stranger.steps = _discard(stranger.sock)
        stranger.deadline = time.monotonic() + _DRAIN_S
        stranger.spoke = False
        self._advance(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.sock)
        stranger.sock.close()


def _discard(sock: TlsSocket) -> Steps[None]:
    """Read and forget raw bytes until the peer closes or has sent too many."""
    count = 0
    while count < _DRAIN_BYTES:
        try:
            some = len(socket.socket.recv(sock, 16 * 1024))
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if some == 0:
            return
        count += some
