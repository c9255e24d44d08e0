"""The listening side of links: one port, one thread that accepts and authenticates callers.

That thread runs ``acceptor.py``. A caller that has proved its node and said HELLO gets a
short-lived thread, in which ``admit`` may wait, for instance for a group that this side has not
formed yet. No payload is read before WELCOME is written; from then on the socket is a link's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from potluck._core.background import OnBroken, start_thread, why
from potluck._core.transport.acceptor import (
    DRAIN_S,
    LIMITS,
    Acceptor,
    Caller,
    Limits,
    RateLimitedLog,
    finish,
    listening_socket,
    ready,
)
from potluck._core.transport.credentials import Credentials, Identity
from potluck._core.transport.handshake import (
    drive,
    hear_knock,
    objection,
    receive_hello,
    write_all,
)
from potluck._core.transport.link_memory import map_link_memory
from potluck._core.transport.native_tls import TlsSocket
from potluck._core.transport.tcp import TcpLink, secured
from potluck._core.wire.greeting import GREETING, Hello, Refusal, Welcome
from potluck.errors import LinkError, PotluckError, Refused

_log = logging.getLogger(__name__)

ADMIT_S = 30.0
_MAX_ADMITTING = 1024


@dataclass(frozen=True, slots=True)
class Admission:
    """What ``admit`` decides: the answer, and what takes the link once WELCOME is written.

    After a Welcome exactly one of ``deliver`` and ``withdraw`` is called; ``withdraw`` if the
    caller hung up before WELCOME was written.
    """

    answer: Welcome | Refusal
    deliver: Callable[[TcpLink], None] | None = None
    withdraw: Callable[[], None] | None = None


Admit = Callable[[Hello, str], Admission]
"""``admit(hello, peer_node)``; may block for ``ADMIT_S``, in its own thread."""


class Listener:
    """Listens on ``host:port`` (port 0: any free one; see ``port``) from construction to close().

    ``host`` is as in ``listening_socket``: "" means all interfaces. Until ``serve`` is called,
    peers that proved themselves wait. ConfigurationError if the port can't be had.
    ``on_broken(error)`` is called, on the listener's thread, with a LinkError if that thread
    breaks: the port is then closed, so no peer can call.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        *,
        limits: Limits = LIMITS,
        use_shared_memory: bool = True,
        on_broken: OnBroken = lambda error: None,
    ) -> None:
        self._credentials = credentials
        self._limits = limits
        self._use_shared_memory = use_shared_memory
        self._complain = RateLimitedLog(_log)
        self._lock = threading.Condition()
        self._admit: Admit | None = None
        self._closing = False
        self._answering: dict[threading.Thread, TlsSocket | None] = {}  # None: delivered
        self._sock = listening_socket(host, port)
        self.host = host
        self.port = self._sock.port
        self._acceptor = Acceptor(self._sock, self._greet, limits, awaits="HELLO")
        self._loop = asyncio.SelectorEventLoop()
        self._accepting = self._loop.create_task(self._acceptor.run())
        self._thread = start_thread(
            self._run,
            name=f"potluck-listener-{self.port}",
            on_broken=partial(self._broken, on_broken),
        )

    def serve(self, admit: Admit) -> None:
        """From now on ask ``admit``; may be called again to replace it."""
        with self._lock:
            self._admit = admit
            self._lock.notify_all()

    def close(self) -> None:
        """Stop listening, drop callers that are not admitted yet, join all threads. Idempotent.

        An ``admit`` that is blocked must let go by itself: its caller waits at most
        ``ADMIT_S`` for it here. Links already delivered live on.
        """
        with self._lock:
            first = not self._closing
            self._closing = True
            self._lock.notify_all()
            answering = list(self._answering)
            for sock in filter(None, self._answering.values()):
                _hang_up(sock)
        if first:
            with contextlib.suppress(RuntimeError):  # it broke, and its loop is closed
                self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._thread.join()
        deadline = time.monotonic() + ADMIT_S
        for thread in answering:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    _log.error("%s is still deciding on a connection", thread.name)

    def _broken(self, on_broken: OnBroken, cause: BaseException) -> None:
        where = f"port {self.port} of {self.host or 'all interfaces'}"
        error = LinkError(f"the thread that takes connections on {where} broke ({why(cause)})")
        error.__cause__ = cause
        on_broken(error)

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
        finally:
            self._sock.close()
            self._loop.close()

    async def _greet(self, caller: Caller) -> None:
        """Knock, TLS and HELLO, on the descriptor itself: the link's owner will read and write
        there."""
        if not caller.has_knocked:
            await finish(hear_knock(caller.sock, self._credentials.eras), caller.sock)
        caller.sock = sock = secured(caller.sock, self._credentials, server_side=True)
        try:
            hello, client = await finish(receive_hello(sock, self._credentials), sock)
        except (ssl.SSLError, Refused):
            caller.has_spoken = False  # the first to go where room is needed
            await self._drain(sock)
            raise
        caller.authenticated()
        self._start_answer(sock, caller.peer, hello, client)
        caller.is_handed_over = True

    async def _drain(self, sock: TlsSocket) -> None:
        """Discard raw bytes until the caller closes, so that it hears the alert or refusal."""
        with contextlib.suppress(OSError):  # which a TimeoutError is, too
            socket.socket.shutdown(sock, socket.SHUT_WR)
            async with asyncio.timeout(DRAIN_S):
                left = self._limits.drain_bytes
                while left > 0:
                    await ready(sock)
                    some = len(socket.socket.recv(sock, 16 * 1024))
                    left = left - some if some else 0

    def _start_answer(self, sock: TlsSocket, peer: str, hello: Hello, client: Identity) -> None:
        with self._lock:  # the thread waits for it, and finds itself listed
            if self._closing or len(self._answering) >= _MAX_ADMITTING:
                sock.close()
                return
            thread = start_thread(
                partial(self._answer, sock, hello, client, f"{peer} (node {client.node[:12]})"),
                name=f"potluck-admit-{peer}",
                on_broken=lambda error: None,  # it concerns that connection only, which has ended
            )
            self._answering[thread] = sock

    def _answer(self, sock: TlsSocket, hello: Hello, client: Identity, peer: str) -> None:
        admission = link = None
        try:
            admission = self._admission(hello, client)
            link = self._conclude(sock, hello, client.node, peer, admission.answer)
            if link is not None:
                with self._lock:
                    self._answering[threading.current_thread()] = None
                assert admission.deliver is not None, "a Welcome needs a function for the link"
                admission.deliver(link)
        except Exception as error:
            if link is not None:
                link.close()
            elif admission is not None and admission.withdraw is not None:
                admission.withdraw()
            if isinstance(error, PotluckError | OSError):
                self._complain.warning(f"dropped {peer}: {error}")
            else:
                _log.exception("the connection of %s could not be taken over", peer)
        finally:
            with self._lock:
                del self._answering[threading.current_thread()]

    def _admission(self, hello: Hello, client: Identity) -> Admission:
        refusal = objection(hello, client, self._credentials)
        if refusal is not None:
            return Admission(refusal)
        deadline = time.monotonic() + ADMIT_S
        with self._lock:
            self._lock.wait_for(
                lambda: self._admit is not None or self._closing,
                max(0.0, deadline - time.monotonic()),
            )
            admit = self._admit
        if admit is None:
            return Admission(Refusal("not_ready", "this worker does not take connections yet"))
        try:
            return admit(hello, client.node)
        except Exception:
            _log.exception("admit failed for %s", hello)
            return Admission(Refusal("error", "this worker failed to decide; see its log"))

    def _conclude(
        self, sock: TlsSocket, hello: Hello, node: str, peer: str, answer: Welcome | Refusal
    ) -> TcpLink | None:
        """Write the answer; the link if it was WELCOME. Owns ``sock`` until then."""
        memory = None
        try:
            if isinstance(answer, Welcome):
                _check_still_there(sock)
                if hello.memory is not None and self._use_shared_memory:
                    memory = map_link_memory(hello.memory)
                answer = msgspec.structs.replace(answer, memory=memory is not None)
            deadline = time.monotonic() + self._limits.timeout_s
            drive(write_all(sock, GREETING.encode(answer)), sock, deadline, "answering", peer)
            if isinstance(answer, Welcome):
                return TcpLink(sock, peer=peer, peer_node=node, memory=memory)
            _log.debug("refused %s: %s", peer, answer.reason)
            sock.close()
            return None
        except BaseException:
            sock.close()
            if memory is not None:
                memory.close()
            raise


def _check_still_there(sock: TlsSocket) -> None:
    """LinkError if the caller has hung up: writing to it would seem to succeed."""
    with contextlib.suppress(BlockingIOError):
        socket.socket.recv(sock, 1, socket.MSG_PEEK)
        # Its end, or bytes that it may not send before WELCOME.
        raise LinkError("it went away before it was admitted")


def _hang_up(sock: socket.socket) -> None:
    """Wake a thread that waits on ``sock``, without taking the descriptor from under it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
