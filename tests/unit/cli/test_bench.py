"""``potluck bench``: what it says to values that it can't use, before anything is started."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from potluck.cli.main import app

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("scan", "'scan' can't be measured; choose from all-reduce"),
        ("all-reduce --against nccl", "--against nccl: unknown; choose from potluck-tls"),
        ("all-reduce --workers 1", "--workers 1: a number from 2 to 64 is needed"),
        ("all-reduce --workers two", "--workers two: a number"),
        ("all-reduce --sizes 5KB", "'5KB' is not a size; write 4KiB"),
        ("all-reduce --sizes 6", "6: a positive multiple of 4 bytes"),
        ("all-reduce --sizes 8 --workers 4", "8 bytes are less than one float32 for each of 4"),
        ("all-reduce --peers 10.0.0.1:52416", "--peers 10.0.0.1:52416: at least two machines"),
        ("all-reduce --peers a:1,b --against none", "'b' is not an address; write host:port"),
        ("all-reduce --rounds 0", "at least 1 round"),
        ("compress --rounds 0", "--rounds 0: at least 1 round"),
        ("compress --sizes 5KB", "'5KB' is not a size; write 4KiB"),
        ("all-reduce --json /no/such/folder/x.json", "there is no directory /no/such/folder"),
        ("all-reduce --json .", "--json .: that is a directory"),
        ("all-reduce --plot /no/such/folder/x.png", "there is no directory /no/such/folder"),
        ("all-reduce --rank 1", "--rank 1 needs --peers, the list of all machines"),
        ("all-reduce --peers a:1,b:1 --rank 2", "--rank 2: the ranks of the 2 machines in --peers"),
        ("all-reduce --sizes 99999GiB", "99999 GiB: the workers would hold at least"),
    ],
)
def test_unusable_values_are_named(arguments: str, said: str) -> None:
    outcome = runner.invoke(app, ["bench", *arguments.split()])
    assert outcome.exit_code == 2
    assert said in outcome.output
    assert "Traceback" not in outcome.output


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = runner.invoke(app, ["bench", "all-reduce", "--plot", "x.svg"])
    assert outcome.exit_code == 2
    assert "pip install 'potluck[bench]'" in outcome.output
    assert "Traceback" not in outcome.output


def test_a_picture_of_no_known_format_is_refused_before_anything_is_measured() -> None:
    pytest.importorskip("matplotlib")
    outcome = runner.invoke(app, ["bench", "all-reduce", "--plot", "speed.xyz"])
    assert outcome.exit_code == 2
    assert "--plot speed.xyz: the suffix chooses the format:" in outcome.output
