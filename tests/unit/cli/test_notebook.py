"""``%%potluck``: its line, the values that a cell returns, and where its script lies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import potluck
from potluck.checkpoint import decode
from potluck.cli.notebook import RETURNED, CellError, CellMagic, parsed, return_values


@pytest.mark.parametrize(
    ("line", "options", "names", "arguments"),
    [
        ("", [], (), []),
        ("-n 2 --nodes 3", ["-n", "2", "--nodes", "3"], (), []),
        ("--return loss -n 2", ["-n", "2"], ("loss",), []),
        ("--return=loss,weights --return loss", [], ("loss", "weights"), []),
        ("--env 'A=b c' -- --epochs 3 --return x", ["--env", "A=b c"], (), ["--epochs", "3"]),
    ],
)
def test_a_line_has_options_names_and_arguments(
    line: str, options: list[str], names: tuple[str, ...], arguments: list[str]
) -> None:
    found = parsed(line)
    assert found[:2] == (options, names)
    assert found[2][: len(arguments)] == arguments


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--return", "names of variables are missing"),
        ("--return loss,", "this is no name of a variable"),
        ("--return a.b", "--return a.b: this is no name"),
        ("--env 'A=b", "No closing quotation"),
        ("--json out.json", "--json: a cell has no use for it"),
        ("--detach", "--detach: a cell has no use for it"),
    ],
)
def test_a_line_that_can_not_be_meant_is_refused(line: str, message: str) -> None:
    with pytest.raises(CellError, match=message) as caught:
        parsed(line)
    assert caught.value._render_traceback_() == [f"potluck: {caught.value}"]


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POTLUCK_OUTPUT", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    return tmp_path


def test_rank_0_returns_values_of_all_kinds(output: Path) -> None:
    value = {"w": [np.arange(3.0), 2], "text": "ok", "none": None}
    return_values({"value": value, "other": object()}, ("value",))
    found = decode((output / RETURNED).read_bytes())["value"]
    assert list(found["w"][0]) == [0, 1, 2]
    assert (found["w"][1], found["text"], found["none"]) == (2, "ok", None)


def test_other_ranks_return_nothing(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    return_values({"value": 1}, ("value",))
    assert not list(output.iterdir())


def test_the_rank_is_that_of_the_context_if_there_is_one(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")  # as the world was started; the others have left
    with potluck.init(backend="local") as ctx:
        return_values({"ctx": ctx, "value": 1}, ("value",))
    assert decode((output / RETURNED).read_bytes()) == {"value": 1}


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [({}, NameError, "no variable loss"), ({"loss": {1, 2}}, TypeError, "loss is a set")],
)
def test_what_can_not_be_returned_is_named(
    output: Path, variables: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        return_values(variables, ("loss",))
    assert not list(output.iterdir())


def test_a_folder_that_can_not_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CellError, match="has been removed"):
        CellMagic(SimpleNamespace()).run("", "pass")
