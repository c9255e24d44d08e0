"""A link in clear text whose every byte is authenticated; its greeting is under mutual TLS 1.3.

For a network on which others may read along but must not change anything (``POTLUCK_WIRE=signed``).
After WELCOME the bytes go in records:

======  =====  ===============================================================
field   bytes  meaning
======  =====  ===============================================================
length  4      of the data, little-endian, 1 to ``RECORD_BYTES``
data
tag     16     of length and data (``record_tags.py``)
======  =====  ===============================================================

A record's data are handed over only after its tag was found right; the first wrong tag ends the
link. That the bytes end is no message: the engine says CLOSE, in a record. The twin:
``native/core/tls/signed.cpp``.
"""

from __future__ import annotations

import hmac
import socket
import ssl
import struct
from typing import Any

from potluck._core import native
from potluck._core.system import send_parts
from potluck._core.transport.link_memory import LinkMemory
from potluck._core.transport.native_tls import NativeTlsSocket, TlsSocket
from potluck._core.transport.record_tags import RECORDS_PER_KEY, TAG_BYTES, Keys, RecordTags
from potluck._core.transport.tcp import TURN_BYTES, TcpLink
from potluck.errors import LinkError, ProtocolError

RECORD_BYTES = 64 * 1024 + 64
"""The most data of one record: 64 KiB, behind the header of a frame."""

_LENGTH = struct.Struct("<I")
OVERHEAD = _LENGTH.size + TAG_BYTES


class SignedLink(TcpLink):
    """One connection to a rank that proved itself; see ``link.py`` for what each method promises.

    TLS ended without its goodbye: neither side reads another record of TLS, and both know, because
    HELLO and WELCOME (which went under TLS) name the mode.
    """

    def __init__(
        self,
        sock: TlsSocket,
        keys: Keys,
        *,
        peer: str,
        peer_node: str,
        memory: LinkMemory | None = None,
        records_per_key: int = RECORDS_PER_KEY,
    ) -> None:
        super().__init__(sock, peer=peer, peer_node=peer_node, memory=memory)
        self._sends = RecordTags(keys.sends, records_per_key)
        self._receives = RecordTags(keys.receives, records_per_key)
        # The record that is being sent: its data are the first bytes that the caller offers.
        self._head = self._tag = b""
        self._size = 0
        self._sent = 0  # bytes of the record that the kernel has
        # What was received: a record's data that may be handed over, then what follows that record.
        self._incoming = memoryview(bytearray(2 * (RECORD_BYTES + OVERHEAD)))
        self._at = self._end_of_data = self._next = self._filled = 0
        self._is_starved = True

    @property
    def stream(self) -> None:
        return None

    def __repr__(self) -> str:
        return f"<SignedLink to {self._peer}>"

    # -- sending

    def send(self, data: memoryview) -> int:
        """A record's last bytes count as taken once its tag has left, too."""
        self._check_sending()
        total = 0
        limit = min(len(data), TURN_BYTES)
        while total < limit:
            if not self._size:
                self._begin(data[total : total + min(limit - total, RECORD_BYTES)])
            taken = self._taken
            left = self._push(data[total : total + self._size - taken])
            total += self._taken - taken
            if left:
                break
            self._size = self._sent = 0
        return total

    @property
    def _taken(self) -> int:
        """How many bytes of the record the caller need not offer again."""
        return max(0, self._sent - OVERHEAD)

    def _begin(self, data: memoryview) -> None:
        self._size = len(data)
        self._head = _LENGTH.pack(self._size)
        self._tag = self._sends.next(self._head, data)

    def _push(self, data: memoryview) -> int:
        """Send what is left of the record, whose data go on with ``data``. What is then left."""
        whole = self._size + OVERHEAD
        begin = max(0, self._sent - len(self._head)) - self._taken
        behind = max(0, self._sent - len(self._head) - self._size)
        parts = (self._head[self._sent :], data[begin:], self._tag[behind:])
        try:
            self._sent += send_parts(self._sock, parts)
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error, "sending")
        return whole - self._sent

    # -- receiving

    def recv_into(self, buffer: memoryview) -> int:
        total = 0
        limit = min(len(buffer), TURN_BYTES)
        self._is_starved = False
        try:
            while total < limit:
                count = min(limit - total, self._end_of_data - self._at)
                if not count and not self._next_record():
                    self._is_starved = True
                    break
                buffer[total : total + count] = self._incoming[self._at : self._at + count]
                self._at += count
                total += count
        except LinkError:
            if not total:
                raise
        return total

    def _next_record(self) -> bool:
        """Whether another record is whole, and its tag right."""
        if self._end is not None:
            raise self._end
        while not self._is_whole():
            if not self._fill():
                return False
        begin, end = self._next + _LENGTH.size, self._next + self._length() + _LENGTH.size
        tag = self._receives.next(self._incoming[self._next : end])
        if not hmac.compare_digest(tag, self._incoming[end : end + TAG_BYTES]):
            self._forget()
            self._break("a record's tag is wrong: its bytes were changed, added or left out")
        self._at, self._end_of_data, self._next = begin, end, end + TAG_BYTES
        return True

    def _length(self) -> int:
        length: int = _LENGTH.unpack_from(self._incoming, self._next)[0]
        return length

    def _is_whole(self) -> bool:
        have = self._filled - self._next
        if have < _LENGTH.size:
            return False
        length = self._length()
        if not 1 <= length <= RECORD_BYTES:
            self._break(f"a record of {length} bytes; at most {RECORD_BYTES} are allowed")
        return have >= length + OVERHEAD

    def _fill(self) -> bool:
        """Receive once; False if there was nothing."""
        if self._next == self._filled:
            self._next = self._filled = 0
        elif self._next + RECORD_BYTES + OVERHEAD > len(self._incoming):
            rest = bytes(self._incoming[self._next : self._filled])
            self._incoming[: len(rest)] = rest
            self._next, self._filled = 0, len(rest)
        try:
            count = socket.socket.recv_into(self._sock, self._incoming[self._filled :])
            if count == 0:
                raise ssl.SSLZeroReturnError
        except BlockingIOError:
            return False
        except OSError as error:
            self._fail(error, "receiving")
        self._filled += count
        return True

    def _break(self, reason: str) -> None:
        self._end = LinkError(f"link to {self._peer} broke while receiving: {reason}")
        raise self._end

    @property
    def readable(self) -> bool:
        has_bytes = self._at < self._end_of_data or self._next < self._filled
        return self._end is not None or (has_bytes and not self._is_starved)

    def _forget(self) -> None:
        self._sends.forget()
        self._receives.forget()

    def close(self) -> None:
        super().close()
        self._forget()
        self._at = self._end_of_data = self._next = self._filled = 0


