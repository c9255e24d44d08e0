"""The folders of jobs on one node: what is a result, and how long it is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from potluck._core.cluster.code_store.job_folders import (
    KEPT_JOBS,
    JobFolder,
    JobFolders,
    Keeping,
    Record,
)
from potluck._core.cluster.content.package import open_below
from potluck.errors import ConfigurationError

ADA = "a1" * 32


Code = Callable[[Path], None]


@pytest.fixture
def code(tmp_path: Path) -> Code:
    folder = tmp_path / "package"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')")
    (folder / "data" / "in.txt").write_text("data")

    def fill(target: Path) -> None:
        shutil.copytree(folder, target)

    return fill


def folders_at(tmp_path: Path, notes: list[str] | None = None, **keeping: float) -> JobFolders:
    says = [].append if notes is None else notes.append
    kept = Keeping(keeping.get("days", 14.0), int(keeping.get("num_bytes", 1 << 30)))
    return JobFolders(tmp_path / "jobs", keeping=kept, on_note=says)


def run(folders: JobFolders, job: str, code: Code | None, *wrote: str) -> JobFolder:
    """A job that writes 1,000 bytes into each of these files of its output, and ends."""
    folder = folders.open(Record(job, ADA, "ab" * 32 if code else ""), code)
    for name in wrote:
        (folder.output / name).write_bytes(bytes(1000))
    folders.close(folder)
    return folder


def paths(folder: JobFolder) -> list[str]:
    return [each.path for each in folder.results()]


def test_the_working_directory_is_there_and_nowhere_else(tmp_path: Path, code: Code) -> None:
    folders = folders_at(tmp_path)
    folder = folders.open(Record("sweep", ADA, "ab" * 32, below="runs/a"), code)
    assert (folder.code / "runs" / "a").is_dir()
    assert paths(folder) == []
    folders.close(folder)
    folders.close(folders.open(Record("data", ADA, "ab" * 32, below="data"), code))
    before = set(tmp_path.rglob("*"))
    for below in ("../../a", "a/../../b", str(tmp_path / "c"), "a//b", "x\n"):
        with pytest.raises(ConfigurationError, match="can't be made here: "):
            folders.open(Record("evil", ADA, "ab" * 32, below=below), code)
    with pytest.raises(OSError, match="exists"):
        folders.open(Record("evil", ADA, "ab" * 32, below="train.py"), code)
    assert set(tmp_path.rglob("*")) == before


def test_results_are_the_files_that_the_package_did_not_bring(tmp_path: Path, code: Code) -> None:
    folders = folders_at(tmp_path)
    folder = folders.open(Record("sweep", ADA, "ab" * 32), code)
    assert paths(folder) == []
    (folder.code / "data" / "in.txt").write_text("changed")
    (folder.code / "results").mkdir()
    (folder.code / "results" / "old").write_text("unpacked, with its own age")
    os.utime(folder.code / "results" / "old", (1, 1))
    (folder.output / "a:b").write_text("a name for this system only")
    for name in (".hidden", "__pycache__/train.pyc", ".git/config"):
        (folder.code / name).parent.mkdir(exist_ok=True)
        (folder.code / name).write_text("no result")
    (folder.output / "link").symlink_to("/etc/passwd")
    (folder.output / "away").symlink_to("/etc")
    os.mkfifo(folder.output / "pipe")
    assert paths(folder) == ["code/data/in.txt", "code/results/old", "output/a:b"]
    os.replace(folder.output / "a:b", folder.output / "line\nfeed")
    package, left = folder.package(lambda path: "in.txt" not in path)
    assert [file.path for file in package.manifest.files] == ["code/results/old"]
    assert left == [ascii("output/line\nfeed")]
    folders.close(folder)


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_link_in_the_place_of_a_result_is_not_followed(tmp_path: Path, where: str) -> None:
    """A script in the sandbox may put one there between the list and the reading, which is done by
    the owner's agent outside of it."""
    secret, folder = tmp_path / "secret", tmp_path / "job"
    secret.mkdir()
    (secret / "key").write_text("the owner's")
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "key").write_text("a result")
    with open_below(folder, "out/key") as file:
        assert file.read() == b"a result"
    (folder / "out" / "key").unlink()
    if where == "file":
        (folder / "out" / "key").symlink_to(secret / "key")
    else:
        (folder / "out").rmdir()
        (folder / "out").symlink_to(secret)
    with pytest.raises(FileNotFoundError), open_below(folder, "out/key"):
        pass


