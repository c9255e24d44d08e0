from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from potluck._core.backends.ring import RingBackend, parse_address
from potluck._core.context import DistributedContext
from potluck._core.settings import Settings
from potluck.errors import ConfigurationError
from support.worlds import run_all

SETTINGS = Settings(psk=hashlib.sha256(b"test").hexdigest(), peer_timeout_s=10)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.168.1.20:52416", ("192.168.1.20", 52416)),
        ("host:1", ("host", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "host", ":5", "host:", "host:x", "host:0", "host:65536", "host:-1", "host:²", "host:٣",
     "host: 5", "host:1e3", "[]:5", "host:" + "9" * 5000],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write host:port, for example"):
        parse_address(text)


def test_lists_of_peers_that_make_no_sense() -> None:
    with pytest.raises(ConfigurationError, match="two ranks have the same address"):
        RingBackend(["a:1", "a:1"], 0, settings=SETTINGS)
    for rank in (-1, 2):
        with pytest.raises(ConfigurationError, match=f"rank {rank} is not in a list of 2 peers"):
            RingBackend(["a:1", "b:1"], rank, settings=SETTINGS)


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Bound but not listening: nobody else gets them, and a listener may have them."""
    with ExitStack() as stack:
        made = []
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            made.append(sock.getsockname()[1])
        yield made


def test_a_fixed_list_of_peers_is_a_group(ports: list[int]) -> None:
    peers = [f"127.0.0.1:{port}" for port in ports]

    def act(rank: int) -> float:
        backend = RingBackend(peers, rank, settings=SETTINGS)
        with DistributedContext(backend, timeout_s=10) as ctx:
            assert not ctx.elastic
            assert ctx.communicator._resources.nodes == (0, 1, 2), "on one node none would pay"
            assert (ctx.rank, ctx.world_size, ctx.epoch) == (rank, 3, 1)
            with pytest.raises(ConfigurationError, match="can't re-form"):
                ctx.reform()
            with pytest.raises(ConfigurationError, match="no next group"):
                backend.form(1, None, 1)
            return float(ctx.all_reduce(np.ones(1))[0])

    assert run_all([lambda rank=rank: act(rank) for rank in range(3)]) == [3, 3, 3]


def test_two_processes_with_one_rank_find_the_port_in_use(ports: list[int]) -> None:
    peers = [f"127.0.0.1:{port}" for port in ports]
    first = RingBackend(peers, 0, settings=SETTINGS)
    with pytest.raises(ConfigurationError, match=f"port {ports[0]} on all interfaces is in use"):
        RingBackend(peers, 0, settings=SETTINGS)
    first.close()
