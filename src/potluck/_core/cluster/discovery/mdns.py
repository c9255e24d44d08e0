"""The finder by mDNS (RFC 6762, 6763): a service ``_potluck._tcp.local.`` on every usable
interface.

The service's name is the random instance id, so no host name is published. The records hold the
advert: the port in SRV, version, time and tag in TXT; A and AAAA hold the addresses, as mDNS needs
them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from potluck._core.background import stop
from potluck._core.cluster.discovery.advert import INSTANCE_BYTES, TAG_BYTES, WINDOW_S, Advert
from potluck._core.cluster.discovery.finder import OnHint, Presence
from potluck._core.cluster.discovery.interfaces import Interface, usable_interfaces
from potluck._core.transport.listener import RateLimitedLog

SERVICE = "_potluck._tcp.local."
INTERVAL_S = 2.0

_TTL_S = 120
_RESOLVE_MS = 1500
_MAX_RESOLVING = 16
_MAX_KNOWN = 256
_KEPT_S = 2 * WINDOW_S
"""The advert of a node that is there changes within ``WINDOW_S``; the sender of a record that is
not changed may have given it any time to live."""

_log = logging.getLogger(__name__)
_zeroconf_log = logging.getLogger("zeroconf")


class _Known(NamedTuple):
    advert: Advert
    addresses: Sequence[str]
    changed: float


class Mdns:
    """A Finder by mDNS. zeroconf gets an explicit list of interfaces whenever they change, because
    its own choice misses some interfaces."""

    name = "mdns"

    def __init__(
        self, *, interfaces: Callable[[], Sequence[Interface]] = usable_interfaces
    ) -> None:
        self.interfaces = interfaces
        self._complain = RateLimitedLog(_log, interval_s=30.0)
        self._known: dict[str, _Known] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._shown: tuple[object, ...] | None = None
        self._info: AsyncServiceInfo | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, presence: Presence, on_hint: OnHint) -> None:
        self._presence, self._on_hint = presence, on_hint
        if _zeroconf_log.level == logging.NOTSET:
            # zeroconf logs a traceback for each interface that does not work at the moment.
            _zeroconf_log.setLevel(logging.ERROR)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await stop(self._task, *self._resolving.values())
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_close()  # withdraws the advert
        self._browser = self._zeroconf = None

    async def _run(self) -> None:
        while True:
            try:
                await self._update()
            except Exception as error:  # must not end the other finders
                self._complain.warning(f"mDNS does not work at the moment: {error}")
            now = asyncio.get_running_loop().time()
            for name, known in list(self._known.items()):
                if now - known.changed > _KEPT_S:
                    del self._known[name]
                else:
                    self._tell(known)
            await asyncio.sleep(INTERVAL_S)

    async def _update(self) -> None:
        interfaces = self.interfaces()
        # zeroconf names IPv4 networks by an address and IPv6 links by the interface's index.
        places: list[Any] = [each for i in interfaces for each in i.ipv4]
        places += [each.index for each in interfaces if each.ipv6 and not each.is_loopback]
        if not places:
            return
        if self._zeroconf is None:
            family = IPVersion.All if socket.has_dualstack_ipv6() else IPVersion.V4Only
            self._zeroconf = AsyncZeroconf(interfaces=places, ip_version=family)
            await self._zeroconf.zeroconf.async_wait_for_start()
            self._browser = AsyncServiceBrowser(
                self._zeroconf.zeroconf, SERVICE, handlers=[self._changed]
            )
        else:
            await self._zeroconf.async_update_interfaces(places)
        if self._presence.port:
            await self._show(self._zeroconf, interfaces)

    async def _show(self, zeroconf: AsyncZeroconf, interfaces: Sequence[Interface]) -> None:
        advert = self._presence.advert()
        addresses = sorted({each for i in interfaces for each in (*i.ipv4, *i.ipv6)})
        shown = (advert, *addresses)
        if shown == self._shown:
            return
        instance = advert.instance.hex()
        info = AsyncServiceInfo(
            SERVICE,
            f"{instance}.{SERVICE}",
            port=advert.port,
            properties={
                "v": str(advert.version),
                "w": str(advert.window),
                "t": advert.tag.hex(),
            },
            server=f"{instance}.local.",
            parsed_addresses=addresses,
            host_ttl=_TTL_S,
            other_ttl=_TTL_S,
        )
        if self._info is None:
            # The name is random and so unique: no probe for conflicts is needed.
            await zeroconf.async_register_service(info, cooperating_responders=True)
        else:
            await zeroconf.async_update_service(info)
        self._info, self._shown = info, shown

    def _changed(
        self,
        zeroconf: Zeroconf,
        service_type: str,
        name: str,
        state_change: ServiceStateChange,
        **_: Any,
    ) -> None:
        instance = _instance_of(name)
        if instance is None or instance == self._presence.instance:
            return
        if state_change is ServiceStateChange.Removed:
            self._known.pop(name, None)
            return
        info = AsyncServiceInfo(SERVICE, name)
        if info.load_from_cache(zeroconf):
            self._found(name, instance, info)
        elif name not in self._resolving and len(self._resolving) < _MAX_RESOLVING:
            task = asyncio.create_task(self._resolve(zeroconf, name, instance, info))
            self._resolving[name] = task
            task.add_done_callback(lambda _: self._resolving.pop(name, None))

    async def _resolve(
        self, zeroconf: Zeroconf, name: str, instance: bytes, info: AsyncServiceInfo
    ) -> None:
        if await info.async_request(zeroconf, _RESOLVE_MS):
            self._found(name, instance, info)

    def _found(self, name: str, instance: bytes, info: AsyncServiceInfo) -> None:
        advert = _advert_of(instance, info)
        if advert is None or not self._presence.recognises(advert):
            return
        addresses = info.parsed_scoped_addresses()[:16]
        self._known.pop(name, None)
        self._known[name] = known = _Known(advert, addresses, asyncio.get_running_loop().time())
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._tell(known)

    def _tell(self, known: _Known) -> None:
        for address in known.addresses:
            self._on_hint(self._presence.hint(known.advert, address, self.name))


def _instance_of(name: str) -> bytes | None:
    label = name.removesuffix(f".{SERVICE}")
    is_hex = len(label) == 2 * INSTANCE_BYTES and set(label) <= set(string.hexdigits)
    return bytes.fromhex(label) if is_hex else None


def _advert_of(instance: bytes, info: AsyncServiceInfo) -> Advert | None:
    texts = info.decoded_properties
    version, window, tag = (texts.get(key) or "" for key in "vwt")
    if not (_is_number(version, 4) and _is_number(window, 9)):
        return None
    if len(tag) != 2 * TAG_BYTES or not set(tag) <= set(string.hexdigits):
        return None
    if info.port is None or not 0 < info.port < 65536:
        return None
    return Advert(int(version), info.port, instance, int(window), bytes.fromhex(tag))


def _is_number(text: str, digits: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= digits
