"""TLS by the native core, with the interface of ``ssl.SSLSocket``.

The handshake (``handshake.py``), the listener and ``TcpLink`` work on either, and either is at the
other end: same protocol, same certificates, same errors. What the native one adds is its
``stream``, which the native loop can take over, so that no payload passes through Python.
"""

from __future__ import annotations

import os
import socket
import ssl
from typing import TYPE_CHECKING, NoReturn

from potluck._core import native

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from potluck._core._native import TlsContext, TlsStatus


RECORDS_PER_KEY = 1 << 24
"""AES-GCM is good for 2^24.5 full records of one key (RFC 8446, section 5.5)."""


def is_available() -> bool:
    """Whether the native core is here and was built with OpenSSL."""
    return native.available and hasattr(native.core, "TlsContext")


class NativeContext:
    """What one side of connections shows and trusts: the twin of an ``ssl.SSLContext``."""

    def __init__(
        self,
        authorities: bytes,
        chain: bytes,
        *,
        server_side: bool,
        records_per_key: int = RECORDS_PER_KEY,
    ) -> None:
        """``authorities``: certificates; ``chain``: the node's certificate and key. Both PEM.

        ``records_per_key``: after so many records the native loop changes the key it sends with.
        """
        self._context = native.core.TlsContext(
            authorities.decode(), chain.decode(), server_side, records_per_key
        )

    def wrap(self, sock: socket.socket) -> NativeTlsSocket:
        """``sock`` under TLS, its handshake still to be made. Takes ``sock`` over."""
        return NativeTlsSocket(sock, self._context)


class NativeTlsSocket(socket.socket):
    """A non-blocking connected socket under TLS 1.3; methods and errors are ``ssl.SSLSocket``'s.

    A ``send`` that raised SSLWantWriteError must be repeated with the same bytes. Methods of
    ``socket.socket`` itself, called by its name, still see the bytes under TLS.
    """

    def __init__(self, sock: socket.socket, context: TlsContext) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.setblocking(False)
        self.stream = native.core.TlsStream(context, self.fileno(), "")

    def do_handshake(self) -> None:
        self._check(self.stream.handshake())

    def getpeercert(self, binary_form: bool = True) -> bytes | None:
        """The peer's certificate (DER), None before the handshake."""
        assert binary_form
        return self.stream.peer_certificate() or None

    def pending(self) -> int:
        """Bytes that are decrypted already."""
        return self.stream.pending()

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        self._check(self.stream.write_all(data))
        return memoryview(data).nbytes

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        buffer = bytearray(bufsize)
        return bytes(buffer[: self.recv_into(buffer, bufsize)])

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        status, count = self.stream.read_into(buffer, nbytes or memoryview(buffer).nbytes)
        self._check(status)
        return count

    def _check(self, status: TlsStatus) -> None:
        if status is not native.core.TlsStatus.DONE:
            self._raise(status)

    def _raise(self, status: TlsStatus) -> NoReturn:
        kinds, reason = native.core.TlsStatus, self.stream.reason
        if status is kinds.WANTS_READ:
            raise ssl.SSLWantReadError
        if status is kinds.WANTS_WRITE:
            raise ssl.SSLWantWriteError
        if status is kinds.ENDED:
            raise ssl.SSLZeroReturnError
        if status is kinds.FAILED:
            raise OSError(self.stream.error, os.strerror(self.stream.error))
        if status is kinds.DISTRUSTED:
            refusal = ssl.SSLCertVerificationError(1, f"certificate verify failed: {reason}")
            refusal.verify_message = reason
            raise refusal
        error = ssl.SSLError(1, reason)
        error.reason = reason
        raise error


TlsSocket = ssl.SSLSocket | NativeTlsSocket
"""A connection under TLS, of Python's ``ssl`` or of the native core."""
