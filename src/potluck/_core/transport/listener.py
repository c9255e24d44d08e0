"""The listening side: accepts TCP connections, bounds what callers may use until they have
authenticated (``Acceptor``), and makes links of those of other ranks (``Listener``).

Workers (``Listener``), agents (``aio.py``) and ``potluck pair`` accept connections by ``Acceptor``,
within the same ``Limits``. Each connection is served by an asyncio task of its own. An error
there ends that connection only, and costs at most one log line a second, whatever callers send.

A ``Listener`` has one port, and one thread that accepts and authenticates callers. A caller that
has proved its node and said HELLO gets a short-lived thread, in which ``admit`` may wait, for
instance for a group that this side has not formed yet. No payload is read before WELCOME is
written; from then on the socket is a link's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from potluck._core import forks
from potluck._core.background import OnBroken, Tasks, start_thread, stop, why
from potluck._core.printable import plain
from potluck._core.transport import broker
from potluck._core.transport.binding import listened_on
from potluck._core.transport.broker import BrokeredSocket
from potluck._core.transport.credentials import Credentials, Identity
from potluck._core.transport.failures import translated
from potluck._core.transport.handshake import (
    WRITE,
    Steps,
    drive,
    hear_knock,
    objection,
    receive_hello,
    write_all,
)
from potluck._core.transport.link_memory import map_link_memory
from potluck._core.transport.native_tls import TlsSocket
from potluck._core.transport.tcp import TcpLink, secured, tune
from potluck._core.wire.greeting import Hello, Refusal, Welcome, sent_greeting
from potluck.errors import ConfigurationError, LinkError, PotluckError, Refused

T = TypeVar("T")

DRAIN_S = 1.0
"""How long a refused caller may take to hang up."""

_PAUSE_S = 0.1
_BURST = 64
_BACKLOG = 256
_PORTS_TO_TRY = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What callers may use before they have authenticated.

    Of what a caller sends, OpenSSL keeps at most one handshake message (128 KiB for a ClientHello,
    100 KiB for certificates), and each greeting has a bound of its own.
    """

    max_connections: int = 64
    """Unauthenticated connections at one time. One more drops one: of the address that holds most,
    the oldest that has sent nothing, else the oldest. So one machine displaces only its own."""
    timeout_s: float = 5.0
    """From accepting to the end of authentication, however slowly the bytes drip in."""
    drain_bytes: int = 256 * 1024
    """Read and discarded from a caller that was refused, so that it hears why: closing a connection
    over unread bytes resets it, and the TLS alert is lost."""


LIMITS = Limits()


@dataclass(slots=True, eq=False)
class Caller:
    """An accepted connection, unauthenticated until its task calls ``authenticated``."""

    sock: socket.socket
    """Non-blocking. Closed when the task ends, unless ``is_handed_over``."""
    host: str
    port: int
    has_knocked: bool = False
    """At a broker, so ``hear_knock`` is not to be called."""
    has_spoken: bool = False
    is_handed_over: bool = False
    authenticated: Callable[[], None] = field(init=False)
    """Note that the client is authenticated: the limits do not apply to it any more."""

    @property
    def peer(self) -> str:
        return f"{self.host}:{self.port}"


Unauthenticated = dict[Caller, asyncio.Task[None]]
"""Callers that have not authenticated yet, in order of arrival."""


class Acceptor:
    """Accepts from ``sock`` and runs ``serve(caller)`` for each connection once bytes have arrived.

    A connection costs a socket and a task; ``serve`` makes TLS state (300 KiB) only after a right
    knock. It raises OSError or PotluckError if authentication fails. ``awaits`` names in log lines
    what an unauthenticated caller owes.
    """

    def __init__(
        self,
        sock: ListeningSocket,
        serve: Callable[[Caller], Awaitable[None]],
        limits: Limits,
        *,
        awaits: str,
        crowd: Unauthenticated | None = None,
    ) -> None:
        """``limits`` hold for all acceptors together that are given the same ``crowd``."""
        self._sock = sock
        self._serve = serve
        self._limits = limits
        self._awaits = awaits
        self._complain = RateLimitedLog(_log)
        self._complain_of_refusal = RateLimitedLog(_log, interval_s=REFUSAL_S)
        self._tasks = Tasks()
        self._unauthenticated: Unauthenticated = {} if crowd is None else crowd

    async def run(self) -> None:
        """Accept until cancelled; then stop listening and end all connections' tasks."""
        try:
            while True:
                await self._sock.ready()
                try:
                    self._accept()
                except OSError as error:  # no descriptors, most likely
                    self._complain.warning(f"can't accept connections: {error}")
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._sock.close()
            await stop(*self._tasks)

    def _accept(self) -> None:
        for listening in self._sock.sockets:
            self._accept_from(listening)

    def _accept_from(self, listening: socket.socket | BrokeredSocket) -> None:
        for _ in range(_BURST):
            try:
                with forks.opening() as mine:
                    sock, address = listening.accept()
                    mine(sock)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            sock.setblocking(False)
            if len(self._unauthenticated) >= self._limits.max_connections:
                self._drop_one()
            has_knocked = isinstance(listening, BrokeredSocket)
            self._start(Caller(sock, address[0], address[1], has_knocked))

    def _start(self, caller: Caller) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._unauthenticated.pop(caller, None)
            if not caller.is_handed_over:
                caller.sock.close()

        task = self._unauthenticated[caller] = self._tasks.start(self._run(caller))
        task.add_done_callback(ended)

    def _drop_one(self) -> None:
        """It leaves the count now, not when its task has ended: of a crowd that arrives in one turn
        of the loop each connection drops another."""
        counts = Counter(caller.host for caller in self._unauthenticated)
        most = max(counts.values())
        crowd = [caller for caller in self._unauthenticated if counts[caller.host] == most]
        silent = [caller for caller in crowd if not caller.has_spoken]
        self._unauthenticated.pop((silent or crowd)[0]).cancel()
        self._complain.warning(
            f"more than {self._limits.max_connections} connections have not sent {self._awaits}: "
            "dropping the oldest"
        )

    async def _run(self, caller: Caller) -> None:
        try:
            async with asyncio.timeout(self._limits.timeout_s) as limit:

                def authenticated() -> None:
                    self._unauthenticated.pop(caller, None)
                    limit.reschedule(None)

                caller.authenticated = authenticated
                tune(caller.sock)
                await ready(caller.sock)
                caller.has_spoken = True
                await self._serve(caller)
        except (OSError, PotluckError) as error:
            if limit.expired():
                seconds = self._limits.timeout_s
                self._dropped(caller, f"no {self._awaits} within {seconds:g} s")
            elif isinstance(error, OSError):
                self._dropped(caller, str(translated(error, caller.peer, "greeting it")))
            elif isinstance(error, Refused):
                self._complain_of_refusal.warning(f"dropped {caller.peer}: {error}")
            else:
                self._dropped(caller, str(error))
        except Exception as error:
            if caller in self._unauthenticated:
                self._dropped(caller, f"greeting it failed: {why(error)}")
            else:
                _log.exception("the connection of %s failed", caller.peer)

    def _dropped(self, caller: Caller, reason: str) -> None:
        self._complain.warning(f"dropped {caller.peer}: {reason}")