def test_folders_with_results_outlive_any_number_of_jobs(tmp_path: Path, code: Code) -> None:
    folders = folders_at(tmp_path)
    kept = run(folders, "sweep", code, "model.pt")
    for number in range(KEPT_JOBS + 3):
        run(folders, f"trivial-{number}", code)
        run(folders, f"local-{number}", None)
    assert paths(kept) == ["output/model.pt"]
    others = [each for each in folders.all() if each.record.job != "sweep"]
    assert len(others) == KEPT_JOBS, "for a look at what ran; of local jobs none"


def test_results_are_deleted_after_days_and_that_is_said(tmp_path: Path, code: Code) -> None:
    notes: list[str] = []
    folders = folders_at(tmp_path, notes)
    folder = run(folders, "sweep", code, "model.pt")
    folders.prune(time.time() + 13 * 86400)
    assert folder.results()
    folders.prune(time.time() + 15 * 86400)
    [left] = folders.all()
    assert not folder.output.exists()
    assert left.results() == []
    assert left.record.gone.startswith("1 file (1000 bytes) was deleted: ")
    assert "POTLUCK_KEEP_RESULTS_DAYS" in left.record.gone
    assert notes == [f"job sweep: {left.record.gone}"]
    again = folders.open(Record("sweep", ADA, "ab" * 32), code)
    assert (again.code / "train.py").is_file(), "ordered again: a folder of its own"
    folders.close(again)


def test_over_the_quota_the_oldest_go_first_never_the_newest_and_never_silently(
    tmp_path: Path, code: Code
) -> None:
    notes: list[str] = []
    folders = folders_at(tmp_path, notes, num_bytes=2500)
    for number in range(4):
        run(folders, f"job-{number}", code, "a")
    assert {each.record.job for each in folders.all() if each.results()} == {"job-2", "job-3"}
    assert [note.partition(":")[0] for note in notes] == ["job job-0", "job job-1"]
    run(folders, "big", code, "a", "b", "c")
    assert [each.record.job for each in folders.all() if each.results()] == ["big"]
    [warning] = [note for note in notes if "take 2.9 KiB here, more than the 2.4 KiB" in note]
    assert "potluck fetch big" in warning


HOLDER = """
import sys, pathlib
from potluck._core.cluster.code_store.job_folders import JobFolders, Record
folders = JobFolders(pathlib.Path(sys.argv[1]), on_note=print)
folder = folders.open(Record("running", "{ada}"), None)
print(folder.path, flush=True)
sys.stdin.read()
""".replace("{ada}", ADA)


