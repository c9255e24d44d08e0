"""A link over TCP with mutual TLS 1.3. Made by ``handshake.connect`` or by ``listener.py``; never
blocks from then on."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, NoReturn

from potluck._core import forks
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.failures import translated
from potluck._core.transport.link_memory import LinkMemory
from potluck._core.transport.native_tls import RECORDS_PER_KEY, NativeTlsSocket, TlsSocket
from potluck.errors import LinkError, PotluckError

_WRITE_BYTES = 64 * 1024
"""What one call hands to OpenSSL: four full TLS records."""
BYTES_PER_KEY = RECORDS_PER_KEY * 16 * 1024
"""AES-GCM's bound (RFC 8446, section 5.5), as bytes in full records. The native core changes its
key before; Python's ``ssl`` can't, so its links end there."""
_RECORD_COST = 64
"""What a write counts beside its bytes: a short record takes blocks of its own."""
TURN_BYTES = 1024 * 1024
"""At most this much per call of send or recv_into, so that one link can't starve the others."""
UNSENT_BYTES = 256 * 1024
"""What the kernel keeps of a link beyond what is on its way. Much more, and links that share a wire
get ahead of each other by as much."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A connection on which nothing is said ends a minute after its peer's machine has gone without a
word; also, routers do not forget it. macOS calls the first option by the second's name."""


class TcpLink:
    """One authenticated connection to another rank; see ``link.py`` for what each method promises.

    Socket buffers are left to the kernel: a size set by hand is capped at ``net.core.rmem_max`` and
    switches off its own tuning, which a link of 1 Gbit/s and 50 ms needs.
    """

    def __init__(
        self, sock: TlsSocket, *, peer: str, peer_node: str, memory: LinkMemory | None = None
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._peer = peer
        self.peer_node = peer_node
        self.memory = memory
        self._owed = 0  # bytes OpenSSL has begun to write and must be shown again
        self._num_encrypted = 0  # bytes sent by this object; the native core counts its own
        self._end: PotluckError | None = None
        """Why no more will be received."""
        self._send_end: PotluckError | None = None
        """Why no more can be sent."""

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def peer_host(self) -> str:
        """The peer's address without its port, as this side sees it."""
        host: str = self._sock.getpeername()[0]
        return host.removeprefix("::ffff:")

    @property
    def stream(self) -> Any:
        """None if Python's ``ssl`` has the link."""
        return self._sock.stream if isinstance(self._sock, NativeTlsSocket) else None

    def __repr__(self) -> str:
        return f"<TcpLink to {self._peer}>"

    def fileno(self) -> int:
        return self._sock.fileno()

    def bind(self, wake: Callable[[], None]) -> None:
        """Not needed: the descriptor tells."""

    def send(self, data: memoryview) -> int:
        self._check_sending()
        total = 0
        limit = min(len(data), TURN_BYTES)
        try:
            while total < limit:
                size = self._owed or min(limit - total, _WRITE_BYTES)
                if not self._owed:
                    self._count(size)
                assert total + size <= len(data), "a send that stopped short must be offered again"
                # OpenSSL (without partial writes) takes all of ``size`` or asks for it again.
                self._owed = size
                total += self._sock.send(data[total : total + size])
                self._owed = 0
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            self._fail(error, "sending")
        return total

    def recv_into(self, buffer: memoryview) -> int:
        if self._end is not None:
            raise self._end
        total = 0
        limit = min(len(buffer), TURN_BYTES)
        try:
            while total < limit:
                # OpenSSL gives at most one record (16 KiB) a call.
                count = self._sock.recv_into(buffer[total:limit], limit - total)
                if count == 0:
                    raise ssl.SSLZeroReturnError
                total += count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            try:
                self._fail(error, "receiving")
            except PotluckError:
                if total == 0:
                    raise
        return total

    def _count(self, nbytes: int) -> None:
        """LinkError if one key would encrypt more than it may."""
        self._num_encrypted += nbytes + _RECORD_COST
        if self._num_encrypted > BYTES_PER_KEY:
            self._send_end = LinkError(
                f"link to {self._peer} was ended here: its key has encrypted {BYTES_PER_KEY >> 30} "
                "GiB, as much as AES-GCM allows (RFC 8446, 5.5), and without the native core no "
                "new one can be made. `potluck doctor` says what the native core needs; an "
                "ElasticLoop goes on by itself with new links"
            )
            raise self._send_end

    def _check_sending(self) -> None:
        end = self._send_end or self._end
        if end is not None:
            raise end

    def _fail(self, error: OSError, doing: str) -> NoReturn:
        """Remember and raise the end of the link; later calls raise it again.

        A peer that has sent its last words and closed its socket refuses more bytes; its words can
        still be received.
        """
        failure = translated(error, self._peer, doing)
        if not isinstance(failure, LinkError):
            # After WELCOME even bytes that fail their check only mean that this link is over.
            failure = LinkError(f"link to {self._peer} broke while {doing}: {error}")
        if doing == "sending":
            self._send_end = failure
        else:
            self._end = failure
        raise failure from error

    @property
    def readable(self) -> bool:
        if self._end is not None:
            return True
        return self._sock.pending() > 0

    def close(self) -> None:
        if self._end is None:
            self._end = LinkError(f"link to {self._peer} was closed here")
        if self.memory is not None:
            self.memory.close()
        # No close_notify: an end is an end, and it could block.
        with contextlib.suppress(OSError):
            self._sock.close()


def tune(sock: socket.socket) -> None:
    """What every potluck connection sets: small frames must not wait for acknowledgements, nor
    behind more than a little that the wire has not taken yet; a silent one is probed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def secured(sock: socket.socket, credentials: Credentials, *, server_side: bool) -> TlsSocket:
    """``sock`` under TLS, its handshake still to be made; OSError if the peer is found to be gone.

    Takes ``sock`` over. Its end without TLS's own goodbye is reported, not hidden.
    """
    native = credentials.native_context(server_side=server_side)
    context = credentials.server_context if server_side else credentials.client_context
    with forks.opening() as mine:
        if native is not None:
            return mine(native.wrap(sock))
        return mine(
            context.wrap_socket(
                sock,
                server_side=server_side,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=False,
            )
        )
