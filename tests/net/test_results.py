"""Files that workers write on other machines: kept, told of, and brought to the machine that
started the job, whatever happens to the machines meanwhile."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from potluck._core.cluster.code_store.job_folders import KEPT_JOBS
from support.commands import Command, comes_true, potluck_command
from support.hosts import Network
from support.machines import Machine, cluster_of, form, machines

pytestmark = pytest.mark.needs_root_netns


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the machine where the command was given write into its directory."""
    monkeypatch.chdir(tmp_path)


SWEEP = """
import os, pathlib, potluck
ctx = potluck.init()
name = os.environ["POTLUCK_NAME"]
output = pathlib.Path(os.environ["POTLUCK_OUTPUT"])
(output / "model.pt").write_bytes(name.encode())
(output / "all.txt").write_text("the same everywhere")
results = pathlib.Path("results")
results.mkdir(exist_ok=True)
(results / f"trial-{ctx.rank}.pt").write_text(name)
ctx.close()
"""
NOTHING = "import potluck; potluck.init().close()"
BIG = """
import os, pathlib, potluck
ctx = potluck.init()
if os.environ["POTLUCK_NAME"] == "bob":
    output = pathlib.Path(os.environ["POTLUCK_OUTPUT"])
    (output / "a.txt").write_text("small")
    (output / "b.bin").write_bytes(os.urandom(1 << 20) * 48)
ctx.close()
"""


