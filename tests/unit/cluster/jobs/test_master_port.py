"""The port that scripts are given for torch.distributed."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from potluck._core.cluster.jobs import environment
from potluck._core.cluster.jobs.environment import free_port

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that Linux gives by itself."""


def test_a_script_can_listen_there() -> None:
    with socket.create_server(("", free_port())) as server:
        assert server.getsockname()[1] in range(20_000, 32_768)


@pytest.mark.skipif(not GIVEN.exists(), reason="not Linux")
def test_no_other_program_is_given_it_meanwhile() -> None:
    first, last = map(int, GIVEN.read_text().split())
    if first < 32_768:
        pytest.skip(f"this system gives ports from {first} to {last}")
    assert free_port() < first


def test_one_that_somebody_has_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(environment, "_PORTS", range(taken, taken + 1))
        monkeypatch.setattr(environment, "_NUM_TRIES", 1)
        assert free_port() not in (0, taken)
