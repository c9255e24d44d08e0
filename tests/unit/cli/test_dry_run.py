"""``potluck run --dry-run`` lists what would travel, and starts nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck.cli.main import app


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    (folder / ".config").mkdir(parents=True)
    (folder / ".config" / "lr").write_text("1")
    (folder / "data").symlink_to("/data")
    (folder / "evil\x1b[2J.txt").write_text("x")
    (folder / "train.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    return folder / "train.py"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", "--dry-run", *map(str, arguments)])


def test_files_sizes_and_reasons_are_listed_and_nothing_runs(tmp_path: Path, script: Path) -> None:
    (script.parent / "evil\x1b[2J.txt").unlink()
    done = run(script)
    size = script.stat().st_size
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        f"{f'{size} bytes':>11}  train.py",
        "",
        "Not sent:",
        "  .config/  hidden",
        "  data      a link to /data",
        "",
        f"1 file, {size} bytes travels to machines that join; not sent: 1 link, 1 hidden (see "
        "potluck run --dry-run; --include names what is needed)",
        "links do not travel, so other machines don't have data: put the files themselves into the "
        "folder, or give the script a path that exists on every machine",
        "This machine is in no cluster (potluck up): the job would run here, in place.",
    ]
    assert not (tmp_path / "ran").exists()


def test_programs_get_the_list_as_json_on_stdout_or_in_a_file(tmp_path: Path, script: Path) -> None:
    (script.parent / "evil\x1b[2J.txt").unlink()
    done = run("--json", "-", "--include", ".config/", script)
    assert done.exit_code == 0, done.output
    listed = json.loads(done.output)
    assert [file["path"] for file in listed["files"]] == [".config/lr", "train.py"]
    assert listed["staying"] == [{"path": "data", "why": "link", "reason": "a link to /data"}]
    assert listed["machines"] is None
    file = tmp_path / "list.json"
    assert run("--json", file, "--include", ".config/", script).output == ""
    assert json.loads(file.read_text()) == listed


def test_what_the_run_would_refuse_is_refused(script: Path) -> None:
    evil = run(script)
    assert evil.exit_code == 2
    assert r"evil\x1b[2J.txt can't travel to the other nodes: it holds a character" in evil.output
    assert "\x1b" not in evil.output
    (script.parent / "evil\x1b[2J.txt").unlink()
    (script.parent / "server.pem").write_text("x")
    key = run(script)
    assert key.exit_code == 2
    assert "looks like keys or credentials: server.pem (a key)" in key.output
    assert run("--include", "server.pem", script).exit_code == 0
