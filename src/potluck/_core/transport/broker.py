"""The sockets of a process without a network of its own, from the socket broker of its agent.

In a sandbox POTLUCK_BROKER names the broker's Unix socket. ``handshake.py`` and ``aio.py`` then
dial, and ``listener.py`` listens, by this module; from there on the sockets are like any other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
from collections.abc import Generator, Iterator
from pathlib import Path

from potluck._core import forks
from potluck._core.system import need_posix
from potluck._core.wire import broker as wire
from potluck.errors import ConfigurationError, ProtocolError, WrongSecret

Dialling = Generator[int, None, socket.socket]
"""Steps as in ``handshake.py``: they yield the event that they wait for."""

VARIABLE = "POTLUCK_BROKER"
_ANSWER_S = 30.0
_CONNECT_S = 10


def is_needed() -> bool:
    """Whether this process gets its sockets from a broker."""
    return bool(os.environ.get(VARIABLE))


@contextlib.contextmanager
def dialling(host: str, port: int) -> Iterator[tuple[socket.socket, Dialling]]:
    """A connection to the broker, and the steps that wait on it for a non-blocking socket connected
    to ``host:port``, where the broker has knocked. OSError as if this process had connected,
    WrongSecret as if it had knocked."""
    asking = _asked(wire.Dial(host, port))
    try:
        yield asking, _dialled(asking)
    finally:
        asking.close()


def _dialled(asking: socket.socket) -> Dialling:
    while True:
        try:
            answer, sock = _received(asking)
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if isinstance(answer, wire.Unheard):
            raise WrongSecret(answer.reason)
        if sock is None:
            raise OSError(*_why(answer))
        sock.setblocking(False)
        return sock


class BrokeredSocket:
    """A listening socket that is the broker's. Like ``socket.socket``, as far as ``listener.py``
    uses one; callers have knocked already."""

    def __init__(self, port: int) -> None:
        """ConfigurationError if the port can't be had."""
        try:
            self._asking = _asked(wire.Listen(port))
        except OSError as error:
            raise ConfigurationError(str(error)) from error
        try:
            self._asking.settimeout(_ANSWER_S)
            answer, _ = _received(self._asking)
            if not isinstance(answer, wire.Granted):
                raise OSError(*_why(answer))
        except OSError as error:
            self._asking.close()
            reason = error.strerror or f"this machine's agent gives no port: {error}"
            raise ConfigurationError(reason) from error
        self._port = answer.port

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """The next caller, and its address. BlockingIOError without one; OSError once the broker is
        gone."""
        while True:
            answer, sock = _received(self._asking)
            if sock is None:
                raise OSError(*_why(answer))
            try:
                host, port = sock.getpeername()[:2]
            except OSError:  # it has hung up
                sock.close()
                continue
            return sock, (host, port)

    def getsockname(self) -> tuple[str, int]:
        return "", self._port

    def setblocking(self, flag: bool) -> None:
        self._asking.setblocking(flag)

    def fileno(self) -> int:
        return self._asking.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._asking.close()


def _asked(request: wire.Request) -> socket.socket:
    """A non-blocking connection to the broker, with ``request`` sent."""
    need_posix("a socket broker")
    with forks.opening() as mine:
        asking = mine(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_S, 0))
        with short_path(Path(os.environ[VARIABLE])) as path:
            asking.connect(path)
        asking.send(wire.encode(request))
        asking.setblocking(False)
    except OSError as error:
        asking.close()
        raise OSError(
            error.errno, f"the agent that started this worker is gone ({error})"
        ) from error
    return asking


def _received(asking: socket.socket) -> tuple[wire.Answer | None, socket.socket | None]:
    """The broker's next answer and the socket that came with it; None at the end."""
    need_posix("a socket broker")
    with forks.opening() as mine:
        packet, fds, _, _ = socket.recv_fds(asking, wire.MAX_PACKET, 1)
        sock = mine(socket.socket(fileno=fds[0])) if fds else None
    try:
        return wire.decode_answer(packet) if packet else None, sock
    except ProtocolError:
        if sock is not None:
            sock.close()
        raise


def _why(answer: wire.Answer | None) -> tuple[int, str]:
    if isinstance(answer, wire.Denied):
        return answer.errno, answer.reason
    # Not ECONNABORTED: for an acceptor that is a caller who hung up.
    return errno.ECONNRESET, "the agent that started this worker is gone"


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another name of ``path``, short enough for the address of a Unix socket (107 bytes)."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
