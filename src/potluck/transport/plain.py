"""A link in clear text: the greeting is under mutual TLS 1.3, the bytes after WELCOME are plain.

For a cable between two machines that is trusted (``POTLUCK_WIRE=plain``). Peers are authenticated
as ever, but an attacker on the wire can read and change the bytes that follow. The engine adds
checksums (``engine/loop/connection.py``), which find accidents and no attacks.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from potluck import native
from potluck.errors import ProtocolError
from potluck.transport.link_memory import LinkMemory
from potluck.transport.native_tls import NativeTlsSocket, TlsSocket
from potluck.transport.tcp import TURN_BYTES, TcpLink


class PlainLink(TcpLink):
    """One connection to a rank that proved itself; see ``link.py`` for what each method promises.

    TLS ended without its goodbye: neither side reads another record, and both know, because HELLO
    and WELCOME (which went under TLS) name the mode.
    """

    needs_checksums = True

    def __init__(
        self, sock: TlsSocket, *, peer: str, peer_node: str, memory: LinkMemory | None = None
    ) -> None:
        super().__init__(sock, peer=peer, peer_node=peer_node, memory=memory)
        is_native = isinstance(sock, NativeTlsSocket)
        self._stream = native.core.PlainStream(sock.fileno()) if is_native else None

    @property
    def stream(self) -> Any:
        return self._stream

    def __repr__(self) -> str:
        return f"<PlainLink to {self._peer}>"

    def send(self, data: memoryview) -> int:
        self._check_sending()
        try:
            return socket.socket.send(self._sock, data[:TURN_BYTES]) if data else 0
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fail(error, "sending")

    def recv_into(self, buffer: memoryview) -> int:
        if self._end is not None:
            raise self._end
        if not buffer:
            return 0
        try:
            count = socket.socket.recv_into(self._sock, buffer[:TURN_BYTES])
            if count == 0:
                raise ssl.SSLZeroReturnError
            return count
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fail(error, "receiving")

    @property
    def readable(self) -> bool:
        return self._end is not None


def check_nothing_is_left(sock: TlsSocket, peer: str) -> None:
    """ProtocolError if TLS still holds bytes: what follows the greeting must be in clear text."""
    is_clean = sock.stream.is_clean() if isinstance(sock, NativeTlsSocket) else not sock.pending()
    if not is_clean:
        raise ProtocolError(f"{peer} went on under TLS after a greeting that ends it")
