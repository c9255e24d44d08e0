"""Ports for processes that a test starts: held by the test, so that no other program gets them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports of the loopback: bound, but not listening. A program that binds with SO_REUSEADDR, as
    servers do, may listen there; the kernel gives them to no program that asks for any port."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
        yield ports
