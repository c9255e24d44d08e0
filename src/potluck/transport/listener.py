"""Where peers arrive: one port, one thread that greets strangers, a short thread per known peer.

Strangers are ``reception.py``'s. A peer that said HELLO (it holds the secret) gets a thread in
which ``admit`` may wait, for instance for a group that this side has not formed yet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from potluck.errors import ConfigurationError, LinkError, PotluckError
from potluck.service import OnBroken, start_thread, why
from potluck.transport.credentials import Credentials
from potluck.transport.handshake import drive, objection, write_all
from potluck.transport.native_tls import TlsSocket
from potluck.transport.plain import PlainLink, check_nothing_is_left
from potluck.transport.rate import RateLimitedLog
from potluck.transport.reception import Reception
from potluck.transport.tcp import TcpLink
from potluck.transport.window import map_window
from potluck.wire.messages import GREETING, PLAIN, Hello, Refusal, Welcome

_log = logging.getLogger(__name__)

_MAX_ADMITTING = 1024


@dataclass(frozen=True, slots=True)
class Admission:
    """What ``admit`` decides: the answer, and who takes the link once WELCOME is written.

    Exactly one of ``deliver`` and ``withdraw`` follows a Welcome: the second if the caller was gone
    before it could be told.
    """

    answer: Welcome | Refusal
    deliver: Callable[[TcpLink], None] | None = None
    withdraw: Callable[[], None] | None = None


Admit = Callable[[Hello, str], Admission]
"""``admit(hello, peer_node)``; may block for ``Listener.admit_timeout_s``, in its own thread."""


class Listener:
    """Listens on ``host:port`` (port 0: any free one; see ``port``) from construction to close().

    ``host`` "" means all interfaces. Until ``serve`` is called, peers that proved themselves wait.
    ConfigurationError if the port can't be had. ``on_broken(error)`` is called, on the listener's
    thread, with a LinkError if that thread breaks: the port is closed then, nobody can call here.
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
        on_broken: OnBroken = lambda error: None,
    ) -> None:
        self.admit_timeout_s = admit_timeout_s
        self._credentials = credentials
        self._hello_timeout_s = hello_timeout_s
        self._use_windows = use_windows
        self._complain = RateLimitedLog(_log)
        self._lock = threading.Condition()
        self._admit: Admit | None = None
        self._closing = False
        self._answering: dict[threading.Thread, TlsSocket | None] = {}  # None: delivered
        sock = listening_socket(host, port)
        self.host = host
        self.port: int = sock.getsockname()[1]
        self._reception = Reception(
            sock,
            credentials,
            self._start_answer,
            hello_timeout_s=hello_timeout_s,
            max_pending=max_pending,
            on_broken=partial(self._broken, on_broken),
        )

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
            for sock in filter(None, self._answering.values()):
                _hang_up(sock)
        if first:
            self._reception.close()
        deadline = time.monotonic() + self.admit_timeout_s
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

    def _start_answer(self, sock: TlsSocket, peer: str, hello: Hello, node: str) -> None:
        with self._lock:  # the thread waits for it, and finds itself listed
            if self._closing or len(self._answering) >= _MAX_ADMITTING:
                sock.close()
                return
            thread = start_thread(
                partial(self._answer, sock, hello, node, f"{peer} (node {node[:12]})"),
                name=f"potluck-admit-{peer}",
                on_broken=lambda error: None,  # it concerns that connection only, which has ended
            )
            self._answering[thread] = sock

    def _answer(self, sock: TlsSocket, hello: Hello, node: str, peer: str) -> None:
        admission = link = None
        try:
            admission = self._admission(hello, node)
            link = self._conclude(sock, hello, node, peer, admission.answer)
            if link is not None:
                with self._lock:
                    self._answering[threading.current_thread()] = None
                assert admission.deliver is not None, "a Welcome needs somebody to take the link"
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

    def _admission(self, hello: Hello, node: str) -> Admission:
        refusal = objection(hello, node, self._credentials)
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
        self, sock: TlsSocket, hello: Hello, node: str, peer: str, answer: Welcome | Refusal
    ) -> TcpLink | None:
        """Write the answer; the link if it was WELCOME. Owns ``sock`` until then."""
        window = None
        try:
            if isinstance(answer, Welcome):
                _check_still_there(sock)
                if answer.wire == PLAIN:
                    check_nothing_is_left(sock, peer)
                if hello.window is not None and self._use_windows:
                    window = map_window(hello.window)
                answer = msgspec.structs.replace(answer, window=window is not None)
            deadline = time.monotonic() + self._hello_timeout_s
            drive(write_all(sock, GREETING.encode(answer)), sock, deadline, "answering", peer)
            if isinstance(answer, Welcome):
                made = PlainLink if answer.wire == PLAIN else TcpLink
                return made(sock, peer=peer, peer_node=node, window=window)
            _log.debug("refused %s: %s", peer, answer.reason)
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
