"""One suite for every way to find peers, over the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

import pytest
from zeroconf import DNSOutgoing, DNSPointer, DNSService, DNSText
from zeroconf.const import _CLASS_IN, _FLAGS_AA, _FLAGS_QR_RESPONSE

from potluck._core.cluster.discovery.advert import (
    WINDOW_S,
    Advert,
    Hint,
    encode_beacon,
    make_advert,
    new_instance,
)
from potluck._core.cluster.discovery.beacon import GROUP4, Beacon
from potluck._core.cluster.discovery.configured import StaticPeers
from potluck._core.cluster.discovery.finder import Finder, Presence
from potluck._core.cluster.discovery.interfaces import Interface, usable_interfaces
from potluck._core.cluster.discovery.mdns import SERVICE, Mdns

KEY, OTHER = os.urandom(32), os.urandom(32)
"""Of this process alone: other runs of tests on this machine speak by the same multicast."""
WAIT_S = 60.0


def loopback() -> tuple[Interface, ...]:
    return tuple(each for each in usable_interfaces(loopback=True) if each.is_loopback)


class Hall:
    """Where finders of one kind meet: makes them, and speaks to them as an attacker would."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Hall:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def finder(self, peers: tuple[tuple[str, int], ...]) -> Finder:
        if self.kind == "mdns":
            return Mdns(interfaces=loopback)
        if self.kind == "beacon":
            return Beacon(self.port, interfaces=loopback)
        return StaticPeers(peers)

    async def join(
        self,
        port: int,
        key: bytes = KEY,
        peers: tuple[tuple[str, int], ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> Guest:
        guest = Guest(Presence(lambda: [key], port, new_instance(), clock))
        finder = self.finder(peers)
        await finder.start(guest.presence, guest.heard)
        self._open.push_async_callback(finder.close)
        return guest

    async def join_as(self, advert: Advert) -> None:
        """Somebody who shows ``advert`` again and again."""
        replay = Presence(lambda: [KEY], advert.port, advert.instance, lambda: then)
        then = advert.window * WINDOW_S
        finder = self.finder(())
        await finder.start(replay, lambda hint: None)
        self._open.push_async_callback(finder.close)

    def forge(self, sock: socket.socket, advert: Advert) -> None:
        if self.kind == "beacon":
            sock.sendto(encode_beacon(advert), (GROUP4, self.port))
            return
        name = f"{advert.instance.hex()}.{SERVICE}"
        server = f"{advert.instance.hex()}.local."
        out = DNSOutgoing(_FLAGS_QR_RESPONSE | _FLAGS_AA)
        text = b"".join(
            bytes([len(part)]) + part
            for part in (
                b"v=%d" % advert.version,
                b"w=%d" % advert.window,
                b"t=" + advert.tag.hex().encode(),
            )
        )
        out.add_answer_at_time(DNSPointer(SERVICE, 12, _CLASS_IN, 120, name), 0)
        out.add_answer_at_time(DNSService(name, 33, _CLASS_IN, 120, 0, 0, advert.port, server), 0)
        out.add_answer_at_time(DNSText(name, 16, _CLASS_IN, 120, text), 0)
        [packet] = out.packets()
        sock.sendto(packet, ("224.0.0.251", 5353))


class Guest:
    """Somebody who looks around, and what was found."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self.hints: set[Hint] = set()
        self._changed = asyncio.Event()

    def heard(self, hint: Hint) -> None:
        self.hints.add(hint)
        self._changed.set()

    async def finds(self, port: int, host: str = "") -> Hint:
        async with asyncio.timeout(WAIT_S):
            while True:
                for hint in self.hints:
                    if hint.port == port and hint.host in (host or hint.host,):
                        return hint
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture(params=["mdns", "beacon", "static"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_two_of_one_cluster_find_each_other(kind: str) -> None:
    async def story() -> None:
        async with Hall(kind) as hall:
            ada = await hall.join(1001, peers=(("127.0.0.1", 1002),))
            bob = await hall.join(1002, peers=(("127.0.0.1", 1001),))
            hint = await ada.finds(1002)
            await bob.finds(1001)
            assert hint.source == kind
            assert hint.host in ("127.0.0.1", "::1")
            if kind != "static":
                assert hint.instance == bob.presence.instance.hex()
            assert {each.port for each in ada.hints} == {1002}, "nobody finds itself"

    asyncio.run(story())


def test_a_newcomer_is_found_by_those_who_wait_and_again_and_again(kind: str) -> None:
    async def story() -> None:
        async with Hall(kind) as hall:
            ada = await hall.join(1001, peers=(("localhost", 1002), ("127.0.0.1", 1003)))
            await hall.join(1002)
            await ada.finds(1002)
            ada.hints.clear()
            await hall.join(1003)
            await ada.finds(1003)
            await ada.finds(1002)

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["mdns", "beacon"])
def test_another_cluster_is_not_seen_and_who_only_looks_is_not_seen_either(kind: str) -> None:
    async def story() -> None:
        async with Hall(kind) as hall:
            ada = await hall.join(1001)
            await hall.join(1002, OTHER)
            watcher = await hall.join(0)
            await hall.join(1003)
            await watcher.finds(1001)
            await watcher.finds(1003)
            await ada.finds(1003)
            assert {each.port for each in ada.hints} == {1003}
            assert {each.port for each in watcher.hints} == {1001, 1003}

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["mdns", "beacon"])
def test_a_real_peer_is_found_in_spite_of_10_000_forged_adverts(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with Hall(kind) as hall:
            ada = await hall.join(1001)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
                local = socket.inet_aton("127.0.0.1")
                attacker.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, local)
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                began = loop.time()
                for number in range(10_000):
                    forged = Advert(2, 6666, os.urandom(16), 0, os.urandom(16))
                    hall.forge(attacker, forged)
                    if number % 20 == 0:
                        await asyncio.sleep(0)
                    if number == 5000:
                        flooded = loop.time()
                        await hall.join(1002)
                hint = await ada.finds(1002)
                took = loop.time() - flooded
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert hint.port == 1002
            assert {each.port for each in ada.hints} == {1002}
            seconds = loop.time() - began
            print(
                f"found after {took:.2f} s, flood of {seconds:.2f} s, {grown / 1024:.1f} MiB more"
            )
            assert grown < 100 * 1024, "kilobytes that the flood left behind"
            lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
            assert len(lines) <= 1 + seconds

    asyncio.run(story())


def test_a_replayed_advert_is_only_a_hint() -> None:
    """Whoever sends a member's advert again makes others call an address, where TLS decides."""

    async def story() -> None:
        async with Hall("beacon") as hall:
            ada = await hall.join(1001)
            bob = await hall.join(1002)
            await ada.finds(1002)
            ada.hints.clear()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
                attacker.bind(("127.0.0.9", 0))
                local = socket.inet_aton("127.0.0.1")
                attacker.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, local)
                hall.forge(attacker, make_advert(OTHER, 7, new_instance(), 0))
                hall.forge(attacker, bob.presence.advert())
            replayed = await ada.finds(1002, "127.0.0.9")
            assert replayed.instance == bob.presence.instance.hex()
            assert {each.port for each in ada.hints} == {1002}

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["mdns", "beacon"])
def test_an_advert_that_is_replayed_later_is_no_current_hint(kind: str) -> None:
    """Heard once, and sent again when its node has long gone; the clock of ada goes on."""

    async def story() -> None:
        async with Hall(kind) as hall:
            later = time.time() + 2 * WINDOW_S
            ada = await hall.join(1001, clock=lambda: later)
            recorded = Presence(lambda: [KEY], 1666, new_instance()).advert()
            await hall.join_as(recorded)
            await hall.join(1002, clock=lambda: later)
            assert (await ada.finds(1002)).is_current
            assert not (await ada.finds(1666)).is_current

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["mdns", "beacon"])
def test_a_machine_with_a_wrong_clock_and_a_right_one_hear_each_other(kind: str) -> None:
    async def story() -> None:
        async with Hall(kind) as hall:
            ada = await hall.join(1001)
            bob = await hall.join(1002, clock=lambda: 0.0)
            assert not (await ada.finds(1002)).is_current
            assert not (await bob.finds(1001)).is_current

    asyncio.run(story())


def test_interfaces_that_come_and_go_are_followed() -> None:
    """A laptop that wakes up has other interfaces than when it went to sleep."""

    async def story() -> None:
        async with Hall("beacon") as hall:
            present: list[Interface] = []
            guest = Guest(Presence(lambda: [KEY], 1001, new_instance()))
            finder = Beacon(hall.port, interfaces=lambda: present)
            await finder.start(guest.presence, guest.heard)
            try:
                await hall.join(1002)
                assert guest.hints == set()
                present.extend(loopback())
                await guest.finds(1002)
            finally:
                await finder.close()

    asyncio.run(story())


def test_closing_twice_and_closing_before_anything_happened_are_fine(kind: str) -> None:
    async def story() -> None:
        async with Hall(kind) as hall:
            finder = hall.finder(())
            await finder.close()
            finder = hall.finder(())
            await finder.start(Presence(lambda: [KEY], 1, new_instance()), print)
            await finder.close()
            await finder.close()

    asyncio.run(story())
