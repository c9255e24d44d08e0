"""How long it takes until a link may be used, beside a bare handshake of mutual TLS 1.3.

    python benchmarks/connections.py          # about 20 s
    python benchmarks/connections.py --save   # keep the result in benchmarks/results/

Both ends are in one process, over the loopback, in turns. ``bare TLS`` is what Python's ``ssl``
needs for TCP and TLS with Ed25519 certificates on both sides. potluck adds the knock, the check of
the key on the list of admitted keys, HELLO and WELCOME; between workers also the check of the
delegation by their node.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import script
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.trust.credentials import (
    load_admissions,
    load_credentials,
    load_or_create_identity,
)
from potluck._core.settings import Settings
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.delegation import delegate
from potluck._core.transport.handshake import connect
from potluck._core.transport.link import Link
from potluck._core.transport.listener import Admission, Listener
from potluck._core.wire.greeting import Hello, Welcome
from potluck.cli.bench.machine import machine
from support.clusters import found_cluster

ROUNDS, CALLS = 9, 60

Connect = Callable[[], None]
"""Makes one connection, both ends of it, and closes it."""


def measure(quick: bool, say: script.Say) -> script.Measured:
    rounds, calls = (2, 10) if quick else (ROUNDS, CALLS)
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found_cluster(home / "a", home / "b")
        a, b = (load_credentials(Settings(home=home / name)) for name in "ab")
        ways = {
            "bare TLS": stack.enter_context(bare(a, b)),
            "nodes": stack.enter_context(potluck(a, b)),
            "workers": stack.enter_context(potluck(worker_of(home / "a"), worker_of(home / "b"))),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, once in ways.items():
                once()
                began = time.perf_counter()
                for _ in range(calls):
                    once()
                taken[way].append((time.perf_counter() - began) / calls)
    rows: dict[str, dict[str, float]] = {}
    say(f"\n  {'connection':12}{'ms':>8}{'a second':>10}{'of bare TLS':>13}")
    for way, seconds in taken.items():
        middle = statistics.median(seconds)
        ratio = statistics.median(
            mine / other for mine, other in zip(seconds, taken["bare TLS"], strict=True)
        )
        rows[way] = {"seconds": middle, "ratio": ratio}
        say(f"  {way:12}{middle * 1e3:8.2f}{1 / middle:10.0f}{ratio:12.2f}x")
    result: dict[str, Any] = {"machine": machine(), "rows": rows}
    return result, []


def worker_of(home: Path) -> Credentials:
    """Credentials of a worker in a job of the node of ``home``."""
    settings, key = Settings(home=home), Ed25519PrivateKey.generate()
    delegation = delegate(load_or_create_identity(home), key.public_key(), "train-1")
    eras = load_credentials(settings).eras
    admissions = load_admissions(settings)
    return Credentials(key, lambda: eras, admissions.objects_to, delegation=delegation)


@contextlib.contextmanager
def potluck(server: Credentials, client: Credentials) -> Iterator[Connect]:
    """Links between these two."""
    arrived: queue.Queue[Link] = queue.Queue()
    with contextlib.closing(Listener("127.0.0.1", 0, server)) as listener:
        listener.serve(lambda hello, node: Admission(Welcome(), arrived.put))

        def once() -> None:
            deadline = time.monotonic() + 30
            hello = Hello("data", job="train-1", rank=0, to_rank=1)
            link, _ = connect(
                "127.0.0.1", listener.port, hello, client, deadline=deadline, memory=None
            )
            link.close()
            arrived.get(timeout=30).close()

        yield once


@contextlib.contextmanager
def bare(server: Credentials, client: Credentials) -> Iterator[Connect]:
    """TCP and TLS, with the certificates of these two, and a byte from the server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    sock, _ = listening.accept()
                except OSError:
                    return
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with (
                    contextlib.suppress(ssl.SSLError, OSError),
                    server.server_context.wrap_socket(sock, server_side=True) as tls,
                ):
                    tls.send(b"x")

        thread = threading.Thread(target=serve)
        thread.start()

        def once() -> None:
            sock = socket.create_connection(listening.getsockname())
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with client.client_context.wrap_socket(sock) as tls:
                assert tls.recv(1) == b"x"

        try:
            yield once
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


if __name__ == "__main__":
    sys.exit(script.main("connections", __doc__ or "", measure))
