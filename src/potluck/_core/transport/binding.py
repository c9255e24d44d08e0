"""The addresses that this machine listens on: of all interfaces, of one, or one address."""

from __future__ import annotations

import errno
import ipaddress
import socket

from potluck.errors import ConfigurationError

LOOPBACK = "127.0.0.1"


def addresses_of(bind: str) -> tuple[str, ...]:
    """The addresses that ``bind``, the name of an interface or an address, stands for; none for
    ``""``, all interfaces.

    ConfigurationError, with those that exist, if this machine has no such interface or address.
    """
    if not bind:
        return ()
    found = _interfaces()
    if bind in found:
        if not found[bind]:
            raise ConfigurationError(f"the interface {bind} has no address; there are: {_all()}")
        return found[bind]
    if any(_is_same(bind, address) for each in found.values() for address in each):
        return (bind,)
    raise ConfigurationError(
        f"POTLUCK_BIND or --interface {bind!r}: this machine has no interface or address of this "
        f"name; there are: {_all()}"
    )


def interface_named(bind: str) -> str:
    """The name of the interface that ``bind`` stands for; empty for all."""
    for name, addresses in _interfaces().items():
        if bind == name or any(_is_same(bind, address) for address in addresses):
            return name
    return ""


def address_for_others(bind: str) -> str:
    """The first address of ``bind`` that other machines may reach; empty for all interfaces."""
    return next((each for each in addresses_of(bind) if not _is_loopback(each)), "")


def listened_on(bind: str) -> tuple[str, ...]:
    """The addresses to listen on for ``bind``, which is not empty. The loopback is one of them:
    this machine's own commands and workers call it."""
    addresses = addresses_of(bind)
    return addresses if LOOPBACK in addresses else (LOOPBACK, *addresses)


def source_for(bind: str, host: str) -> str:
    """The address of ``bind`` to call the address ``host`` from; empty for any: all interfaces, and
    calls of this machine by its loopback. A node that is called sends later calls, and those of its
    workers, to the address that it was called from.

    OSError if ``bind`` has no address of the kind of ``host``.
    """
    if not bind or _is_loopback(host):
        return ""
    called, sources = ipaddress.ip_address(host), addresses_of(bind)
    for source in sources:
        address = ipaddress.ip_address(source)
        if address.version == called.version and address.is_link_local == called.is_link_local:
            return source
    why = f"{bind} ({', '.join(sources)}) can't call {host} from there"
    raise OSError(errno.EADDRNOTAVAIL, why)


def _interfaces() -> dict[str, tuple[str, ...]]:
    import psutil  # 10 ms, which programs that name no interface need not spend

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        str(name): tuple(each.address for each in addresses if each.family in families)
        for name, addresses in psutil.net_if_addrs().items()
    }


def _all() -> str:
    return ", ".join(
        f"{name} ({', '.join(addresses) or 'no address'})"
        for name, addresses in sorted(_interfaces().items())
    )


def _is_same(text: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(text) == ipaddress.ip_address(address)
    except ValueError:
        return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
