"""The address of this machine that other ranks connect to.

It is the address on the route to the server of torch's store, since all ranks reach that server.
Without a store server (a file): the address of the default route, or the loopback if all ranks are
on one machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from typing import Any

from potluck._core.transport.memory import boot_id

_ELSEWHERE = ("192.0.2.1", 9)
"""An address of RFC 5737 (documentation). No packet is sent; the system only chooses a route."""

LOOPBACK = "127.0.0.1"


def store_server(store: Any) -> tuple[str, int] | None:
    """Host and port of the server of ``store``; None if it has no server."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if host and port else None


def own_address(store: Any) -> str:
    """The address or name at which other ranks reach this process."""
    server = store_server(store)
    if server is None:
        return address_towards(*_ELSEWHERE) or LOOPBACK
    address = address_towards(*server)
    if address is None:
        return LOOPBACK
    if _is_loopback(address) and not _is_loopback(server[0]):
        # The store is on this machine, and its name resolves to the loopback here only. Other ranks
        # have reached the store by that name.
        return server[0]
    return address


def machine() -> str:
    """An identifier that is equal for two processes if and only if they share a loopback."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{boot_id() or socket.gethostname()} {network}"


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the route to ``host``; None without a route. Sends no packet."""
    with contextlib.suppress(OSError):
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            found: str = sock.getsockname()[0]
            return found
    return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
