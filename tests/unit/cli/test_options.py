"""Options of other launchers: the error suggests the one that the command has."""

from __future__ import annotations

import subprocess

import pytest

from support.commands import potluck_command


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run", "--nproc-per-node", "4", "train.py"], "--workers"),
        (["run", "--nproc_per_node", "4", "train.py"], "--workers"),
        (["run", "--world-size", "4", "train.py"], "--workers"),
        (["run", "--nnodes", "2", "train.py"], "--nodes"),
        (["bench", "all-reduce", "--world-size", "4"], "--workers"),
        (["bench", "all-reduce", "--parameter-dim", "16384"], "--sizes"),
        (["federated", "run", "--world-size", "4", "server.py"], "--workers"),
    ],
)
def test_an_option_of_another_launcher(words: list[str], meant: str) -> None:
    run = subprocess.run([*potluck_command(), *words], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert f"(Possible options: {meant})" in run.stderr, run.stderr
