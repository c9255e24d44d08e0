"""`potluck init`, `pair`, `join`, `ban` as processes: what a person types on two machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

POTLUCK = str(Path(sys.executable).with_name("potluck"))
WAIT_S = 60


@pytest.fixture
def environment(own_environment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two homes, and no multicast: these tests stay on the loopback."""
    monkeypatch.setenv("POTLUCK_DISCOVERY", "static")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    own_environment.mkdir()
    return own_environment


def on(home: Path) -> dict[str, str]:
    return {**os.environ, "POTLUCK_HOME": str(home), "POTLUCK_NAME": home.name}


def potluck(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [POTLUCK, *arguments], env=on(home), capture_output=True, text=True, timeout=WAIT_S
    )


def test_a_second_machine_joins_and_a_wrong_code_voids_the_next_one(environment: Path) -> None:
    first, second, third = (environment / name for name in ("first", "second", "third"))
    made = json.loads(potluck(first, "init", "--json").stdout)
    again = json.loads(potluck(first, "init", "--json").stdout)
    assert (made["made"], again["made"]) == (True, False)
    assert made["namespace"] == again["namespace"]

    with subprocess.Popen(
        [POTLUCK, "pair", "--json"], env=on(first), stdout=subprocess.PIPE, text=True
    ) as pairing:
        assert pairing.stdout is not None
        waiting = json.loads(pairing.stdout.readline())
        where = f"127.0.0.1:{waiting['port']}"
        joined = potluck(second, "join", waiting["code"], "--address", where, "--json")
        assert joined.returncode == 0, joined.stderr
        newcomer = json.loads(pairing.stdout.readline())
        assert pairing.wait(WAIT_S) == 0
    gave = json.loads(joined.stdout)
    assert gave["namespace"] == made["namespace"]
    assert gave["node"] == made["node"]
    second_node = json.loads(potluck(second, "init", "--json").stdout)["node"]
    assert newcomer["node"] == second_node
    assert (gave["name"], newcomer["name"]) == ("first", "second")
    secrets = [(home / "cluster_secret").read_text() for home in (first, second)]
    assert secrets[0] == secrets[1]
    assert secrets[0].strip() not in joined.stdout + joined.stderr

    # A machine that has a secret is asked first; a wrong code ends the run on both sides.
    refused = potluck(second, "join", "111-222-333")
    assert refused.returncode == 2
    assert "join --replace" in refused.stderr
    with subprocess.Popen(
        [POTLUCK, "pair", "--json"],
        env=on(first),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as pairing:
        assert pairing.stdout is not None
        waiting = json.loads(pairing.stdout.readline())
        code = waiting["code"]
        last = str((int(code[-1]) + 1) % 10)
        where = f"127.0.0.1:{waiting['port']}"
        wrong = potluck(third, "join", code[:-1] + last, "--address", where)
        _, said = pairing.communicate(timeout=WAIT_S)
    assert (wrong.returncode, pairing.returncode) == (2, 2)
    assert "wrong" in wrong.stderr
    assert "void now" in said
    assert not (third / "cluster_secret").exists()
    assert code not in said + wrong.stderr

    # The node that joined is known by the beginning of its id.
    banned = potluck(first, "ban", second_node[:8], "--reason", "sold")
    assert banned.stdout == f"Node {second_node[:12]} is banned on this machine.\n"
    assert potluck(first, "ban", made["node"]).returncode == 2


def test_each_command_teaches_its_use(environment: Path) -> None:
    commands = ("init", "pair", "join", "ban", "up", "rotate", "continue", "status")
    for command in (*commands, "allow", "deny", "pause", "resume"):
        shown = potluck(environment, command, "--help")
        assert shown.returncode == 0
        assert f"potluck {command}" in shown.stdout
        assert "Example" in shown.stdout
    assert list(environment.iterdir()) == []


def test_whose_scripts_run_is_decided_without_an_agent_too(environment: Path) -> None:
    home = environment / "ada"
    node, other = "a" * 64, "b" * 64
    assert potluck(home, "allow", node).returncode == 0
    assert potluck(home, "deny", other).returncode == 0
    kept = json.loads((home / "sharing.json").read_text())
    assert (kept["allowed"], kept["denied"]) == ([node], [other])
    me = json.loads(potluck(home, "init", "--json").stdout)["node"]
    for arguments, said in (
        (("allow", me), "that is this machine, which always runs its own jobs"),
        (("deny", "nobody"), "no node is called 'nobody' here, and"),
        (("pause",), "no agent runs on this machine; start it with: potluck up"),
        (("up", "--allow-root", "--run-for", "all,bob"), "write all, ask or none, or names or ids"),
        (("up", "--allow-root", "--run-for", "nobody"), "no node is called 'nobody' here"),
    ):
        refused = potluck(home, *arguments)
        assert refused.returncode == 2, refused
        assert said in refused.stderr
    assert json.loads((home / "sharing.json").read_text()) == kept, "nothing was changed"
