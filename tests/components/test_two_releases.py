"""Two releases of potluck in one cluster: that of an earlier commit, as a wheel in an environment
of its own, beside this tree's. Real agents, workers and commands of both, on the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck._core.version import VERSION
from support.commands import comes_true
from support.ports import reserved_ports

ROOT = Path(__file__).parents[2]
BEFORE = "3473a15d"
"""The last commit of protocol 1. It has the version number of this tree; its wheel gets a lower."""
OLD = "0.0.9"
NEW_PYTHON = Path(sys.executable)
WAIT_S = 200

HELLO = """
import sys

import potluck

ctx = potluck.init()
print("release", sys.prefix, flush=True)
ctx.close()
"""
MIXED = """
import os, sys

other = sys.argv[1]
if os.environ["RANK"] == "1" and not os.environ.get("TURNED"):
    os.environ["TURNED"] = "1"
    os.execv(other, [other, *sys.argv])

import numpy as np
import potluck

ctx = potluck.init()
total = ctx.all_reduce(np.full(100_000, ctx.rank + 1, np.float32))
print(f"rank {ctx.rank} of {sys.prefix} has {total[0]:g} {total[-1]:g}", flush=True)
ctx.close()
"""


@pytest.fixture(scope="session")
def old_python() -> Path:
    """Python in an environment with the earlier release, kept in build/."""
    place = ROOT / "build/components" / f"potluck-{BEFORE}"
    python = place / "venv/bin/python"
    if (place / "complete").exists():
        return python
    source = place / "source"
    source.mkdir(parents=True, exist_ok=True)
    archive = place / "source.tar"
    made = subprocess.run(["git", "archive", "-o", str(archive), BEFORE], cwd=ROOT)
    if made.returncode:
        pytest.skip(f"this clone has no commit {BEFORE}")
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    for name in ("pyproject.toml", "src/potluck/_core/version.py"):
        path = source / name
        text, count = re.subn(
            r'(?m)^((?:version|VERSION) = )"[0-9.]+"', rf'\1"{OLD}"', path.read_text()
        )
        assert count == 1
        path.write_text(text)
    subprocess.run([NEW_PYTHON, "-m", "venv", "--clear", place / "venv"], check=True)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    # Without the native core: it takes minutes, and no message passes through it.
    subprocess.run([*pip, "-C", "wheel.cmake=false", source], check=True)
    (place / "complete").touch()
    return python


@pytest.fixture
def environment(own_environment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POTLUCK_DISCOVERY", "static")
    monkeypatch.setenv("POTLUCK_PSK", 64 * "7")
    monkeypatch.setenv("POTLUCK_ALLOW_ROOT", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "250")
    own_environment.mkdir()
    (own_environment / "scripts").mkdir()
    (own_environment / "scripts/hello.py").write_text(HELLO)
    (own_environment / "scripts/mixed.py").write_text(MIXED)
    return own_environment


class Machine:
    """A machine of the loopback with an agent."""

    def __init__(self, folder: Path, name: str, python: Path) -> None:
        self.folder, self.name, self.python = folder, name, python
        self.env = {**os.environ, "POTLUCK_HOME": str(folder / name), "POTLUCK_NAME": name}
        self.log = folder / f"{name}.log"

    @contextlib.contextmanager
    def up(self, port: int, peer: int) -> Iterator[None]:
        options = (f"--port={port}", f"--peers=127.0.0.1:{peer}", "--run-for=all")
        with (
            self.log.open("w") as log,
            subprocess.Popen(
                [self.python.with_name("potluck"), "up", *options],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
            ) as agent,
        ):
            try:
                yield
            finally:
                agent.terminate()
                agent.wait(WAIT_S)

    def potluck(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python.with_name("potluck"), *words],
            env=self.env,
            cwd=self.folder / "scripts",
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    def members(self) -> set[str]:
        """The names of the members of the view, as this machine sees it."""
        said = self.potluck("status", "--json")
        cluster: dict[str, Any] = json.loads(said.stdout)["cluster"] or {"nodes": []}
        return {each["name"] for each in cluster["nodes"] if each["role"]}


@pytest.mark.parametrize("first", ["old", "new"])
def test_both_releases_are_in_one_cluster_and_the_older_is_named(
    environment: Path, old_python: Path, first: str
) -> None:
    """Whichever leads: the first that is up."""
    new, old = Machine(environment, "new", NEW_PYTHON), Machine(environment, "old", old_python)
    order = [new, old] if first == "new" else [old, new]
    with contextlib.ExitStack() as stack:
        ports = dict(zip(("new", "old"), stack.enter_context(reserved_ports(2)), strict=True))
        for machine in order:
            other = "old" if machine is new else "new"
            stack.enter_context(machine.up(ports[machine.name], ports[other]))
            assert comes_true(lambda m=machine: m.name in m.members(), WAIT_S)
        for machine in order:
            assert comes_true(lambda m=machine: m.members() == {"old", "new"}, WAIT_S)

        upgrade = f"{old_python} -m pip install --upgrade potluck"
        listed = json.loads(new.potluck("nodes", "--json").stdout)["nodes"]
        shown = {each["name"]: (each["potluck"], upgrade in each["upgrade"]) for each in listed}
        assert shown == {"new": (VERSION, False), "old": (OLD, True)}
        table = new.potluck("nodes").stdout
        assert f"{OLD} (other)" in table
        assert upgrade in table
        assert upgrade in new.potluck("status").stdout

        # Each release runs its jobs, on its own machines, and says why not on the other.
        for machine, theirs in ((new, old), (old, new)):
            ran = machine.potluck("run", "hello.py")
            if machine is new and first == "old":  # which leads
                assert ran.returncode == 2
                assert upgrade in ran.stderr
                continue
            assert ran.returncode == 0, ran.stdout + ran.stderr
            said = ran.stdout + ran.stderr
            assert f"release {machine.python.parents[1]}" in said
            assert f"release {theirs.python.parents[1]}" not in said
            assert "a node can't take part" in said
            if first == "new":  # the newer one places the workers
                assert upgrade in said
        assert new.members() == old.members() == {"old", "new"}
    for machine in order:
        assert "cut off node" not in machine.log.read_text()
        assert "Traceback" not in machine.log.read_text()


def test_workers_of_both_releases_train_under_an_agent_of_either(
    environment: Path, old_python: Path
) -> None:
    for agent, worker in ((NEW_PYTHON, old_python), (old_python, NEW_PYTHON)):
        machine = Machine(environment, "one", agent)
        ran = machine.potluck("run", "--workers", "2", "mixed.py", worker)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        for rank, python in enumerate((agent, worker)):
            assert f"rank {rank} of {python.parents[1]} has 3 3" in ran.stdout, ran.stdout
