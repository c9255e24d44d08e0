"""Whose scripts run does not depend on how ``potluck up`` is started, nor on how often."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.clusters import found_cluster
from support.commands import potluck_command
from support.terminal import Terminal

UP = shlex.join([*potluck_command(), "up", "--port", "0"])
NOBODY = "nobody can be asked here (no terminal in the foreground)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in (
        ("POTLUCK_HOME", str(tmp_path / "home")),
        ("POTLUCK_DISCOVERY", "static"),
        ("POTLUCK_ALLOW_ROOT", "1"),
        ("PYTHONUNBUFFERED", "1"),
    ):
        monkeypatch.setenv(name, value)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("how", "is_asking"),
    [
        ("exec {up}", True),
        ("set -m; {up} & wait", False),
        ("nohup {up} | cat", False),
        ("{up} > {log} 2>&1 & tail --pid=$! -n +1 -F {log}", False),
        ("setsid --wait {up} < /dev/null 2>&1 | cat", False),
    ],
    ids=["on a terminal", "&", "nohup and a pipe", "to a file", "as a service"],
)
def test_members_are_asked_for_each_however_it_is_started(
    home: Path, tmp_path: Path, how: str, is_asking: bool
) -> None:
    """A person who adds ``&`` does not expect that every member's scripts run."""
    command = how.format(up=f"timeout --foreground 60 {UP}", log=tmp_path / "log")
    with Terminal("bash", "-c", command) as terminal:
        terminal.read_until(lambda drawn: "founds a cluster" in drawn)
        assert "members whose scripts run here" in terminal.drawn
        assert ": asked for each (" in terminal.drawn
        assert (NOBODY in terminal.drawn) is not is_asking, terminal.drawn
        assert terminal.drawn.count("`potluck allow NODE`") == (0 if is_asking else 1)


def kept(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "sharing.json").read_text())
    return found


def typed(command: tuple[str, ...], *answers: tuple[str, str]) -> str:
    """What a command says on a terminal where a person answers: what is waited for, and typed."""
    with Terminal(*command) as terminal:
        for question, answer in answers:
            terminal.read_until(lambda drawn, question=question: question in drawn)
            terminal.type(f"{answer}\n")
        assert terminal.finish() == 0, terminal.drawn
        return terminal.drawn


def test_a_ban_is_asked_about_and_what_was_allowed_is_not_restored_by_its_end(
    home: Path, tmp_path: Path
) -> None:
    _, bob = found_cluster(home, tmp_path / "bob")
    potluck = tuple(potluck_command())
    no = subprocess.run([*potluck, "ban", "bob"], input="", capture_output=True, text=True)
    assert no.returncode == 2
    assert "--yes does it without asking" in no.stderr
    no = subprocess.run([*potluck, "ban", "bob"], input="n\n", capture_output=True, text=True)
    assert (no.returncode, "Nothing was changed" in no.stderr) == (1, True)
    assert subprocess.run([*potluck, "allow", "bob"], capture_output=True).returncode == 0
    said = typed((*potluck, "ban", "bob"), ("the cluster's secret changes. [y/N]", "y"))
    assert "is banned." in said
    assert (kept(home)["allowed"], kept(home)["denied"]) == ([], [])
    question = "May scripts of bob (node " + bob[:12]
    said = typed((*potluck, "unban", "bob"), ("again, as a member? [y/N]", "y"), (question, "n"))
    assert kept(home)["denied"] == [bob]
    again = subprocess.run([*potluck, "unban", "bob", "--yes"], capture_output=True, text=True)
    assert "is not banned" in again.stderr


def test_pairing_says_what_a_member_may_do_and_asks_on_both_machines(
    home: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    potluck = tuple(potluck_command())
    joins = ("env", f"POTLUCK_HOME={other}", *potluck, "join")
    with Terminal("env", "POTLUCK_NAME=desk", *potluck, "pair") as host:
        host.read_until(lambda drawn: "--address" in drawn and "Waiting (Ctrl-C" in drawn)
        lines = host.drawn.split()
        code = next(each for each in lines if each.count("-") == 2 and each[:3].isdigit())
        port = lines[lines.index("--address") + 1].rpartition(":")[2]
        with Terminal(*joins, "--address", f"127.0.0.1:{port}") as guest:
            guest.read_until(lambda drawn: "shows on the other machine: " in drawn)
            guest.type(f"{code}\n")
            for terminal, question in ((host, "Admit it as member? [y/N]"), (guest, "Join? [y/N]")):
                terminal.read_until(lambda drawn, wanted=question: wanted in drawn)
                assert "runs programs on those whose owners let it" in terminal.drawn
                terminal.type("y\n")
            for terminal, answer in ((host, "y"), (guest, "n")):
                terminal.read_until(lambda drawn: "run on this machine, as " in drawn)
                terminal.type(f"{answer}\n")
                assert terminal.finish() == 0, terminal.drawn
    assert len(kept(home)["allowed"]) == 1
    assert len(kept(other)["denied"]) == 1