def script(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.py"
    path.write_text(text)
    return path


def ran(machine: Machine, *arguments: str | os.PathLike[str]) -> Command:
    with machine.run(*arguments) as run:
        assert run.finish() == 0, run.text
    return run


def job_of(run: Command) -> str:
    return run.text.rsplit("potluck fetch ", 1)[1].split()[0]


def listed_by(machine: Machine) -> object:
    """The jobs of which `potluck fetch` lists files there."""
    return json.loads(machine.runs("fetch", "--json").stdout)["jobs"]


def below(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_workers_wrote_elsewhere_is_told_of_kept_and_brought(tmp_path: Path) -> None:
    """Seen: the best model of a sweep lay on two other machines, nothing said so, and four trivial
    runs deleted it."""
    project = tmp_path / "project"
    with cluster_of(3, tmp_path / "homes") as members:
        form(*members)
        ada, bob, carl = members
        summary = tmp_path / "summary.json"
        run = ran(ada, "--json", summary, script(project, SWEEP))
        job = job_of(run)
        written = json.loads(summary.read_text())["written"]
        assert {each["machine"]: each["num_files"] for each in written} == {
            "ada": 2,  # its third one is where the command was given
            "bob": 3,
            "carl": 3,
        }
        assert "8 files were written on ada (2, " in run.text
        for _ in range(KEPT_JOBS + 1):
            ran(ada, script(project, NOTHING))
        assert "1 file, " in run.text
        assert "model" not in ada.runs("run", "--dry-run", str(project / "sweep.py")).stdout

        fetched = ada.runs("fetch", job, "--to", str(tmp_path / "out"))
        assert fetched.returncode == 0, fetched.stderr
        found = below(tmp_path / "out")
        ranks = {found.pop(name): name for name in list(found) if name.startswith("results/")}
        assert ranks.keys() == {"bob", "carl"}
        assert found == {
            "model.ada.pt": "ada",
            "model.bob.pt": "bob",
            "model.carl.pt": "carl",
            "all.txt": "the same everywhere",
        }
        again = ada.runs("fetch", job, "--to", str(tmp_path / "out"))
        assert again.stdout.startswith("0 files (0 bytes)")
        assert "6 were there already" in again.stdout

        (tmp_path / "out" / "all.txt").write_text("changed since")
        other = ada.runs("fetch", job, "--to", str(tmp_path / "out"))
        assert other.returncode == 2
        assert "is there already, and is another file" in " ".join(other.stderr.split())
        (tmp_path / "out" / "all.txt").write_text("the same everywhere")

        only = ada.runs("fetch", job, "results", "--to", str(tmp_path / "only"), "--json")
        assert {each["machine"] for each in json.loads(only.stdout)["files"]} == {"bob", "carl"}
        assert below(tmp_path / "only").keys() == set(ranks.values())

        carl.kill()
        bob.sees(ada, bob)
        [listed] = json.loads(ada.runs("fetch", "--json").stdout)["jobs"]
        held = {
            each["machine"]: (each["num_files"], each["is_away"]) for each in listed["machines"]
        }
        assert held == {"ada": (2, False), "bob": (3, False), "carl": (3, True)}
        less = ada.runs("fetch", job, "--to", str(tmp_path / "out"))
        assert less.stdout.startswith("0 files (0 bytes)"), "what is there has carl's name"
        assert below(tmp_path / "out").keys() == {*found, *ranks.values()}
        partly = ada.runs("fetch", job, "--to", str(tmp_path / "partly"))
        assert partly.returncode == 1
        assert "carl is away; it holds 3 files (" in partly.stderr
        assert "model.bob.pt" in below(tmp_path / "partly")
        carl.start()
        ada.sees(*members)
        whole = ada.runs("fetch", job, "--to", str(tmp_path / "partly"))
        assert whole.returncode == 0, whole.stderr
        assert below(tmp_path / "partly") == below(tmp_path / "out")


def test_a_fetch_whose_machine_dies_or_that_is_interrupted_leaves_nothing_half(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"

    def is_under_way() -> bool:
        parts = out.glob(".potluck-*/**/*")
        return any(path.stat().st_size > 1 << 20 for path in parts)

    with Network(2, rate="50mbit") as network, machines(network, tmp_path / "homes") as members:
        form(*members)
        ada, bob = members
        job = job_of(ran(ada, script(tmp_path / "project", BIG)))
        command = ada.host.command([*potluck_command(), "fetch", job, "--to", str(out)])

        with Command(command, env=ada.environment) as fetch:
            assert comes_true(is_under_way)
            bob.kill()
            assert fetch.finish() == 1, fetch.text
            assert "bob: 1 of its 2 files are not here, from b.bin on: " in fetch.text
        assert below(out) == {"a.txt": "small"}
        assert [path.name for path in out.iterdir()] == ["a.txt"]

        form(ada, bob)
        with Command(command, env=ada.environment) as fetch:
            assert comes_true(is_under_way)
            fetch.signal(signal.SIGINT)
            assert fetch.finish() != 0
        assert [path.name for path in out.iterdir()] == ["a.txt"]

        with Command(command, env=ada.environment) as fetch:
            assert fetch.finish() == 0, fetch.text
            assert "1 file (48.0 MiB) brought" in fetch.text
            assert "1 were there already" in fetch.text
        assert (out / "b.bin").stat().st_size == 48 << 20


def test_only_the_starter_gets_the_files_and_each_owner_those_of_the_own_machine(
    trio: list[Machine], tmp_path: Path
) -> None:
    ada, bob, _ = trio
    before = [listed_by(ada), listed_by(bob)]
    job = job_of(ran(ada, script(tmp_path / "project", SWEEP)))
    fetched = bob.runs("fetch", job, "--to", str(tmp_path / "bobs"))
    assert fetched.returncode == 0, fetched.stderr
    assert below(tmp_path / "bobs")["model.pt"] == "bob"
    assert len(below(tmp_path / "bobs")) == 3, "nothing of other machines"
    refused = bob.runs("fetch", "no-such-job")
    assert refused.returncode == 2
    assert "no machine that is there has files of a job 'no-such-job'" in refused.stderr

    removed = ada.runs("fetch", "--remove", job)
    assert removed.stdout.startswith(f"the files of {job} were deleted on ada, bob, carl")
    assert [listed_by(ada), listed_by(bob)] == before


def test_a_run_that_collects_has_all_files_at_its_end(trio: list[Machine], tmp_path: Path) -> None:
    ada, *_ = trio
    run = ran(ada, "--collect", tmp_path / "out", script(tmp_path / "project", SWEEP))
    assert "potluck fetch" not in run.text
    assert "6 files (" in run.text
    assert below(tmp_path / "out").keys() > {
        *("model.ada.pt", "model.bob.pt", "model.carl.pt", "all.txt")
    }
    with ada.run("--collect", Path.home(), tmp_path / "project" / "sweep.py") as run:
        assert run.finish() == 2
        assert "--collect" in run.text
        assert "starting" not in run.text
