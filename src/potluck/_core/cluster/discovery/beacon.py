"""The beacon: an advert of 44 bytes, sent by UDP multicast on every interface, IPv4 and IPv6.

It works where mDNS does not: the network filters it, or another program holds its port
(``tests/net/test_discovery.py -k another_program_holds``). A node sends a few
beacons quickly at its start, then one every ``INTERVAL_S``, and one soon after it has received the
beacon of a new node, so that the new node need not wait. Packets have a hop limit of 1: they never
leave their network.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from potluck._core import forks
from potluck._core.background import stop, why
from potluck._core.cluster.discovery.advert import (
    BEACON_BYTES,
    Advert,
    decode_beacon,
    encode_beacon,
)
from potluck._core.cluster.discovery.finder import OnHint, Presence
from potluck._core.cluster.discovery.interfaces import Interface, usable_interfaces
from potluck._core.transport.listener import RateLimitedLog

GROUP4 = "239.255.52.15"
"""An IPv4 multicast address with site scope (RFC 2365)."""
GROUP6 = "ff12::706c:636b"
"""A transient IPv6 multicast address with link scope (RFC 4291, 2.7)."""
INTERVAL_S = 2.0

_FIRST_PAUSES_S = (0.1, 0.3, 0.6, 1.0)
_ANSWER_S = 0.2
_BURST = 64
_MAX_HEARD = 256

_IP_MULTICAST_ALL = (socket.IPPROTO_IP, 49)
_IPV6_MULTICAST_ALL = (socket.IPPROTO_IPV6, 29)
"""Linux's numbers, which Python does not name."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Beacon:
    """A Finder by beacons on UDP ``port``, which must be equal on all nodes."""

    name = "beacon"

    port: int
    _: KW_ONLY
    interfaces: Callable[[], Sequence[Interface]] = lambda: usable_interfaces(loopback=True)

    def __post_init__(self) -> None:
        self._complain = RateLimitedLog(_log)
        self._sockets: dict[socket.AddressFamily, socket.socket] = {}
        self._joined: set[tuple[socket.AddressFamily, str, int]] = set()
        self._heard: dict[bytes, None] = {}
        self._soon = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, presence: Presence, on_hint: OnHint) -> None:
        self._presence, self._on_hint = presence, on_hint
        self._task = asyncio.create_task(self._speak())

    async def close(self) -> None:
        await stop(self._task)
        self._shut()

    async def _speak(self) -> None:
        pauses = iter(_FIRST_PAUSES_S)
        while True:
            self._soon.clear()
            try:
                self._join_groups()
                if self._presence.port:
                    self._send(encode_beacon(self._presence.advert()))
            except Exception as error:  # must not end the other finders
                self._complain.warning(f"the beacon does not work at the moment: {why(error)}")
            pause = next(pauses, INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._soon.wait()
                    await asyncio.sleep(_ANSWER_S)  # one beacon answers all nodes of this time

    def _join_groups(self) -> None:
        """Open missing sockets, and join the multicast groups on new interfaces."""
        self._present = self.interfaces()
        for family in (socket.AF_INET, socket.AF_INET6):
            if family not in self._sockets:
                self._open(family)
        wanted = {
            (family, address, interface.index)
            for interface in self._present
            for family, address in _places(interface)
            if family in self._sockets
        }
        self._joined &= wanted
        for place in wanted - self._joined:
            if self._join(*place):
                self._joined.add(place)

    def _open(self, family: socket.AddressFamily) -> None:
        with forks.opening() as mine:
            sock = mine(socket.socket(family, socket.SOCK_DGRAM))
        try:
            sock.setblocking(False)
            # Several nodes on one machine share the port: each gets every multicast datagram.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform != "linux" and hasattr(socket, "SO_REUSEPORT"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 1)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            if sys.platform == "linux":
                # Else the datagrams of all groups that any program here has joined come in.
                everybodys = _IPV6_MULTICAST_ALL if family == socket.AF_INET6 else _IP_MULTICAST_ALL
                sock.setsockopt(*everybodys, 0)
            sock.bind(("", self.port))
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                self._complain.warning(f"no beacon on UDP port {self.port}: {error}")
            return
        self._sockets[family] = sock
        asyncio.get_running_loop().add_reader(sock, self._hear, sock)

    def _join(self, family: socket.AddressFamily, address: str, index: int) -> bool:
        sock = self._sockets[family]
        try:
            if family == socket.AF_INET:
                member = socket.inet_aton(GROUP4) + socket.inet_aton(address)
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            else:
                member = socket.inet_pton(family, GROUP6) + struct.pack("@I", index)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
        except OSError as error:
            # EADDRINUSE: another address of the same interface has already joined.
            return error.errno == errno.EADDRINUSE
        return True

    def _send(self, data: bytes) -> None:
        for interface in self._present:
            for family, address in _places(interface):
                sock = self._sockets.get(family)
                if sock is None:
                    continue
                try:
                    if family == socket.AF_INET:
                        source = socket.inet_aton(address)
                        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, source)
                        sock.sendto(data, (GROUP4, self.port))
                    else:
                        which = struct.pack("@I", interface.index)
                        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, which)
                        sock.sendto(data, (GROUP6, self.port, 0, interface.index))
                except OSError as error:
                    _log.debug("no beacon on %s: %s", interface.name, error)

    def _hear(self, sock: socket.socket) -> None:
        """Read at most ``_BURST`` datagrams, so that a flood does not block the event loop."""
        for _ in range(_BURST):
            try:
                data, address = sock.recvfrom(BEACON_BYTES + 1)
            except BlockingIOError:
                return
            except OSError as error:  # the interface is down
                _log.debug("beacon: %s", error)
                return
            advert = decode_beacon(data)
            if advert is not None and self._presence.recognises(advert):
                self._found(advert, socket.getnameinfo(address, _NUMERIC)[0])

    def _found(self, advert: Advert, host: str) -> None:
        if advert.instance not in self._heard:
            self._heard[advert.instance] = None
            if len(self._heard) > _MAX_HEARD:
                del self._heard[next(iter(self._heard))]
            self._soon.set()
        self._on_hint(self._presence.hint(advert, host, self.name))

    def _shut(self) -> None:
        sockets, self._sockets = self._sockets, {}
        self._joined.clear()
        for sock in sockets.values():
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()


_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV | socket.NI_DGRAM


def _places(interface: Interface) -> list[tuple[socket.AddressFamily, str]]:
    """The source addresses for an interface: one in each of its IPv4 networks, and one of IPv6."""
    places = [(socket.AF_INET, address) for address in interface.ipv4]
    local = [each for each in interface.ipv6 if ipaddress.ip_address(each).is_link_local]
    if local or interface.ipv6:
        places.append((socket.AF_INET6, (local or list(interface.ipv6))[0]))
    return places
