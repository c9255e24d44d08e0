"""On which server a tensor lies. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1 << 16)
def server_of(name: str, servers: tuple[str, ...]) -> str:
    """The server of the tensor ``name``: that of the highest hash of both names.

    Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
    1998): without a table, and with a server more or less only that server's tensors move.
    """
    if len(servers) == 1:
        return servers[0]
    return max(servers, key=lambda server: (_weight(name, server), server))


def split(tensors: Mapping[str, Any], servers: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """``tensors`` by server, in the order of ``servers``; a server may have none."""
    parts: dict[str, dict[str, Any]] = {server: {} for server in servers}
    for name, each in tensors.items():
        parts[server_of(name, servers)][name] = each
    return parts


def _weight(name: str, server: str) -> bytes:
    return hashlib.sha3_256(f"{server}\0{name}".encode()).digest()
