"""Where a process listens when it is told an interface or an address."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from potluck._core.cluster.discovery.configured import all_finders
from potluck._core.cluster.discovery.interfaces import bound_interfaces, usable_interfaces
from potluck._core.settings import Settings, load_settings
from potluck._core.transport import aio, binding, listener
from potluck._core.transport.binding import (
    address_for_others,
    addresses_of,
    listened_on,
    source_for,
)
from potluck._core.transport.listener import is_port_taken, listening_at, listening_socket
from potluck.errors import ConfigurationError
from support.ports import reserved_ports

LO = next(each.name for each in usable_interfaces(loopback=True) if each.is_loopback)


def can_connect(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def test_one_interface_stands_for_its_addresses_and_nothing_for_all() -> None:
    assert addresses_of("") == ()
    assert "127.0.0.1" in addresses_of(LO)
    assert addresses_of("127.0.0.1") == ("127.0.0.1",)
    assert address_for_others("") == address_for_others(LO) == ""


@pytest.mark.parametrize("bind", ["eth77", "192.0.2.1", "lo0 ", "local host", "::2"])
def test_a_name_that_does_not_exist_is_an_error_that_lists_those_that_do(bind: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        listening_socket(bind, 0)
    text = str(caught.value)
    assert text.startswith(f"POTLUCK_BIND or --interface {bind!r}: this machine has no interface")
    assert "there are: " in text
    assert f"{LO} (127.0.0.1" in text


def test_all_addresses_have_one_port_and_the_loopback_is_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"eth9": ("127.0.0.8", "127.0.0.9"), LO: ("127.0.0.1",)}
    monkeypatch.setattr(binding, "_interfaces", lambda: found)
    assert listened_on("eth9") == ("127.0.0.1", "127.0.0.8", "127.0.0.9")
    with contextlib.closing(listening_socket("eth9", 0)) as sock:
        for host in listened_on("eth9"):
            assert can_connect(host, sock.port)
        assert not can_connect("127.0.0.7", sock.port)
    with contextlib.closing(listening_socket("127.0.0.9", 0)) as sock:
        assert can_connect("127.0.0.1", sock.port)
        assert not can_connect("127.0.0.8", sock.port)


def test_calls_come_from_an_address_that_can_be_called_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {
        "eth9": ("192.0.2.7", "2001:db8::7", "fe80::7%eth9"),
        "eth8": ("192.0.2.8",),
        LO: ("127.0.0.1",),
    }
    monkeypatch.setattr(binding, "_interfaces", lambda: found)
    assert source_for("", "192.0.2.1") == ""
    assert source_for("eth9", "127.0.0.1") == source_for("eth9", "::1") == ""
    assert source_for("eth9", "198.51.100.1") == "192.0.2.7"
    assert source_for("eth9", "2001:db8:1::1") == "2001:db8::7"
    assert source_for("eth9", "fe80::1%eth9") == "fe80::7%eth9"
    assert source_for("2001:db8::7", "2001:db8::1") == "2001:db8::7"
    with pytest.raises(OSError, match=r"eth8 \(192\.0\.2\.8\) can't call 2001:db8::1"):
        source_for("eth8", "2001:db8::1")


def test_a_call_from_an_address_arrives_as_one_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second loopback address stands for an interface's; the caller of it is not on loopback."""
    monkeypatch.setattr(binding, "_interfaces", lambda: {"eth9": ("127.0.0.9",)})
    monkeypatch.setattr(binding, "_is_loopback", lambda address: False)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        with contextlib.closing(asyncio.run(aio.dial("127.0.0.1", port, "eth9"))):
            server.settimeout(10)
            caller, (host, _) = server.accept()
            caller.close()
            assert host == "127.0.0.9"


def test_a_port_that_another_program_has_at_one_address_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(binding, "_interfaces", lambda: {"eth9": ("127.0.0.9",)})
    # The port is held at the other address, so that no other program gets it there.
    with reserved_ports(1) as [port], contextlib.closing(listening_at("127.0.0.9", port)):
        with pytest.raises(ConfigurationError, match=r"127\.0\.0\.9 is in use") as caught:
            listening_socket("eth9", port)
        assert is_port_taken(caught.value)
        assert can_connect("127.0.0.9", port), "the other program's"
        assert not can_connect("127.0.0.1", port), "nothing is left"
        free = listening_socket("eth9", 0)
        first = free.port
        free.close()
        ports = iter([port, first])
        real = listening_at
        monkeypatch.setattr(
            listener,
            "listening_at",
            lambda address, port: real(address, port or next(ports)),
        )
        with contextlib.closing(listening_socket("eth9", 0)) as sock:
            assert sock.port == first, "with any port, the next is tried"


def test_discovery_works_on_the_named_interface_only() -> None:
    assert [each.name for each in bound_interfaces(LO)] == [LO]
    assert [each.name for each in bound_interfaces("127.0.0.1")] == [LO]
    assert bound_interfaces("") == usable_interfaces()
    for finder in all_finders(Settings(bind=LO)):
        assert [each.name for each in finder.interfaces()] == [LO]  # type: ignore[attr-defined]


def test_the_setting_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_BIND", "eth0")
    assert load_settings().bind == "eth0"
    assert load_settings(bind="eth1").bind == "eth1"
