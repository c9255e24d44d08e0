"""Where peers arrive: one port, one thread that greets strangers, a short thread per known peer.

Connections that have not yet proved who they are live in one non-blocking loop and cost it a socket
and a few KiB each. There are at most ``max_pending`` of them: one more makes the oldest silent one
go, so a crowd of idle connections can't lock out a peer. Each has ``hello_timeout_s`` in all to get
as far as its HELLO, however slowly it drips. A peer that did (it holds the secret) gets a thread
in which ``admit`` may wait, for instance for a group that this side has not formed yet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from potluck.errors import ConfigurationError, PotluckError
from potluck.transport.credentials import Credentials
from potluck.transport.failures import translated
from potluck.transport.handshake import Steps, drive, objection, receive_hello, write_all
from potluck.transport.rate import RateLimitedLog
from potluck.transport.tcp import TcpLink, secured, tune
from potluck.transport.window import map_window
from potluck.wire.messages import Hello, Refusal, Welcome, encode_greeting

_log = logging.getLogger(__name__)

_MAX_ADMITTING = 1024
_DRAIN_S = 1.0
_DRAIN_BYTES = 256 * 1024
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Admission:
    """What ``admit`` decides: the answer, and who takes the link once WELCOME is written."""

    answer: Welcome | Refusal
    deliver: Callable[[TcpLink], None] | None = None


Admit = Callable[[Hello, str], Admission]
"""``admit(hello, peer_node)``; may block for ``Listener.admit_timeout_s``, in its own thread."""


@dataclass(slots=True, eq=False)
class _Stranger:
    sock: ssl.SSLSocket
    peer: str
    steps: Steps[tuple[Hello, str] | None]
    deadline: float
    waits_for: int = selectors.EVENT_READ
    spoke: bool = False


class Listener:
    """Listens on ``host:port`` (port 0: any free one; see ``port``) from construction to close().

    ``host`` "" means all interfaces. Until ``serve`` is called, peers that proved themselves wait.
    ConfigurationError if the port can't be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        *,
        hello_timeout_s: float = 5.0,
        max_pending: int = 64,
        admit_timeout_s: float = 30.0,
        use_windows: bool = True,
    ) -> None:
        self.admit_timeout_s = admit_timeout_s
        self._credentials = credentials
        self._hello_timeout_s = hello_timeout_s
        self._max_pending = max_pending
        self._use_windows = use_windows
        self._complain = RateLimitedLog(_log)
        self._lock = threading.Condition()
        self._admit: Admit | None = None
        self._closing = False
        self._answering: dict[threading.Thread, ssl.SSLSocket] = {}
        self._strangers: list[_Stranger] = []
        self._socket = listening_socket(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._resume_accept_at = 0.0
        self._thread = threading.Thread(
            target=self._run, name=f"potluck-listener-{self.port}", daemon=True
        )
        self._thread.start()

    def serve(self, admit: Admit) -> None:
        """From now on ask ``admit``; may be called again to replace it."""
        with self._lock:
            self._admit = admit
            self._lock.notify_all()

    def close(self) -> None:
        """Stop listening, drop whoever is still greeting, join all threads. Idempotent.

        An ``admit`` that is blocked must let go by itself: its caller waits at most
        ``admit_timeout_s`` for it here. Links already delivered live on.
        """
        with self._lock:
            first = not self._closing
            self._closing = True
            self._lock.notify_all()
            answering = list(self._answering)
            for sock in self._answering.values():
                _hang_up(sock)
        if first:
            self._wake.send(b"x")
            self._thread.join()
            self._wake.close()
            self._woken.close()
        deadline = time.monotonic() + self.admit_timeout_s
        for thread in answering:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    _log.error("%s is still deciding on a connection", thread.name)

    # The loop of strangers.

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
            tls = secured(sock, self._credentials.server_context)
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
                self._start_answer(stranger, *stop.value)
        except ssl.SSLError as error:
            self._complain.warning(str(translated(error, stranger.peer, "greeting it")))
            self._drain(stranger)
        except (OSError, PotluckError) as error:
            if isinstance(error, OSError):
                error = translated(error, stranger.peer, "greeting it")
            self._complain.warning(f"dropped {stranger.peer}: {error}")
            self._drop(stranger)
        else:
            if event != stranger.waits_for:
                stranger.waits_for = event
                self._selector.modify(stranger.sock, event, stranger)

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

    # One thread per peer that proved itself.

    def _start_answer(self, stranger: _Stranger, hello: Hello, node: str) -> None:
        peer = f"{stranger.peer} (node {node[:12]})"
        thread = threading.Thread(
            target=self._answer,
            args=(stranger.sock, hello, node, peer),
            name=f"potluck-admit-{stranger.peer}",
            daemon=True,
        )
        with self._lock:
            if self._closing or len(self._answering) >= _MAX_ADMITTING:
                stranger.sock.close()
                return
            self._answering[thread] = stranger.sock
        thread.start()

    def _answer(self, sock: ssl.SSLSocket, hello: Hello, node: str, peer: str) -> None:
        link = None
        try:
            admission = self._admission(hello, node)
            link = self._conclude(sock, hello, node, peer, admission.answer)
            if link is not None and admission.deliver is not None:
                deliver, delivered = admission.deliver, link
                link = None
                deliver(delivered)
        except (PotluckError, OSError) as error:
            self._complain.warning(f"dropped {peer}: {error}")
        except Exception:
            _log.exception("the connection of %s could not be taken over", peer)
        finally:
            with self._lock:
                del self._answering[threading.current_thread()]
            if link is not None:
                link.close()

    def _admission(self, hello: Hello, node: str) -> Admission:
        refusal = objection(hello, self._credentials)
        if refusal is not None:
            return Admission(refusal)
        deadline = time.monotonic() + self.admit_timeout_s
        with self._lock:
            self._lock.wait_for(
                lambda: self._admit is not None or self._closing,
                max(0.0, deadline - time.monotonic()),
            )
            admit = self._admit
        if admit is None:
            return Admission(Refusal("not_ready", "this worker does not take connections yet"))
        try:
            return admit(hello, node)
        except Exception:
            _log.exception("admit failed for %s", hello)
            return Admission(Refusal("error", "this worker failed to decide; see its log"))

    def _conclude(
        self, sock: ssl.SSLSocket, hello: Hello, node: str, peer: str, answer: Welcome | Refusal
    ) -> TcpLink | None:
        """Write the answer; the link if it was WELCOME. Owns ``sock`` until then."""
        window = None
        try:
            if isinstance(answer, Welcome):
                if hello.window is not None and self._use_windows:
                    window = map_window(hello.window)
                answer = msgspec.structs.replace(answer, window=window is not None)
            deadline = time.monotonic() + self._hello_timeout_s
            drive(write_all(sock, encode_greeting(answer)), sock, deadline, "answering", peer)
            if isinstance(answer, Welcome):
                return TcpLink(sock, peer=peer, peer_node=node, window=window)
            _log.info("refused %s: %s", peer, answer.reason)
            sock.close()
            return None
        except BaseException:
            sock.close()
            if window is not None:
                window.close()
            raise


def listening_socket(host: str, port: int) -> socket.socket:
    """A non-blocking listening socket; ConfigurationError if the port can't be had."""
    try:
        if host:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            sock = socket.create_server((host, port), family=family, backlog=256)
        elif socket.has_dualstack_ipv6():
            sock = socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=256, dualstack_ipv6=True
            )
        else:
            sock = socket.create_server(("", port), backlog=256)
    except OSError as error:
        where = f"port {port} on {host or 'all interfaces'}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"{where} is in use by another program; choose another with "
                "POTLUCK_GRADIENT_PORT, or 0 for any free port"
            ) from error
        raise ConfigurationError(f"{where} can't be listened on: {error}") from error
    sock.setblocking(False)
    return sock


def _discard(sock: ssl.SSLSocket) -> Steps[None]:
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


def _hang_up(sock: ssl.SSLSocket) -> None:
    """Wake a thread that waits on ``sock``, without taking the descriptor from under it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
