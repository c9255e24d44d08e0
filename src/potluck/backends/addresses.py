"""Which of this machine's addresses the other ranks should call.

The address on the route to the machine of torch's store, since that network joins all ranks
already. Without a store server (a file): the address of the default route, or the loopback if all
ranks are on one machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from typing import Any

from potluck.transport.memory import boot_id

_ELSEWHERE = ("192.0.2.1", 9)
"""An address of RFC 5737 (documentation): nothing is sent there, the system only picks a route."""

LOOPBACK = "127.0.0.1"


def store_server(store: Any) -> tuple[str, int] | None:
    """Host and port of the server behind ``store``; None if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if host and port else None


def own_address(store: Any) -> str:
    """The host under which other ranks reach this process."""
    server = store_server(store)
    if server is None:
        return address_towards(*_ELSEWHERE) or LOOPBACK
    address = address_towards(*server)
    if address is None:
        return LOOPBACK
    if _is_loopback(address) and not _is_loopback(server[0]):
        # The store is on this machine, and its name (here only) means the loopback. The others
        # have reached it by that name.
        return server[0]
    return address


def machine() -> str:
    """What two processes have in common if, and only if, the loopback joins them."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{boot_id() or socket.gethostname()} {network}"


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the route to ``host``; nothing is sent. None if there is none."""
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
