"""The finder by configured addresses (``POTLUCK_PEERS``), for networks without multicast."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

from potluck._core.background import stop
from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.discovery.finder import OnHint
from potluck._core.cluster.discovery.presence import Presence
from potluck._core.transport.rate import RateLimitedLog
from potluck.errors import ConfigurationError

INTERVAL_S = 2.0
MAX_PEERS = 256

_log = logging.getLogger(__name__)


class StaticPeers:
    """A Finder whose hints are ``peers``. Names are resolved again every ``INTERVAL_S``, since
    their addresses may change.

    It does not advertise this node: of two nodes, one must have the other in its list.
    """

    name = "static"

    def __init__(self, peers: Sequence[tuple[str, int]]) -> None:
        self._peers = tuple(peers)
        self._complain = RateLimitedLog(_log, interval_s=30.0)
        self._task: asyncio.Task[None] | None = None

    async def start(self, presence: Presence, on_hint: OnHint) -> None:
        self._task = asyncio.create_task(self._resolve(on_hint))

    async def close(self) -> None:
        await stop(self._task)

    async def _resolve(self, on_hint: OnHint) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for host, port in self._peers:
                try:
                    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                except OSError as error:
                    self._complain.warning(
                        f"POTLUCK_PEERS: the name {host!r} can't be resolved: {error}"
                    )
                    continue
                for _, _, _, _, address in found:
                    with contextlib.suppress(OSError):
                        name = socket.getnameinfo(
                            address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
                        )[0]
                        on_hint(Hint(name, port, self.name))
            await asyncio.sleep(INTERVAL_S)


def parse_peers(text: str, default_port: int) -> tuple[tuple[str, int], ...]:
    """The pairs of host and port in ``"attic, 192.168.1.20:52415, [fd00::2]:52415"``.

    ConfigurationError for an invalid address, and for more than ``MAX_PEERS``.
    """
    peers = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        host, port = part, str(default_port)
        if part.startswith("["):
            host, bracket, rest = part[1:].partition("]")
            if not bracket or (rest and not rest.startswith(":")):
                raise _unreadable(part)
            port = rest[1:] or port
        elif part.count(":") == 1:
            host, port = part.split(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
            raise _unreadable(part)
        peers.append((host, int(port)))
    if len(peers) > MAX_PEERS:
        raise ConfigurationError(
            f"POTLUCK_PEERS lists {len(peers)} peers; at most {MAX_PEERS} are used"
        )
    return tuple(peers)


def _unreadable(part: str) -> ConfigurationError:
    return ConfigurationError(
        f"POTLUCK_PEERS: {part!r} is no address; write host, host:port or [ipv6]:port, separated "
        "by commas: POTLUCK_PEERS=192.168.1.20,attic.local:52415"
    )
