"""A node's store of scripts' folders where there is no room, or something can't be read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.cluster.code_store.store import CodeStore
from potluck.errors import ConfigurationError


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


def everything(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def test_no_room_for_a_folder_is_said_with_what_to_do_and_leaves_nothing_half(
    tmp_path: Path, folder: Path
) -> None:
    store = CodeStore(tmp_path / "store", lambda node, message: True)
    with files_of_at_most(50_000), pytest.raises(ConfigurationError) as caught:
        asyncio.run(store.take_in(folder, "train.py"))
    assert str(caught.value) == (
        f"the script's folder can't be kept in {tmp_path}/store: File too large. Make room there, "
        "or set POTLUCK_HOME to a directory on another disk"
    )
    assert all(path.stat().st_size < 50 for path in everything(tmp_path / "store"))
    package = asyncio.run(store.take_in(folder, "train.py"))
    before = everything(tmp_path / "store")
    with (
        files_of_at_most(50_000),
        pytest.raises(ConfigurationError, match=r"too large\. Make room"),
    ):
        store.open(package, "job-1")
    assert everything(tmp_path / "store") == before
    assert (store.open(package, "job-1") / "data.bin").stat().st_size == 100_000


def test_what_cannot_be_read_is_named(tmp_path: Path, folder: Path) -> None:
    """Root may read everything that is there, so here it is not there any more."""
    store = CodeStore(tmp_path / "store", lambda node, message: True)
    gone = folder / "lib"
    with pytest.raises(ConfigurationError, match=r"lib can't be read.*No such.*\.potluckignore"):
        asyncio.run(store.take_in(gone, "train.py"))
