"""Checkpoint files: whole or not at all, and never silently damaged."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from potluck.checkpoint import store as store_module
from potluck.checkpoint.store import CheckpointStore
from potluck.errors import CheckpointError


def state(value: float) -> dict[str, object]:
    return {"model": {"w": np.full(8, value), "b": np.full(2, -value)}, "step": int(value)}


def loaded(store: CheckpointStore) -> int:
    checkpoint = store.load_latest()
    assert checkpoint is not None
    assert float(checkpoint.state["model"]["w"][0]) == checkpoint.step
    return checkpoint.step


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path).load_latest() is None
    assert CheckpointStore(tmp_path / "none").load_latest() is None


def test_the_newest_is_loaded_and_three_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "made" / "here")
    for step in range(5):
        store.save(state(step), step)
    assert loaded(store) == 4
    assert len(list(store.directory.iterdir())) == 6


@pytest.mark.parametrize("offset", [3, 60, -1, -20])
def test_a_flipped_byte_is_detected_and_the_previous_file_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    path = store.save(state(2), 2)
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert loaded(store) == 1
    assert str(path) in caplog.text


def test_a_flipped_byte_names_the_tensor_it_hit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    path = store.save(state(2), 2)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store.load_latest()
    assert "tensor 'model/w' has the wrong hash" in caplog.text


def test_a_flipped_byte_in_the_manifest_is_detected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    manifest = store.save(state(2), 2).with_suffix(".json")
    text = manifest.read_text()
    for at in range(len(text)):
        manifest.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        assert loaded(store) in (1, 2)
    manifest.write_text(text.replace('"step": 2', '"step": 3'))
    assert loaded(store) == 1


def test_a_torn_file_is_detected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    path = store.save(state(2), 2)
    os.truncate(path, path.stat().st_size // 2)
    assert loaded(store) == 1
    assert f"{path} has" in caplog.text


def test_a_missing_state_file_is_detected(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    store.save(state(2), 2).unlink()
    assert loaded(store) == 1


def test_when_none_is_intact_the_error_says_so_and_nothing_is_made_up(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(state(step), step).write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        store.load_latest()


def test_after_going_back_the_newest_is_what_was_written_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(state(9), 9)
    store.save(state(4), 4)
    assert loaded(store) == 4


def test_a_full_disk_is_an_error_and_the_previous_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    before = sorted(tmp_path.iterdir())

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.save(state(2), 2)
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before
    assert loaded(store) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_disk_that_is_really_full_is_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    (tmp_path / "000002-step-2.safetensors.writing").symlink_to("/dev/full")
    # The sweep would remove the link as a leftover; without it the write goes to the full device.
    store._sweep = lambda names: None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.save(state(2), 2)
    assert loaded(store) == 1


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="can't be written"):
        CheckpointStore(tmp_path / "file" / "below").save(state(1), 1)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing"):
            store.save(state(1), 1)
    finally:
        os.close(fd)
    store.save(state(1), 1)


KILLED_WRITER = """
import os, signal, sys
import numpy as np
from potluck.checkpoint import store
from potluck.checkpoint.store import CheckpointStore
count = 0
def counted(call):
    def wrapper(*args):
        global count
        count += 1
        if count == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args)
    return wrapper
os.fsync, os.rename = counted(os.fsync), counted(os.rename)
CheckpointStore(sys.argv[1]).save({"model": {"w": np.full(8, 2.0)}}, 2)
"""


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_a_writer_killed_at_any_point_loses_nothing_and_its_leftovers_go(
    tmp_path: Path, call: int
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    ended = subprocess.run([sys.executable, "-c", KILLED_WRITER, tmp_path, str(call)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    # The sixth call is the last flush of the directory: the manifest has its name by then.
    assert loaded(store) == (2 if call == 6 else 1)
    store.save(state(3), 3)
    assert loaded(store) == 3
    kept = 3 if call == 6 else 2
    assert len(list(tmp_path.iterdir())) == 2 * kept


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0)
