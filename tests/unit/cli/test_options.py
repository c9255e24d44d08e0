"""Options of other launchers: the error suggests the one that the command has."""

from __future__ import annotations

from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from potluck.cli.main import app


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
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 2
    assert f"(Possible options: {meant})" in run.stderr, run.stderr


def test_a_command_starts_without_a_look_at_the_others() -> None:
    group: Any = get_command(app.only("nodes"))
    assert group.commands.keys() == {"nodes"}
    for word in ("nods", "--help", "federated", ""):
        assert app.only(word) is app