class NativeSignedLink(TcpLink):
    """The same by the native core. Its ``stream`` has the only counters: the progress loop calls it
    directly, and the methods here do as well."""

    def __init__(
        self,
        sock: TlsSocket,
        keys: Keys,
        *,
        peer: str,
        peer_node: str,
        memory: LinkMemory | None = None,
        records_per_key: int = RECORDS_PER_KEY,
    ) -> None:
        super().__init__(sock, peer=peer, peer_node=peer_node, memory=memory)
        self._stream = native.core.SignedStream(
            sock.fileno(), keys.sends, keys.receives, records_per_key, peer
        )

    @property
    def stream(self) -> Any:
        return self._stream

    def __repr__(self) -> str:
        return f"<NativeSignedLink to {self._peer}>"

    def send(self, data: memoryview) -> int:
        self._check_sending()
        try:
            return self._stream.send(data[:TURN_BYTES])
        except RuntimeError as error:
            raise LinkError(str(error)) from None

    def recv_into(self, buffer: memoryview) -> int:
        if self._end is not None:
            raise self._end
        try:
            return self._stream.recv_into(buffer[:TURN_BYTES])
        except RuntimeError as error:
            raise LinkError(str(error)) from None

    @property
    def readable(self) -> bool:
        return self._end is not None or self._stream.is_readable


def signed_link(
    sock: TlsSocket,
    keys: Keys,
    *,
    peer: str,
    peer_node: str,
    memory: LinkMemory | None,
) -> TcpLink:
    """The link over ``sock``, by the native core if its TLS was."""
    made = NativeSignedLink if isinstance(sock, NativeTlsSocket) else SignedLink
    return made(sock, keys, peer=peer, peer_node=peer_node, memory=memory)


def check_nothing_is_left(sock: TlsSocket, peer: str) -> None:
    """ProtocolError if TLS still holds bytes: what follows the greeting is in clear text."""
    is_clean = sock.stream.is_clean() if isinstance(sock, NativeTlsSocket) else not sock.pending()
    if not is_clean:
        raise ProtocolError(f"{peer} went on under TLS after a greeting that ends it")
