"""Where there can be no sandbox, and what one holds; real scripts in it are in tests/net."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from potluck._core.cluster.code_store.job_folders import JobFolder, Record
from potluck._core.cluster.jobs.process import launcher_of
from potluck._core.cluster.sharing.confinement import Confinement
from potluck._core.cluster.sharing.limits import Limits
from potluck._core.cluster.sharing.sandbox import Sandbox
from potluck._core.settings import Settings
from potluck.errors import ConfigurationError
from support.job_parts import EVE, ME, spec

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: bwrap")


def test_without_bubblewrap_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"needs bubblewrap.*apt install bubblewrap"):
        Sandbox(tmp_path, ())


def test_where_no_worker_could_run_in_it_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without user namespaces, as bubblewrap tells it."""
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = "No permissions to create new namespace. If user namespaces are off, switch them on"
    with pytest.raises(ConfigurationError, match=said):
        Sandbox(tmp_path / "home", ())


@needs_bwrap
def test_what_is_to_be_readable_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="POTLUCK_SANDBOX_READ: there is no /no/where"):
        Sandbox(tmp_path, (Path("/no/where"),))


@needs_bwrap
def test_only_the_gpus_that_are_given_are_devices_in_it(tmp_path: Path) -> None:
    def devices(gpus: tuple[str, ...] | None) -> list[str]:
        words = Sandbox(tmp_path / "home", (), gpus).command([tmp_path], tmp_path, tmp_path)
        return [words[at + 1] for at, word in enumerate(words) if word == "--dev-bind-try"]

    assert devices(()) == []
    assert devices(("2",))[:2] == ["/dev/nvidia2", "/dev/nvidiactl"]


@needs_bwrap
def test_later_places_lie_in_earlier_ones(tmp_path: Path) -> None:
    """What is hidden comes first, then what is shown in it; the job's folder alone is writable."""
    home, data = tmp_path / "home", tmp_path / "data"
    data.mkdir()
    job = home / "code_store" / "jobs" / "train-1"
    job.mkdir(parents=True)
    own = home / "workers" / "1" / "train-1"
    words = Sandbox(home, (data,)).command([job], job, own)
    places = [words.index(str(path)) for path in ("/tmp", data, home, own, job)]
    assert places == sorted(places)
    assert [words[place - 1] for place in places[2:]] == ["--tmpfs", "--ro-bind", "--bind"]
    assert words.count("--bind") == 1


@needs_bwrap
def test_jobs_of_other_machines_run_in_it_and_the_owners_own_do_not(tmp_path: Path) -> None:
    folder, own = JobFolder(tmp_path / "job", Record("job", EVE)), tmp_path / "own"
    for each in (folder.code, folder.output, own):
        each.mkdir(parents=True)
    letter = tmp_path / "letter"
    letter.touch()
    (folder.code / "train.py").write_text(f"import os\nprint(os.path.exists({str(letter)!r}))")
    confinement = Confinement(Limits(), Sandbox(tmp_path / "home", ()))

    async def finds_the_letter(starter: str) -> list[str]:
        lines: list[str] = []
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        launch = launcher_of(
            Settings(),
            confinement,
            spec(bytes(32), starter),
            folder,
            own,
            made=None,
            me=ME,
            sink=lambda worker, stream, line, end: lines.append(line),
            is_behind=lambda: False,
        )
        worker = launch("1", {}, ended.set_result)
        async with asyncio.timeout(60):
            assert await ended == 0, lines
            await worker.release()
        return lines

    assert asyncio.run(finds_the_letter(EVE)) == ["False"]
    assert asyncio.run(finds_the_letter(ME)) == ["True"]


FILL = """
import os, sys
taken = 0
for folder in ("/tmp", "/dev/shm", "/dev", "/var", "/run", "/home", "/root", sys.argv[1]):
    try:
        with open(os.path.join(folder, "filled"), "wb", 0) as file:
            while taken < 1 << 30:
                taken += file.write(bytes(1 << 20))
    except OSError as error:
        print(folder, error.strerror)
print("taken", taken)
"""


@needs_bwrap
def test_files_in_memory_take_no_more_than_the_owner_gives(tmp_path: Path) -> None:
    job, given = tmp_path / "job", 64 << 20
    job.mkdir()
    words = Sandbox(tmp_path / "home", ()).command([job], job, job, given)
    command = [*words, sys.executable, "-c", FILL, str(tmp_path / "home")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for folder in ("/tmp", "/dev/shm", "/var"):
        assert f"{folder} No space left on device" in done.stdout, done.stdout
    assert "/dev Read-only file system" in done.stdout, done.stdout
    taken = int(done.stdout.split()[-1])
    assert given // 2 < taken <= given
