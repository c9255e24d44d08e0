"""``potluck://``: who forms the world, from the URL and what launchers have set."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from potluck._core.backends.discovery import AutoDiscoveryBackend
from potluck._core.backends.environment import EnvironmentBackend
from potluck._core.backends.local import LocalBackend
from potluck._core.settings import load_settings
from potluck.errors import ConfigurationError
from potluck.torch.process_group.storeless import choose, rendezvous

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
RANKS = {"RANK": "1", "WORLD_SIZE": "2"}
POD = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("url", "variables", "kind"),
    [
        ("potluck://", {}, LocalBackend),
        ("potluck://?world_size=1", {}, LocalBackend),
        ("potluck://", RANKS, EnvironmentBackend),
        ("potluck://", MPIRUN, EnvironmentBackend),
        ("potluck://?world_size=2", MPIRUN, EnvironmentBackend),
        ("potluck://", POD | {"WORLD_SIZE": "2"}, EnvironmentBackend),
        ("potluck://?world_size=2", POD, EnvironmentBackend),
        ("potluck://?world_size=1", {"JOB_COMPLETION_INDEX": "1"}, LocalBackend),
        ("potluck://?world_size=3", {"JOB_COMPLETION_INDEX": "1"}, AutoDiscoveryBackend),
        ("potluck://10.0.0.1:7000?rank=1&world_size=2", {}, EnvironmentBackend),
        ("potluck://?world_size=3", {}, AutoDiscoveryBackend),
        ("potluck://", {"POTLUCK_MIN_PEERS": "3"}, AutoDiscoveryBackend),
        ("potluck://", {"POTLUCK_MIN_PEERS": "3"} | RANKS, EnvironmentBackend),
        ("potluck://?world_size=1", {"POTLUCK_MIN_PEERS": "3"}, LocalBackend),
    ],
)
def test_a_launcher_goes_before_discovery_and_that_before_being_alone(
    url: str, variables: dict[str, str], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"POTLUCK_DISCOVERY": "static"} | variables).items():
        monkeypatch.setenv(name, value)
    backend = choose(url, load_settings())
    try:
        assert type(backend) is kind
        if isinstance(backend, AutoDiscoveryBackend):
            assert 3 in (backend.world_size, backend.min_peers)
        if isinstance(backend, EnvironmentBackend):
            assert (backend._rank, backend._world_size) == (1, 2)
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("url", "variables", "words"),
    [
        ("potluck://10.0.0.1:7000", {}, "RANK is not set"),
        ("potluck://?rank=1", {}, "WORLD_SIZE is not set"),
        ("potluck://", {"WORLD_SIZE": "2"}, "RANK is not set"),
        ("potluck://?rank=2&world_size=2", {}, "RANK=2 is not below WORLD_SIZE=2"),
        ("potluck://?world_size=0", {}, "at least one process"),
    ],
)
def test_half_of_a_description_is_refused_and_what_is_missing_named(
    url: str, variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=words):
        choose(url, load_settings())


def test_a_world_of_another_size_than_was_started_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        alone |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_PORT": str(probe.getsockname()[1])}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="world_size=3, but 1 processes were started"):
        next(rendezvous("potluck://?world_size=3", timedelta(seconds=20)))