def test_the_folder_of_a_job_that_runs_is_not_deleted_by_another_process(tmp_path: Path) -> None:
    folders = folders_at(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "jobs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        folders.prune()
        [folder] = folders.all()
        assert folder.path == path
        assert folders.is_in_use(folder)
        holder.kill()
        holder.wait()
        assert not folders.is_in_use(folder)
        folders.prune()
        assert not path.exists(), "it left nothing"


def test_a_folder_belongs_to_starter_and_job(tmp_path: Path, code: Code) -> None:
    folders = folders_at(tmp_path)
    records = [
        Record("job", ADA, "ab" * 32),
        Record("job", "b2" * 32, "ab" * 32),
        Record("j" * 256, ADA, "ab" * 32),
        Record("j" * 255 + "k", ADA, "ab" * 32),
    ]
    opened = [folders.open(record, code) for record in records]
    assert len({folder.path for folder in opened}) == len(records)
    with pytest.raises(ConfigurationError, match="other code ran here as job job"):
        folders.open(Record("job", ADA, "cd" * 32), code)
    for folder in opened:
        folders.close(folder)


def test_what_others_keep_of_a_job_outlives_its_results(tmp_path: Path, code: Code) -> None:
    folders = folders_at(tmp_path)
    run(folders, "kept", code, "model.pt")
    [folder] = folders.all()
    (folder.path / "entry").write_text("how it ended")
    folders.remove(folder)
    assert [path.name for path in folder.path.iterdir()] == ["entry"]
    assert folders.all() == []
    again = folders.open(Record("kept", ADA, "ab" * 32), code)
    assert paths(again) == []
    assert (again.path / "entry").exists()
    folders.close(again)


def test_what_a_killed_process_left_is_no_folder_and_goes(tmp_path: Path, code: Code) -> None:
    folders = folders_at(tmp_path)
    half = folders.open(Record("half", ADA, "ab" * 32), code)
    folders.close(half)
    (half.path / "record").unlink()  # killed before that came
    (half.code / "train.py").write_text("half of it")
    (half.path / "entry").write_text("how it ended")
    assert folders.all() == []
    whole = folders.open(Record("half", ADA, "ab" * 32), code)
    assert (whole.code / "train.py").read_text() == "print('hello')"
    folders.close(whole)
    (half.path / "record").unlink()
    os.utime(half.path, (1, 1))
    folders.prune()
    assert [path.name for path in half.path.iterdir()] == ["entry"]


def saved(folder: JobFolder, directory: str, stem: str, text: str) -> None:
    """A checkpoint of two parts, as ``potluck.checkpoint`` names its files."""
    (folder.code / directory).mkdir(parents=True, exist_ok=True)
    for end in ("part-1-of-2.safetensors", "part-2-of-2.safetensors", "json"):
        (folder.code / directory / f"{stem}.{end}").write_text(text)


def opened(folders: JobFolders, job: str, code: Code, **facts: Any) -> JobFolder:
    facts = {"starter": ADA, "package": "ab" * 32, "directory": "/ada/project"} | facts
    return folders.open(Record(job=job, **facts), code)


def test_a_job_finds_the_newest_checkpoint_of_the_one_before(tmp_path: Path, code: Code) -> None:
    """In each directory that the last one had; nothing of it is a result of the new job."""
    folders = folders_at(tmp_path)
    first = opened(folders, "first", code, began=1.0)
    saved(first, "state", "000007-step-70", "of first")
    saved(first, "old/state", "000003-step-9", "of first")
    folders.close(first)
    second = opened(folders, "second", code, package="cd" * 32, began=2.0)
    for number in ("000008-step-80", "000010-step-100", "000009-step-90"):
        saved(second, "state", number, f"of second {number}")
    (second.code / "state" / "notes.json").write_text("{}")
    folders.close(second)
    os.utime(second.path, (1.0, 1.0))  # as if something of the first had been written later

    third = opened(folders, "third", code)
    found = {
        path.relative_to(third.code).as_posix(): path.read_text()
        for path in third.code.rglob("*-step-*")
    }
    ends = ("json", "part-1-of-2.safetensors", "part-2-of-2.safetensors")
    assert found == {
        **{f"state/000010-step-100.{end}": "of second 000010-step-100" for end in ends},
        **{f"old/state/000003-step-9.{end}": "of first" for end in ends},
    }
    assert third.results() == []
    assert len(second.results()) == 3 * 3 + 1  # what it was given is none of its own
    folders.close(third)


def test_checkpoints_that_a_job_was_given_count_as_what_it_keeps(
    tmp_path: Path, code: Code
) -> None:
    folders = folders_at(tmp_path, num_bytes=5000)
    first = opened(folders, "first", code, began=1.0)
    saved(first, "state", "000007-step-70", "x" * 1000)
    folders.close(first)
    for number in (2, 3):
        without_results = opened(folders, f"plain-{number}", code, began=float(number))
        assert (without_results.code / "state" / "000007-step-70.json").exists()
        folders.close(without_results)
    assert [each.record.job for each in folders.all()] == ["plain-3", "first"]
    third = opened(folders, "third", code, began=4.0)
    (third.output / "log").write_bytes(bytes(1000))
    folders.close(third)
    kept = {each.record.job: each.record.gone for each in folders.all()}
    assert kept["third"] == ""
    assert "were deleted: there were more than" in kept["first"]
    fourth = opened(folders, "fourth", code, began=5.0)
    assert (fourth.code / "state" / "000007-step-70.json").exists()
    folders.close(fourth)


@pytest.mark.parametrize(
    "facts",
    [{"directory": "/ada/other"}, {"starter": "b0" * 32}],
    ids=lambda facts: next(iter(facts)),
)
def test_a_job_from_elsewhere_or_of_another_finds_none(
    tmp_path: Path, code: Code, facts: dict[str, str]
) -> None:
    folders = folders_at(tmp_path)
    first = opened(folders, "first", code)
    saved(first, "state", "000007-step-70", "of first")
    while_it_runs = opened(folders, "second", code)
    assert not (while_it_runs.code / "state").exists()
    folders.close(first)
    third = opened(folders, "third", code, **facts)
    assert not (third.code / "state").exists()
    folders.close(while_it_runs)
    folders.close(third)


def test_a_checkpoint_that_a_file_or_a_full_disk_is_in_the_way_of_is_left_out(
    tmp_path: Path, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = folders_at(tmp_path)
    first = opened(folders, "first", code)
    saved(first, "train.pyx", "000007-step-70", "of first")
    saved(first, "state", "000007-step-70", "of first")
    folders.close(first)

    def with_a_file(target: Path) -> None:
        code(target)
        (target / "train.pyx").write_text("the package has it")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    monkeypatch.setattr("potluck._core.system.clone", lambda source, copy: False)
    second = opened(folders, "second", with_a_file)
    assert not list(second.code.rglob("*-step-*"))
    assert (second.code / "train.pyx").read_text() == "the package has it"
    folders.close(second)
