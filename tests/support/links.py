"""Connected pairs of every kind of link, and a simple blocking way to use one end."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.system import wait_ready
from potluck._core.transport import native_tls
from potluck._core.transport.credentials import Credentials, era_of
from potluck._core.transport.handshake import connect, tls_handshake
from potluck._core.transport.inproc import inproc_pair, new_killed, socket_pair
from potluck._core.transport.link import Link
from potluck._core.transport.link_memory import NUM_SLOTS, SLOT_BYTES
from potluck._core.transport.listener import Admission, Listener
from potluck._core.transport.tcp import TcpLink, secured
from potluck._core.wire.greeting import Hello, Welcome


def psk(cluster: str = "ours") -> bytes:
    """A secret for tests, the same for the same name: no secret at all."""
    return hashlib.sha256(cluster.encode()).digest()


def make_credentials(
    secret: bytes,
    key: Ed25519PrivateKey,
    objects_to: Callable[[str], str | None] = lambda node: None,
    *,
    use_native: bool = True,
) -> Credentials:
    """Credentials for the holder of ``secret`` whose own key is ``key``."""
    eras = (era_of(secret),)
    return Credentials(key, lambda: eras, objects_to, use_native=use_native)


def new_credentials(cluster: str = "ours", *, use_native: bool = True) -> Credentials:
    """A new node of a cluster; ``use_native``: its links are the native core's, where it is."""
    return make_credentials(psk(cluster), Ed25519PrivateKey.generate(), use_native=use_native)


def tls_ends(
    mine: socket.socket, theirs: socket.socket, *, native: tuple[bool, bool]
) -> tuple[TcpLink, TcpLink]:
    """Both ends of a link under TLS over connected sockets, without knock and greeting. ``native``:
    whether each end is the native core's."""
    socks = []
    for sock, use_native, is_server in zip((mine, theirs), native, (False, True), strict=True):
        sock.setblocking(False)
        socks.append(secured(sock, new_credentials(use_native=use_native), server_side=is_server))
    left = [tls_handshake(each) for each in socks]
    while left:
        left = [steps for steps in left if next(steps, None) is not None]
    first, second = socks
    return (
        TcpLink(first, peer="the second end", peer_node=""),
        TcpLink(second, peer="the first end", peer_node=""),
    )


class Blocking:
    """One end of a link, used the simple way: each call waits until it is done, or TimeoutError."""

    def __init__(self, link: Link, timeout_s: float = 30.0) -> None:
        self.link = link
        self._timeout_s = timeout_s
        self._woken = threading.Event()
        link.bind(self._woken.set)

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._wait(functools.partial(self.link.send, view), True) :]

    def receive(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            view = view[self._wait(functools.partial(self.link.recv_into, view), False) :]
        return bytes(data)

    def _wait(self, attempt: Callable[[], int], write: bool) -> int:
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._woken.clear()
            if count := attempt():
                return count
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing moved on {self.link!r} for {self._timeout_s} s")
            if self.link.fileno() < 0:
                self._woken.wait(left)
            else:
                wait_ready(self.link.fileno(), write=write, timeout_s=left)


@contextlib.contextmanager
def tls_pair(
    *,
    memory: tuple[int, int] | None = (NUM_SLOTS, SLOT_BYTES),
    use_shared_memory: bool = True,
    native: tuple[bool, bool] = (False, False),
) -> Iterator[tuple[TcpLink, TcpLink]]:
    """The client's and the server's end of a real connection over loopback.

    The client offers ``memory`` (slots, bytes), the server takes it if ``use_shared_memory``.
    ``native``: whether the client's and the server's TLS is the native core's.
    """
    server = Listener(
        "127.0.0.1", 0, new_credentials(use_native=native[1]), use_shared_memory=use_shared_memory
    )
    delivered: queue.Queue[TcpLink] = queue.Queue()
    server.serve(lambda hello, node: Admission(Welcome(rank=1), delivered.put))
    credentials = new_credentials(use_native=native[0])
    try:
        client_end, _ = connect(
            "127.0.0.1",
            server.port,
            Hello("data", rank=0, to_rank=1),
            credentials,
            deadline=time.monotonic() + 30,
            memory=memory,
        )
        with contextlib.closing(client_end), contextlib.closing(delivered.get(timeout=30)) as other:
            server.close()  # links outlive the listener that made them
            yield client_end, other
    finally:
        server.close()


@contextlib.contextmanager
def inproc_ends(capacity: int = 1 << 20) -> Iterator[tuple[Link, Link]]:
    """Both ends of a link between threads."""
    a, b = inproc_pair("rank 0", "rank 1", capacity=capacity)
    try:
        yield a, b
    finally:
        a.close()
        b.close()


@contextlib.contextmanager
def socket_ends() -> Iterator[tuple[Link, Link]]:
    """The same, for the native loop."""
    a, b = socket_pair("rank 0", "rank 1", (new_killed(), new_killed()))
    with contextlib.closing(a), contextlib.closing(b):
        yield a, b


LINK_KINDS: dict[str, Callable[[], contextlib.AbstractContextManager[tuple[Link, Link]]]] = {
    "inproc": inproc_ends,
    "tls": functools.partial(tls_pair, memory=None),
    "tls+shm": tls_pair,
}
if native_tls.is_available():
    LINK_KINDS |= {
        "inproc native": socket_ends,
        "native": functools.partial(tls_pair, memory=None, native=(True, True)),
        "native+shm": functools.partial(tls_pair, native=(True, True)),
        "native to tls": functools.partial(tls_pair, memory=None, native=(True, False)),
        "tls to native": functools.partial(tls_pair, memory=None, native=(False, True)),
    }
"""Every implementation of Link, for the conformance suite."""
