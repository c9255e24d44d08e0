"""``BulkLink``: a connection whose bytes move in large pieces, for a thread that serves or calls
services. Never blocks; one thread at a time uses it.

The progress loop of a group takes the native stream of its links itself. Here the stream stays
under Python, which hands it whole buffers: OpenSSL encrypts and decrypts them record by record
without Python's lock.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Protocol

from potluck._core.transport.link import Link
from potluck._core.transport.tcp import TcpLink
from potluck.errors import LinkError


class BulkLink(Protocol):
    """See ``Link``, of which this is a part, except for ``flush``."""

    @property
    def peer(self) -> str:
        """The other end, for errors."""

    def fileno(self) -> int:
        """A descriptor to select on."""

    def send(self, data: memoryview) -> int:
        """Take some bytes of ``data``; 0 means: full now, try when writable."""

    def flush(self) -> bool:
        """Whether all bytes that were taken have left; if not, try when writable."""

    def recv_into(self, buffer: memoryview) -> int:
        """Put some bytes into ``buffer``; 0 means: none now. LinkError at the end."""

    def close(self) -> None:
        """End the link at once. Idempotent."""


class PlainBulkLink:
    """A TLS link of Python's ``ssl``: one record a call."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.peer = link.peer
        self.fileno = link.fileno
        self.send = link.send
        self.recv_into = link.recv_into
        self.close = link.close

    def flush(self) -> bool:
        return True


class NativeBulkLink:
    """A TLS link of the native core: as many records a call as there are."""

    def __init__(self, link: TcpLink) -> None:
        self._link = link
        self._stream: Any = link.stream
        self._stream.take_over(link.peer)
        self.peer = link.peer
        self.fileno = link.fileno
        self._is_closed = False

    def send(self, data: memoryview) -> int:
        if self._is_closed:
            raise self._closed()
        try:
            count: int = self._stream.send(data)
        except RuntimeError as error:
            raise LinkError(str(error)) from None
        return count

    def flush(self) -> bool:
        if self._is_closed:
            raise self._closed()
        try:
            is_empty: bool = self._stream.flush()
        except RuntimeError as error:
            raise LinkError(str(error)) from None
        return is_empty

    def recv_into(self, buffer: memoryview) -> int:
        if self._is_closed:
            raise self._closed()
        try:
            count: int = self._stream.recv_into(buffer)
        except RuntimeError as error:
            raise LinkError(str(error)) from None
        return count

    def close(self) -> None:
        self._is_closed = True
        self._link.close()

    def _closed(self) -> LinkError:
        # The stream knows the number of the descriptor, which may be another's by now.
        return LinkError(f"link to {self.peer} was closed here")


class SocketPairLink:
    """One end of a pair of sockets inside this process: what TLS is between processes."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.peer = peer

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkError(f"{self.peer} closed the link while sending") from error

    def flush(self) -> bool:
        return True

    def recv_into(self, buffer: memoryview) -> int:
        try:
            count = self._sock.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkError(f"{self.peer} closed the link while receiving") from error
        if not count:
            raise LinkError(f"{self.peer} closed the link while receiving")
        return count

    def close(self) -> None:
        # Others in this process may be selecting on it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def bulk_link(link: TcpLink) -> BulkLink:
    """``link``, moved in bulk. Takes it over, right after its greeting."""
    return PlainBulkLink(link) if link.stream is None else NativeBulkLink(link)


def socket_pair(one: str, other: str) -> tuple[SocketPairLink, SocketPairLink]:
    """Two connected ends: the first is held by ``one`` and leads to ``other``."""
    left, right = socket.socketpair()
    return SocketPairLink(left, other), SocketPairLink(right, one)
