"""Which files travel to clients' machines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.cli.main import app
from potluck.errors import ConfigurationError
from potluck.federated.bundle import files_of, stage


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A project with all ways to import, and files that no one imports."""
    texts = {
        "server.py": "import numpy, common.models\nfrom potluck import federated\n",
        "client.py": "from common import losses\nimport helper\nfrom deep.inner import *\n",
        "helper.py": "def f():\n    import late\n",
        "late.py": "",
        "unused.py": "",
        "common/__init__.py": "",
        "common/models.py": "from .losses import x\nfrom . import layers\n",
        "common/losses.py": "from ..top import y\n",
        "common/layers.py": "",
        "common/table.csv": "1,2",
        "top.py": "",
        "deep/inner.py": "",
        "data.csv": "PATIENT",
        "weights.npz": "W",
    }
    root = tmp_path / "code"
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def sent(root: Path, *include: str, data: Path | None = None) -> set[str]:
    folder, files = files_of(root / "server.py", root / "client.py", data, include)
    assert folder == root
    return {path.as_posix() for path in files}


MODULES = {"server.py", "client.py", "helper.py", "late.py", "top.py", "deep/inner.py"} | {
    f"common/{name}.py" for name in ("__init__", "models", "losses", "layers")
}


def test_the_two_files_and_what_they_import_travel_and_nothing_else(code: Path) -> None:
    assert sent(code) == MODULES
    assert sent(code, "weights.npz") == MODULES | {"weights.npz"}


def test_only_those_files_are_staged(code: Path, tmp_path: Path) -> None:
    root, files = files_of(code / "server.py", code / "client.py", None)
    staged = tmp_path / "staged"
    staged.mkdir()
    script = stage(root, files, staged, "federated-server.py")
    found = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
    assert found == MODULES | {"federated-server.py"}
    assert script == staged / "federated-server.py"


def test_nothing_of_the_data_directory_travels_not_even_if_named(code: Path) -> None:
    (code / "patients").mkdir()
    (code / "patients" / "rows.csv").write_text("PATIENT")
    data = code / "patients"
    assert sent(code, data=data) == MODULES
    with pytest.raises(ConfigurationError, match=r"rows.csv is in --data-dir .*nothing travels"):
        sent(code, "patients/rows.csv", data=data)
    with pytest.raises(ConfigurationError, match="keep code and data in folders of their own"):
        sent(code, data=code)


def with_link(code: Path) -> None:
    (code / "late.py").unlink()
    (code / "late.py").symlink_to(code / "data.csv")


def with_linked_folder(code: Path) -> None:
    (code / "deep").rename(code / "elsewhere")
    (code / "deep").symlink_to(code / "elsewhere")


@pytest.mark.parametrize(
    ("change", "include", "text"),
    [
        (with_link, (), "late.py is a link, and links do not travel"),
        (with_linked_folder, (), "deep is a link"),
        (lambda code: None, ("common",), "--include common: it is a folder"),
        (lambda code: None, ("none.csv",), "none.csv does not exist"),
        (lambda code: None, ("../secret",), "is not in the server's folder"),
        (lambda code: (code / "top.py").write_text("def"), (), "top.py is not Python"),
    ],
)
def test_what_can_not_travel(
    code: Path, change: Callable[[Path], object], include: tuple[str, ...], text: str
) -> None:
    change(code)
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        sent(code, *include)


def test_a_client_elsewhere_is_refused(code: Path, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text("")
    with pytest.raises(ConfigurationError, match="all code of a federation is in one folder"):
        files_of(code / "server.py", tmp_path / "client.py", None)


# The command.


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["federated", "run", *map(str, words)])
    return done.exit_code, done.output


def test_the_dry_run_lists_what_would_travel(code: Path) -> None:
    words = (code / "server.py", "--clients", code / "client.py", "--dry-run")
    exit_code, output = run(*words, "--json", "-")
    assert exit_code == 0
    listed = json.loads(output)
    assert {each["path"] for each in listed["files"]} == MODULES
    exit_code, output = run(*words)
    assert (exit_code, f"{len(MODULES)} files of" in output) == (0, True)
    assert "data.csv" not in output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("none.py", "--clients", "client.py"), "the server's file 'none.py' does not exist"),
        (("server.py", "--clients", "none.py"), "the clients' file 'none.py' does not exist"),
        (
            ("server.py", "--clients", "client.py", "--data-dir", "patients"),
            "--data-dir patients: it is a folder of each machine",
        ),
        (
            ("server.py", "--clients", "client.py", "--min-nodes", "2"),
            "this machine is in no cluster",
        ),
        (
            ("server.py", "--clients", "client.py", "--json", "/none/x.json"),
            "--json /none/x.json: there is no directory /none",
        ),
    ],
)
def test_commands_that_do_not_fit(
    code: Path,
    words: tuple[str, ...],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(code)
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    exit_code, output = run(*words)
    assert exit_code == 2
    assert text in " ".join(output.split())
