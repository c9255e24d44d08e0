"""The finders of the settings."""

from __future__ import annotations

from functools import partial

from potluck._core.cluster.discovery.beacon import Beacon
from potluck._core.cluster.discovery.finder import Finder
from potluck._core.cluster.discovery.interfaces import bound_interfaces
from potluck._core.cluster.discovery.mdns import Mdns
from potluck._core.cluster.discovery.static import StaticPeers, parse_peers
from potluck._core.settings import Settings
from potluck.errors import ConfigurationError

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