async def finish(steps: Steps[T], sock: socket.socket) -> T:
    """Run ``steps`` to their end in the event loop; errors are those of sockets."""
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
        await ready(sock, write=event == WRITE)


async def ready(sock: socket.socket, *, write: bool = False) -> None:
    """Wait until ``sock`` can be read (accepted from, has ended), or written."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    if write:
        loop.add_writer(sock, event.set)
    else:
        loop.add_reader(sock, event.set)
    try:
        await event.wait()
    finally:
        if write:
            loop.remove_writer(sock)
        else:
            loop.remove_reader(sock)


class ListeningSocket:
    """A port that is listened on, at one address or at several."""

    def __init__(self, *sockets: socket.socket | BrokeredSocket) -> None:
        self.sockets = sockets
        self.port: int = sockets[0].getsockname()[1]
        for each in sockets:
            each.setblocking(False)

    async def ready(self) -> None:
        """Wait until a connection can be accepted."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        for each in self.sockets:
            loop.add_reader(each, event.set)
        try:
            await event.wait()
        finally:
            for each in self.sockets:
                loop.remove_reader(each)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for each in self.sockets:
            each.close()


def listening_socket(host: str, port: int) -> ListeningSocket:
    """Listen on ``port`` (0: any) of ``host``: an interface or address, and the loopback; ``""``:
    everywhere. In a sandbox the broker listens, where the agent does. ConfigurationError if the
    port can't be had."""
    if broker.is_needed():
        return ListeningSocket(broker.BrokeredSocket(port))
    if not host:
        return ListeningSocket(listening_at("", port))
    addresses = listened_on(host)
    for _ in range(_PORTS_TO_TRY - 1):
        try:
            return _listening_at_all(addresses, port)
        except ConfigurationError as error:
            if port or not is_port_taken(error):
                raise
    return _listening_at_all(addresses, port)


def _listening_at_all(addresses: Sequence[str], port: int) -> ListeningSocket:
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            try:
                sockets.append(listening_at(address, port))
            except ConfigurationError as error:
                # An address of IPv6 can't be used while the system looks for others that have it.
                if (address is addresses[-1] and len(sockets) < 2) or _errno(
                    error
                ) != errno.EADDRNOTAVAIL:
                    raise
            port = sockets[0].getsockname()[1]
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return ListeningSocket(*sockets)


def listening_at(address: str, port: int) -> socket.socket:
    """A listening socket at ``address`` (``""``: at all); ConfigurationError if the port can't be
    had."""
    place: tuple[Any, ...] = ("", port)
    try:
        family, is_dual = socket.AF_INET, not address and socket.has_dualstack_ipv6()
        if address:
            family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        elif is_dual:
            family = socket.AF_INET6
        with forks.opening() as mine:
            return mine(
                socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
            )
    except OSError as error:
        where = f"port {port} on {address or 'all interfaces'}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"{where} is in use by another program; choose another with "
                "POTLUCK_GRADIENT_PORT, or 0 for any free port"
            ) from error
        raise ConfigurationError(f"{where} can't be listened on: {error}") from error


def is_port_taken(error: ConfigurationError) -> bool:
    """Whether ``listening_at`` failed because another program has the port."""
    return _errno(error) == errno.EADDRINUSE


def _errno(error: ConfigurationError) -> int | None:
    cause = error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


REFUSAL_S = 60.0
"""Between lines about machines that are refused: a banned machine calls again every second."""


@dataclass(eq=False, repr=False)
class RateLimitedLog:
    """Writes at most one line per ``interval_s``; the next line counts those left out."""

    logger: logging.Logger
    _: KW_ONLY
    interval_s: float = 1.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._next = float("-inf")
        self._left_out = 0

    def warning(self, text: str) -> None:
        with self._lock:
            now = self.clock()
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + self.interval_s
            left_out, self._left_out = self._left_out, 0
        more = f" (and {left_out} more since the last line)" if left_out else ""
        self.logger.warning("%s%s", plain(text), more)


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
            drive(write_all(sock, sent_greeting(answer)), sock, deadline, "answering", peer)
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
