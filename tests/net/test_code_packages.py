"""What reaches other machines' disks by ``potluck run``, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import Command, potluck_command
from support.machines import Machine, cluster_of, form

pytestmark = pytest.mark.needs_root_netns

PROJECT = {
    "scripts/train.py": """
import mypkg.net, inner, helper, potluck
ctx = potluck.init()
print(mypkg.net.NAME, inner.NAME, helper.NAME, "of", ctx.world_size)
print(*__file__.split("/")[-2:], "is at", open("data.txt").read())
ctx.close()
""",
    "scripts/helper.py": "NAME = 'beside'",
    "mypkg/net.py": "NAME = 'from the root'",
    "src/inner/__init__.py": "NAME = 'from src'",
    "data.txt": "its place",
}


def test_a_script_finds_the_modules_of_its_project_on_every_machine(tmp_path: Path) -> None:
    """Seen: only the script's own folder travelled, so ``import mypkg`` failed everywhere."""
    project = tmp_path / "project"
    for path, text in PROJECT.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    (project / ".git").mkdir()
    script = project / "scripts" / "train.py"
    with cluster_of(2, tmp_path / "homes") as (ada, bob):
        form(ada, bob)
        for arguments in ([script], ["--root", project, script]):
            typed = ada.host.command([*potluck_command(), "run", *arguments])
            with Command(typed, cwd=project, env=ada.environment) as run:
                assert run.finish() == 0, run.text
            assert run.text.count("from the root from src beside of 2") == 2
            assert run.text.count("scripts train.py is at its place") == 2
            assert "5 files, " in run.text
        with ada.run("--root", project / "mypkg", script) as run:
            assert run.finish() == 2
            assert "name a folder that the script" in run.text
        ada.kill()
        with ada.run(script) as run:  # without a cluster
            run.finish()
            assert "from the root from src beside of 1" in run.text


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n"
SCRIPT = """
import os, pathlib, potluck
ctx = potluck.init()
here = pathlib.Path(__file__).parent
print("has", *sorted(os.listdir(here)), "with", (here / ".settings").read_text())
ctx.close()
"""


def stored(machine: Machine) -> set[bytes]:
    store = machine.home / "code_store"
    return {path.read_bytes() for path in store.rglob("*") if path.is_file()}


def test_the_secrets_of_a_small_home_stay_at_home(pair: list[Machine], tmp_path: Path) -> None:
    """The review's finding: a script in such a folder took the keys to every machine, silently."""
    ada, bob = pair
    folder = tmp_path / "server"
    for path in (".ssh/id_ed25519", ".aws/credentials", ".env.local", ".netrc", "state/node"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(KEY)
    (folder / ".settings").write_text("lr=1")
    (folder / ".gitignore").write_text("/big/\n")
    (folder / "big").mkdir()
    (folder / "big" / "data").write_text("big")
    (folder / "data").symlink_to("/data")
    (folder / "train.py").write_text(SCRIPT)
    with ada.run("--include", ".settings", folder / "train.py") as run:
        assert run.finish() == 2
        assert "what looks like keys or credentials: state/node (a private key)" in run.text
    (folder / "state" / "node").unlink()
    with ada.run("--include", ".settings", folder / "train.py") as run:
        assert run.finish() == 0, run.text
    assert "2 files, " in run.text
    assert "travel to 1 machine (bob); not sent: 1 link, 1 ignored, 5 hidden (see" in run.text
    assert "links do not travel, so other machines don't have data" in run.text
    assert run.text.count("has .settings train.py with lr=1") == 2
    assert stored(bob) >= {b"lr=1", SCRIPT.encode()}
    assert not any(KEY.encode() in data or data == b"big" for data in stored(bob))
    dry = ada.runs("run", "--dry-run", str(folder / "train.py"))
    assert ".ssh/" in dry.stdout
    assert "travels to 1 machine (bob)" in dry.stdout


MODULE = {
    "pkg/__init__.py": "",
    "pkg/__main__.py": "from pkg import train",
    "pkg/net.py": "NAME = 'beside'",
    "pkg/train.py": """
import os, sys
import common, inner, potluck
from .net import NAME
if os.environ["RANK"] == "1" and os.environ["POTLUCK_RESTARTS"] == "0":
    os.kill(os.getpid(), 9)
ctx = potluck.init()
place = sys.argv[0].split("/")[-2:]
print(__package__, NAME, common.NAME, inner.NAME, *place, *sys.argv[1:], "of", ctx.world_size)
print("reads", open("data.txt").read(), "where", sys.modules["__main__"].__spec__.name, "runs")
print("imports from a copy:", "/code_store/" in common.__file__)
ctx.close()
""",
    "common.py": "NAME = 'from the root'",
    "src/inner.py": "NAME = 'from src'",
    "src/pkg2/__init__.py": "",
    "src/pkg2/job.py": """
import os, common, inner, potluck
print(common.NAME, "for", __name__, "in", os.path.basename(os.getcwd()))
""",
    "data.txt": "its place",
}


def test_a_module_runs_as_under_python_m_on_every_machine(
    pair: list[Machine], tmp_path: Path
) -> None:
    """Seen: only a file could be run, and relative imports failed in it."""
    ada, _ = pair
    project = tmp_path / "project"
    for path, text in MODULE.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)

    def command(machine: Machine, place: Path, *words: object) -> Command:
        typed = machine.host.command([*potluck_command(), "run", *map(str, words)])
        return Command(typed, cwd=place, env=machine.environment)

    with command(ada, project, "-m", "pkg.train", "--epochs", "3") as run:
        assert run.finish() == 0, run.text
    expected = "pkg beside from the root from src pkg train.py --epochs 3 of 2"
    assert run.text.count(expected) == 2, run.text
    assert run.text.count("reads its place where pkg.train runs") == 2
    assert run.text.count("imports from a copy: True") == 2  # also where the original is
    assert "starting worker 1 again" in run.text
    (project / ".git").mkdir()
    (project / "empty" / "deep").mkdir(parents=True)  # of which nothing travels
    for place in (
        project / "empty" / "deep",
        project / "pkg",
    ):  # found in src of the repository
        with command(ada, place, "-m", "pkg2.job") as run:
            assert run.finish() == 0, run.text
        assert run.text.count(f"from the root for __main__ in {place.name}") == 2
        assert "9 files, " in run.text
    with command(ada, tmp_path, "--root", project, "-m", "pkg2.job") as run:
        assert run.finish() == 0, run.text
        assert run.text.count("from the root for __main__") == 2
    with command(ada, project, "--dry-run", "-m", "pkg2.job") as run:
        assert run.finish() == 0, run.text
        assert "src/pkg2/job.py" in run.text
    with command(ada, project, "-m", "pkg3.job") as run:
        assert run.finish() == 2
        assert f"of that name with a __main__.py, in {project}, {project / 'src'}" in run.text
