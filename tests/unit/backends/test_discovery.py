"""Scripts that find each other without an agent: three in threads of this process, on the loopback.

Each process that runs for itself has a backend of its own; threads stand in for processes here, and
tests/net has hosts.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import potluck
from potluck._core.backends.discovery import AutoDiscoveryBackend
from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.discovery.beacon import Beacon
from potluck._core.cluster.discovery.configured import StaticPeers
from potluck._core.cluster.discovery.finder import Finder
from potluck._core.cluster.discovery.interfaces import Interface, usable_interfaces
from potluck._core.cluster.discovery.mdns import Mdns
from potluck._core.settings import load_settings
from potluck.errors import ConfigurationError, LinkError, OperationTimeout

WAIT_S = 30.0


def loopback() -> tuple[Interface, ...]:
    return tuple(each for each in usable_interfaces(loopback=True) if each.is_loopback)


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def together(world_size: int, finders: Callable[[], Sequence[Finder]]) -> list[tuple[int, float]]:
    """Rank and sum of ranks + 1, from each of ``world_size`` threads."""

    def script(_: int) -> tuple[int, float]:
        backend = AutoDiscoveryBackend(world_size, finders=finders(), port=0)
        with potluck.DistributedContext(backend, timeout_s=WAIT_S) as context:
            assert context.world_size == world_size
            total = context.all_reduce(np.array([context.rank + 1.0]), op="sum")
            return context.rank, float(total[0])

    with ThreadPoolExecutor(world_size) as pool:
        return sorted(pool.map(script, range(world_size)))


def test_three_find_each_other_by_the_beacon_and_train() -> None:
    port = free_port()
    assert together(3, lambda: [Beacon(port, interfaces=loopback)]) == [(0, 6), (1, 6), (2, 6)]


def test_two_find_each_other_by_mdns() -> None:
    assert together(2, lambda: [Mdns(interfaces=loopback)]) == [(0, 3), (1, 3)]


def test_addresses_written_down_are_enough_and_one_direction_is() -> None:
    first = AutoDiscoveryBackend(2, finders=[], port=0)
    second = AutoDiscoveryBackend(2, finders=[StaticPeers([("127.0.0.1", first.port)])], port=0)
    with ThreadPoolExecutor(2) as pool:
        rings = list(pool.map(lambda each: each.establish_ring(WAIT_S), (first, second)))
    assert sorted(ring.rank for ring in rings) == [0, 1]
    for ring in rings:
        ring.close()
    for backend in (first, second):
        backend.close()


def test_a_port_that_is_taken_is_no_hindrance_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("POTLUCK_GRADIENT_PORT", str(port))
        backend = AutoDiscoveryBackend(1, finders=[])
        assert backend.port not in (0, port)
        backend.close()
        with pytest.raises(ConfigurationError, match=f"port {port}"):
            AutoDiscoveryBackend(1, finders=[], port=port)


def test_who_is_found_proves_itself_and_another_cluster_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    ada, bob = (
        AutoDiscoveryBackend(2, finders=[Beacon(port, interfaces=loopback)], port=0)
        for _ in range(2)
    )
    monkeypatch.setenv("POTLUCK_PSK", "ab" * 32)
    eve = AutoDiscoveryBackend(
        2,
        finders=[
            Beacon(port, interfaces=loopback),
            StaticPeers([("127.0.0.1", ada.port), ("127.0.0.1", bob.port)]),
        ],
    )
    try:
        [found] = ada.wait_for_peers(1, WAIT_S)
        assert found.member.port == bob.port
        assert found.member.node == bob._base.credentials.node_id
        assert [each.member.port for each in bob.wait_for_peers(1, WAIT_S)] == [ada.port]
        with pytest.raises(OperationTimeout, match="0 of 1 other processes"):
            eve.wait_for_peers(1, 0.3)
        assert len(ada.peers) == 1
        with pytest.raises(OperationTimeout, match=rf"1 of 2 .* found \(.*:{bob.port}\)"):
            ada.wait_for_peers(2, 0.1)
    finally:
        for backend in (ada, bob, eve):
            backend.close()


def test_a_world_that_is_not_complete_says_how_many_were_found() -> None:
    backend = AutoDiscoveryBackend(3, finders=[], port=0)
    try:
        with pytest.raises(OperationTimeout, match=r"0 of 2 other processes.*POTLUCK_PEERS"):
            backend.establish_ring(0.1)
    finally:
        backend.close()


def test_who_wants_a_world_of_another_size_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = iter([b"\0" * 16, b"\1" * 16])  # the first becomes rank 0
    monkeypatch.setattr("potluck._core.backends.discovery.new_instance", lambda: next(ids))
    three = AutoDiscoveryBackend(3, finders=[], port=0)
    two = AutoDiscoveryBackend(2, finders=[StaticPeers([("127.0.0.1", three.port)])], port=0)
    try:
        with pytest.raises(
            ConfigurationError, match=r"world of 3, this one a world of 2; give all"
        ):
            two.establish_ring(WAIT_S)
    finally:
        for backend in (two, three):
            backend.close()


def test_an_address_of_the_link_only_is_not_called_since_others_could_not_use_it() -> None:
    backend = AutoDiscoveryBackend(2, finders=[], port=0)
    try:
        backend._search._heard(Hint("fe80::1%lo", 52416, "beacon", "ab" * 16))
        assert len(backend._search._book) == 0
    finally:
        backend.close()


def test_a_world_of_one_needs_nobody() -> None:
    backend = AutoDiscoveryBackend(1, finders=[], port=0)
    ring = backend.establish_ring(WAIT_S)
    assert ring.world_size == 1
    ring.close()
    backend.close()
    with pytest.raises(ConfigurationError, match="at least one process"):
        AutoDiscoveryBackend(0)


def test_a_script_started_alone_stays_alone_unless_it_asks_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = threading.active_count()
    with potluck.init() as context:
        assert context.world_size == 1
        assert threading.active_count() <= threads + 1, "nothing looks around"
    monkeypatch.setenv("POTLUCK_DISCOVERY", "static")
    monkeypatch.setenv("POTLUCK_MIN_PEERS", "2")
    with pytest.raises(OperationTimeout, match="0 of 2 other processes"):
        potluck.init(timeout_s=0.1)
    with pytest.raises(OperationTimeout, match="0 of 2 other processes"):
        potluck.init("discovery", timeout_s=0.1)
    assert load_settings().min_peers == 2


def test_a_search_that_breaks_is_told_of_at_once_not_as_nobody_found() -> None:
    backend = AutoDiscoveryBackend(2, finders=[], port=0)

    def broken(now: float) -> None:
        raise MemoryError("no room")

    try:
        backend._search._book.due = broken  # type: ignore[method-assign, assignment]
        backend._search.lost("00" * 16)  # something to look at
        with pytest.raises(LinkError, match=r"broke \(MemoryError: no room\) when 0 of 1 were"):
            backend.wait_for_peers(1, 600.0)
    finally:
        backend.close()
