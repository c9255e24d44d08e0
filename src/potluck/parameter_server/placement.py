"""On which servers a tensor lies. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple


@lru_cache(maxsize=1 << 16)
def holders(name: str, servers: tuple[str, ...], copies: int = 1) -> tuple[str, ...]:
    """The servers of the tensor ``name``: those of the ``copies`` highest hashes of both names, the
    highest first.

    Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
    1998): without a table, and with a server more or less only that server's tensors move.
    """
    if len(servers) == 1:
        return servers
    order = sorted(servers, key=lambda server: (_weight(name, server), server), reverse=True)
    return tuple(order[:copies])


class Placement(NamedTuple):
    """Where tensors lie: on ``copies`` of the ``servers``, of which those in ``present`` can be
    reached."""

    servers: tuple[str, ...]
    copies: int
    present: tuple[str, ...]

    def holders(self, name: str) -> list[str]:
        """The servers that are present and have the tensor ``name``."""
        every = holders(name, self.servers, self.copies)
        return [server for server in every if server in self.present]

    def split(self, tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """``tensors`` by server, each on all its holders, in the order of ``present``; a server may
        have none."""
        parts: dict[str, dict[str, Any]] = {server: {} for server in self.present}
        for name, each in tensors.items():
            for server in self.holders(name):
                parts[server][name] = each
        return parts

    def sources(self, names: Iterable[str]) -> dict[str, list[str]]:
        """From which server each tensor is fetched, its first holder that is present: names by
        server."""
        parts: dict[str, list[str]] = {}
        for name in names:
            for server in self.holders(name)[:1]:
                parts.setdefault(server, []).append(name)
        return parts


def _weight(name: str, server: str) -> bytes:
    return hashlib.sha3_256(f"{server}\0{name}".encode()).digest()
