"""Which peers can be measured here, and what to install for the others."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from potluck._core import native
from potluck._core.context.collectives import Collectives
from potluck._core.settings import Settings, environment_name
from potluck.cli.bench.peers import PEERS, Competitor, missing


def test_a_missing_package_comes_with_its_command() -> None:
    absent = dataclasses.replace(PEERS["mlx"], needs=("no_such_package",))
    assert missing(absent).startswith("the Python package 'no_such_package' is not installed: pip")


def test_a_missing_program_comes_with_its_command() -> None:
    absent = dataclasses.replace(PEERS["mpi"], needs=(), program="no-such-mpirun")
    assert "no program 'no-such-mpirun' on the PATH" in missing(absent)
    assert "apt-get install openmpi-bin" in missing(absent)


def test_potluck_itself_needs_nothing() -> None:
    assert not any(missing(PEERS[name]) for name in ("potluck", "potluck-tls", "potluck-python"))


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
def test_every_setting_and_argument_of_a_peer_is_there(peer: Competitor) -> None:
    settings = {environment_name(each.name) for each in dataclasses.fields(Settings)}
    assert peer.environment.keys() <= settings | {native.VARIABLE}
    assert peer.arguments.keys() <= inspect.signature(Collectives.all_reduce).parameters.keys()
