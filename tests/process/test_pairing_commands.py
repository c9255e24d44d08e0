"""`potluck init`, `pair`, `join`, `ban` as processes: what a person types on two machines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from potluck.cli.main import app
from support.clusters import admit

POTLUCK = str(Path(sys.executable).with_name("potluck"))
WAIT_S = 200


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


def types(home: Path, said: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``potluck`` with ``said`` typed into it."""
    return subprocess.run(
        [POTLUCK, *arguments],
        env=on(home),
        input=said,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


@contextlib.contextmanager
def running(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``potluck`` with pipes; killed at the end, whatever happened."""
    with subprocess.Popen(
        [POTLUCK, *arguments],
        env=on(home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def event(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of JSON that ``process`` writes."""
    assert process.stdout is not None
    told: dict[str, Any] = json.loads(process.stdout.readline())
    return told


def test_a_second_machine_joins_and_a_wrong_code_voids_the_next_one(environment: Path) -> None:
    first, second, third = (environment / name for name in ("first", "second", "third"))
    made = json.loads(potluck(first, "init", "--json").stdout)
    again = json.loads(potluck(first, "init", "--json").stdout)
    assert (made["made"], again["made"]) == (True, False)
    assert made["namespace"] == again["namespace"]

    with running(first, "pair", "--json") as pairing:
        waiting = event(pairing)
        where = f"127.0.0.1:{waiting['port']}"
        with running(second, "join", "--address", where, "--json") as joining:
            says(joining, waiting["code"])
            asked = event(pairing)
            says(pairing, "y")
            stdout, stderr = joining.communicate("y\n", timeout=WAIT_S)
            assert joining.returncode == 0, stderr
        newcomer = event(pairing)
        assert pairing.wait(WAIT_S) == 0
    assert asked["words"] in stderr, "both screens show the same words"
    gave = json.loads(stdout)
    assert gave["namespace"] == made["namespace"]
    assert gave["node"] == made["node"]
    second_node = json.loads(potluck(second, "init", "--json").stdout)["node"]
    assert newcomer["node"] == asked["node"] == second_node
    assert (gave["name"], newcomer["name"]) == ("first", "second")
    secrets = [(home / "cluster_secret").read_text() for home in (first, second)]
    assert secrets[0] == secrets[1]
    assert secrets[0].strip() not in stdout + stderr

    # A cluster of one machine, as `potluck up` makes it, is left for another without a word.
    assert "no code came on stdin" in types(third, "", "join").stderr
    potluck(third, "init")
    assert "no code came on stdin" in types(third, "", "join").stderr

    # A machine that has a secret is asked first; a wrong code ends the run on both sides.
    refused = types(second, "111-222-333\n", "join", "--yes")
    assert refused.returncode == 2
    assert "join --replace" in refused.stderr
    with running(first, "pair", "--json") as pairing:
        waiting = event(pairing)
        code = waiting["code"]
        last = str((int(code[-1]) + 1) % 10)
        where = f"127.0.0.1:{waiting['port']}"
        wrong = types(third, f"{code[:-1]}{last}\n", "join", "--address", where, "--yes")
        _, said = pairing.communicate(timeout=WAIT_S)
    assert (wrong.returncode, pairing.returncode) == (2, 2)
    assert "wrong" in wrong.stderr
    assert "void now" in said
    assert (third / "cluster_secret").read_text() not in secrets
    assert code not in said + wrong.stderr

    # Who is in, and the ban of the machine by its name; a member has no say.
    listed = json.loads(potluck(second, "nodes", "--json").stdout)["nodes"]
    assert {each["node"]: each["role"] for each in listed} == {
        made["node"]: "founder",
        second_node: "member",
    }
    powerless = potluck(second, "ban", "first", "--yes")
    assert powerless.returncode == 2
    assert "founded the cluster" in powerless.stderr
    assert "founded the cluster" in potluck(first, "ban", "first", "--yes").stderr, (
        "it knows its own name"
    )
    banned = potluck(first, "ban", "second", "--reason", "sold", "--yes")
    assert banned.returncode == 0, banned.stderr
    assert f"second (node {second_node[:12]}) is banned." in banned.stdout
    assert "when `potluck up` runs here" in banned.stdout
    assert (first / "cluster_secret").read_text() != secrets[0]
    assert potluck(first, "ban", made["node"], "--yes").returncode == 2
    shown = potluck(first, "nodes").stdout
    assert "revoked (sold)" in shown
    back = potluck(first, "unban", second_node[:8], "--yes")
    assert back.stdout == f"second (node {second_node[:12]}) is a member again.\n"
    assert potluck(first, "admit", "second", "--admin").stdout.endswith("is admin.\n")
    assert "is not banned" in potluck(first, "unban", "second", "--yes").stderr


def test_what_is_typed_wrong_is_explained_and_changes_nothing(environment: Path) -> None:
    home = environment / "home"
    told = {
        ("join", "274-831-927"): "type it when asked",
        ("join",): "no code came on stdin",
        ("ban", "nobody"): "is no machine that is known here",
        ("ban", "deadbeef"): "no node known here",
        ("unban", "deadbeef" * 8): "is not banned",
        ("admit", "deadbeef" * 8): "is not in the cluster",
        ("pair", "--admin", "--days", "3"): "the admission of an admin can't end",
        ("lock",): "closed already",
    }
    for arguments, text in told.items():
        said = types(home, "", *arguments)
        assert said.returncode == 2, (arguments, said.stdout)
        assert text in said.stderr, (arguments, said.stderr)
        assert "Traceback" not in said.stderr


def test_an_open_cluster_says_so_and_is_not_paired(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_PSK", "ab" * 32)
    home = environment / "home"
    listed = potluck(home, "nodes")
    assert "This cluster is open" in listed.stdout
    assert "potluck lock" in potluck(home, "pair").stderr
    assert "comes from POTLUCK_PSK" in potluck(home, "rotate").stderr
    assert "start it with: potluck up" in potluck(home, "lock", "--yes").stderr


def test_each_command_teaches_its_use(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: starting each would take minutes of processor time."""
    monkeypatch.setenv("POTLUCK_HOME", str(environment))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group's
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    assert {"run", "up", "nodes", "federated"} < commands.keys()
    for command in commands:
        assert f"potluck {command}" in page
        shown = CliRunner().invoke(app, [command, "--help"], prog_name="potluck")
        assert shown.exit_code == 0
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
        (("deny", "nobody"), "'nobody' is no machine that is known here"),
        (("pause",), "no agent runs on this machine; start it with: potluck up"),
        (("up", "--allow-root", "--run-for", "all,bob"), "write all, ask or none, or names or ids"),
        (("up", "--allow-root", "--run-for", "nobody"), "'nobody' is no machine that is known"),
    ):
        refused = potluck(home, *arguments)
        assert refused.returncode == 2, refused
        assert said in refused.stderr
    assert json.loads((home / "sharing.json").read_text()) == kept, "nothing was changed"


def test_recovery_codes_made_anew_before_another_machine_is_in_replace_the_first(
    environment: Path,
) -> None:
    first, second = (environment / name for name in ("first", "second"))
    early = json.loads(potluck(first, "init", "--recovery-codes", "3", "--json").stdout)
    made = json.loads(potluck(first, "init", "--recovery-codes", "3", "--json").stdout)
    assert made["codes_needed"] == 2
    assert len({*early["recovery_codes"], *made["recovery_codes"]}) == 6
    listed = json.loads(potluck(first, "nodes", "--json").stdout)
    assert listed["codes_needed"] == 2
    assert [(each["node"], each["role"]) for each in listed["nodes"]] == [(made["node"], "admin")]

    node = admit(first, second)
    refused = potluck(first, "init", "--recovery-codes", "3")
    assert refused.returncode == 2
    assert "has recovery codes already, of which 2 are needed" in refused.stderr
    refused = potluck(second, "init", "--recovery-codes", "3")
    assert refused.returncode == 2
    assert refused.stdout == "", "codes that count for nobody"
    text = potluck(first, "nodes").stdout
    assert "2 recovery codes ban any machine" in text
    assert "Only first can admit" not in text

    refused = potluck(second, "ban", made["node"], "--yes")
    assert refused.returncode == 2
    old = "\n".join(early["recovery_codes"])
    refused = types(second, old, "ban", made["node"], "--codes", "--yes")
    assert refused.returncode == 2
    assert "no recovery code of this cluster" in refused.stderr
    typed = "\n".join(made["recovery_codes"][1:])
    done = types(second, typed, "ban", made["node"], "--codes", "--yes")
    assert "This machine is an admin now" in done.stdout
    listed = json.loads(potluck(second, "nodes", "--json").stdout)
    roles = {each["node"]: each["role"] for each in listed["nodes"]}
    assert roles == {made["node"]: "revoked", node: "admin"}


def test_the_founder_of_a_cluster_with_other_machines_makes_codes_once(environment: Path) -> None:
    first, second, third = (environment / name for name in ("first", "second", "third"))
    made = json.loads(potluck(first, "init", "--json").stdout)
    node = admit(first, second)
    refused = potluck(second, "ban", made["node"], "--codes", "--yes")
    assert refused.returncode == 2
    assert "potluck init --recovery-codes 3" in refused.stderr
    refused = potluck(second, "init", "--recovery-codes", "3")
    assert refused.returncode == 2
    assert f"run the command on node {made['node'][:12]}" in refused.stderr
    refused = potluck(first, "ban", made["node"], "--yes")
    assert "founded the cluster and can't be banned: there are no recovery codes" in refused.stderr

    shown = potluck(first, "init", "--recovery-codes", "3")
    assert "They hold on each machine that has heard of them" in shown.stdout
    codes = [line.strip() for line in shown.stdout.splitlines() if line.startswith("    ")]
    assert len(codes) == 3
    again = potluck(first, "init", "--recovery-codes", "3")
    assert again.returncode == 2
    assert "has recovery codes already" in again.stderr

    last = admit(first, third)
    done = types(third, "\n".join(codes[:2]), "ban", made["node"], "--codes", "--yes")
    assert done.returncode == 0, done.stderr
    listed = json.loads(potluck(third, "nodes", "--json").stdout)
    roles = {each["node"]: each["role"] for each in listed["nodes"]}
    assert roles == {made["node"]: "revoked", node: "member", last: "admin"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_codes_that_nobody_has_seen_do_not_count(environment: Path) -> None:
    """The output can't be written."""
    first, second = (environment / name for name in ("first", "second"))
    potluck(first, "init", "--json")
    admit(first, second)
    with open("/dev/full", "w") as full:
        failed = subprocess.run(
            [POTLUCK, "init", "--recovery-codes", "3"], env=on(first), stdout=full, timeout=WAIT_S
        )
    assert failed.returncode != 0
    assert json.loads(potluck(first, "nodes", "--json").stdout)["codes_needed"] == 0
