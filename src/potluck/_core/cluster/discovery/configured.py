"""The finders of the settings, and the finder by configured addresses (``POTLUCK_PEERS``), for
networks without multicast."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from functools import partial

from potluck._core.background import stop
from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.discovery.beacon import Beacon
from potluck._core.cluster.discovery.finder import Finder, OnHint, Presence
from potluck._core.cluster.discovery.interfaces import bound_interfaces
from potluck._core.cluster.discovery.mdns import Mdns
from potluck._core.settings import Settings
from potluck._core.transport.listener import RateLimitedLog
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


WAYS = ("mdns", "beacon", "static")


def all_finders(settings: Settings, default_port: int = 0) -> list[Finder]:
    """The finders of ``settings.discovery``; static peers only if ``settings.peers`` is not empty.

    They work on the interface of ``settings.bind`` only, if it names one. ``default_port`` is the
    port of peers without a port (0: the settings' discovery port).
    ConfigurationError for an unknown name, or for invalid peers.
    """
    wanted = [each.strip() for each in settings.discovery.split(",") if each.strip()]
    unknown = [each for each in wanted if each not in WAYS]
    if unknown:
        raise ConfigurationError(
            f"POTLUCK_DISCOVERY={settings.discovery!r}: there is no way {unknown[0]!r}; write one "
            f"or more of {', '.join(WAYS)}, separated by commas"
        )
    peers = parse_peers(settings.peers, default_port or settings.discovery_port)
    found: list[Finder] = []
    if "mdns" in wanted:
        found.append(Mdns(interfaces=partial(bound_interfaces, settings.bind)))
    if "beacon" in wanted:
        interfaces = partial(bound_interfaces, settings.bind, loopback=True)
        found.append(Beacon(settings.discovery_port, interfaces=interfaces))
    if "static" in wanted and peers:
        found.append(StaticPeers(peers))
    return found
