"""Which peers can be measured here, and what to install for the others."""

from __future__ import annotations

import dataclasses

from potluck.bench.peers import PEERS, missing


def test_a_missing_package_comes_with_its_command() -> None:
    absent = dataclasses.replace(PEERS["mlx"], needs=("no_such_package",))
    assert missing(absent).startswith("the Python package 'no_such_package' is not installed: pip")


def test_a_missing_program_comes_with_its_command() -> None:
    absent = dataclasses.replace(PEERS["mpi"], needs=(), program="no-such-mpirun")
    assert "no program 'no-such-mpirun' on the PATH" in missing(absent)
    assert "apt-get install openmpi-bin" in missing(absent)


def test_potluck_itself_needs_nothing() -> None:
    assert not any(missing(PEERS[name]) for name in ("potluck", "potluck-tls", "potluck-python"))


def test_a_setting_or_an_argument_that_is_not_there_is_named() -> None:
    ours = PEERS["potluck"]
    other = dataclasses.replace(ours, environment={"POTLUCK_NO_SUCH": "1"})
    assert missing(other) == "this potluck has no setting POTLUCK_NO_SUCH"
    other = dataclasses.replace(ours, arguments={"haste": "great"})
    assert missing(other) == "this potluck's all_reduce has no argument 'haste'"
