"""Which peers can be measured here, and what to install for the others."""

from __future__ import annotations

import dataclasses

from potluck.bench.libraries import PEERS, missing


def test_a_missing_package_comes_with_its_command() -> None:
    absent = dataclasses.replace(PEERS["mlx"], needs=("no_such_package",))
    assert missing(absent).startswith("the Python package 'no_such_package' is not installed: pip")


def test_a_missing_program_comes_with_its_command() -> None:
    absent = dataclasses.replace(PEERS["mpi"], needs=(), program="no-such-mpirun")
    assert "no program 'no-such-mpirun' on the PATH" in missing(absent)
    assert "apt-get install openmpi-bin" in missing(absent)


def test_potluck_itself_needs_nothing() -> None:
    assert not any(missing(peer) for peer in PEERS.values() if peer.module == "ours")
