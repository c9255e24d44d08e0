"""A node's store of scripts' folders where there is no room, or something can't be read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck._core.cluster.code_store.job_folders import Record
from potluck._core.cluster.code_store.store import CodeStore
from potluck.errors import ConfigurationError
from support.requests import Nodes


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The system refuses to write more into any file, much as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    (path / "train.py").write_text("print('hello')")
    (path / "data.bin").write_bytes(os.urandom(100_000))
    return path


ADA, BOB, CARL = "a1" * 32, "b2" * 32, "c3" * 32


def store_at(home: Path, me: str = ADA, nodes: Nodes | None = None) -> CodeStore:
    return CodeStore(home, me, (nodes or Nodes()).store(home / "content", me))


def linked_stores(root: Path) -> tuple[CodeStore, CodeStore]:
    """The stores of bob and ada, each of which asks the other one."""
    nodes = Nodes()
    return store_at(root / "bob", BOB, nodes), store_at(root / "ada", ADA, nodes)


def everything(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def test_no_room_for_a_folder_is_said_with_what_to_do_and_leaves_nothing_half(
    tmp_path: Path, folder: Path
) -> None:
    store = store_at(tmp_path / "home")
    with files_of_at_most(50_000), pytest.raises(ConfigurationError) as caught:
        asyncio.run(store.take_in(folder, "train.py", ()))
    assert str(caught.value) == (
        f"the script's folder can't be kept in {tmp_path}/home: File too large. Make "
        "room there, or set POTLUCK_HOME to a directory on another disk"
    )
    assert all(path.stat().st_size < 200 for path in everything(tmp_path / "home"))
    package, _ = asyncio.run(store.take_in(folder, "train.py", ()))
    before = everything(tmp_path / "home")
    with (
        files_of_at_most(50_000),
        pytest.raises(ConfigurationError, match=r"too large\. Make room"),
    ):
        store.open(Record("job-1", ADA, package.hex()))
    assert everything(tmp_path / "home") == before
    opened = store.open(Record("job-1", ADA, package.hex()))
    assert (opened.code / "data.bin").stat().st_size == 100_000
    store.close(opened)


def test_the_packages_of_a_node_are_deleted_and_no_others(tmp_path: Path, folder: Path) -> None:
    """As after a ban: nothing that the node sent here is left, not in the copies of its jobs
    either."""

    async def story() -> None:
        bob, ada = linked_stores(tmp_path)
        for name in ("bobs", "both"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "train.py").write_text(f"print({name!r})")
        bobs, _ = await bob.take_in(tmp_path / "bobs", "train.py", ())
        both, _ = await bob.take_in(tmp_path / "both", "train.py", ())
        own, _ = await ada.take_in(folder, "train.py", ())
        for package, origin in ((bobs, BOB), (both, BOB), (both, CARL)):
            await ada.fetch(package, origin)
        for package, job in ((bobs, "bobs-job"), (own, "adas-job")):
            ada.close(ada.open(Record(job, BOB, package.hex())))

        assert await ada.delete_from(BOB) == 1

        left = {path.read_bytes() for path in everything(tmp_path / "ada")}
        assert b"print('bobs')" not in left
        assert b"print('both')" in left, "carl sent it, too"
        jobs = tmp_path / "ada" / "code_store" / "jobs"
        assert [path.name[:8] for path in jobs.iterdir()] == ["adas-job"]
        assert [ada.has(each) for each in (bobs, both, own)] == [False, True, True]
        with pytest.raises(ConfigurationError, match="was removed here"):
            ada.open(Record("again", BOB, bobs.hex()))
        assert await ada.delete_from(BOB) == 0
        assert await store_at(tmp_path / "ada").delete_from(CARL) == 1, "the disk remembers"

    asyncio.run(story())


def test_a_folder_belongs_to_one_job_of_one_starter_with_one_package(
    tmp_path: Path, folder: Path
) -> None:
    """A leader orders a job of its own under the name of ada's, and then ada's: nothing of what the
    first one brought is in the folder in which ada's scripts run."""
    store = store_at(tmp_path / "home")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").write_text("print('other')")
    other, _ = asyncio.run(store.take_in(tmp_path / "other", "train.py", ()))
    own, _ = asyncio.run(store.take_in(folder, "train.py", ()))
    others = store.open(Record("train-1", BOB, other.hex()))
    (others.code / "sitecustomize.py").touch()
    store.close(others)
    folders = [
        store.open(Record(job, starter, package.hex()))
        for package, job, starter in (
            (own, "train-1", ADA),
            (own, "train-2", ADA),
        )
    ]
    assert len({folder.path for folder in (others, *folders)}) == 3
    for package, starter in ((own, BOB), (other, ADA)):
        with pytest.raises(ConfigurationError, match="other code ran here as job train-1"):
            store.open(Record("train-1", starter, package.hex()))
    assert (folders[0].code / "train.py").read_text() == "print('hello')"
    assert not (folders[0].code / "sitecustomize.py").exists()
    again = store.open(Record("train-1", ADA, own.hex()))
    assert again.path == folders[0].path, "ordered again, after a restart say"
    for folder in folders:
        store.close(folder)
