"""Checkpoint files: whole or not at all, and never silently damaged."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from potluck.checkpoint import files as files_module
from potluck.checkpoint import manifest
from potluck.checkpoint import store as store_module
from potluck.checkpoint.state import Entry
from potluck.checkpoint.store import CheckpointStore, Part
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
    path = store.save(state(2), 2).with_suffix(".json")
    text = path.read_text()
    for at in range(len(text)):
        path.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        assert loaded(store) in (1, 2)
    path.write_text(text.replace('"step": 2', '"step": 3'))
    assert loaded(store) == 1


@pytest.mark.parametrize("name", [".", "..", "", "a/b", "a\0b"])
def test_a_manifest_that_names_no_plain_file_is_not_followed(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    path = store.save(state(2), 2).with_suffix(".json")
    whole = manifest.unseal(path.read_bytes(), path, manifest.Manifest)
    parts = [msgspec.structs.replace(each, file=name) for each in whole.parts]
    path.write_bytes(manifest.seal(msgspec.structs.replace(whole, parts=parts)))
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

    monkeypatch.setattr(files_module.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.save(state(2), 2)
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before
    assert loaded(store) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_disk_that_is_really_full_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    monkeypatch.setattr(
        files_module, "_open", lambda path, flags: os.open("/dev/full", os.O_WRONLY)
    )
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.save(state(2), 2)
    monkeypatch.undo()
    assert loaded(store) == 1


# ---------------------------------------------------------------- a directory of others, too


def test_only_the_owner_can_read_a_checkpoint_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = CheckpointStore(tmp_path / "new" / "below", sharded=True)
        number = store.next_number()
        for index in (1, 0):
            store.save(state(1), 1, part=Part(index, 2, number))
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in store.directory.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.directory.parent.stat().st_mode) == 0o700


def test_a_link_that_waits_under_any_name_of_a_checkpoint_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user of the directory wants the training to overwrite a file of its user."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "folder"
    store = CheckpointStore(folder)
    store.save(state(1), 1)
    monkeypatch.setattr(files_module.secrets, "token_hex", lambda nbytes: "0" * 2 * nbytes)
    for name in ("000002-step-2.safetensors", "000002-step-2.json"):
        (folder / f"{name}.writing").symlink_to(victim)
        (folder / f"{name}.{'0' * 16}.writing").symlink_to(victim)  # guessed, and not swept
    store._sweep = lambda up_to: None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="File exists"):
        store.save(state(2), 2)
    assert victim.read_text() == "mine"
    assert loaded(store) == 1


def test_a_link_in_place_of_a_finished_file_is_replaced(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    store = CheckpointStore(tmp_path / "folder", sharded=True)
    number = store.next_number()
    for index in (1, 0):
        suffix = f"part-{index + 1}-of-2.safetensors"
        (store.directory / f"{number:06d}-step-1.{suffix}").symlink_to(victim)
    for index in (1, 0):
        store.save(state(1), 1, part=Part(index, 2, number))
    assert victim.read_text() == "mine"
    assert loaded(store) == 1


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, suffix: str
) -> None:
    store = CheckpointStore(tmp_path / "folder")
    store.save(state(1), 1)
    path = store.save(state(2), 2).with_suffix(f".{suffix}")
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    assert loaded(store) == 1
    why = "it is a link, and links are not followed" if kind == "link" else "is not a file"
    assert why in caplog.text


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
    ended = subprocess.run([sys.executable, "-c", KILLED_WRITER, tmp_path, str(call)], timeout=200)
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


# ---------------------------------------------------------------- in parts


def save_in_parts(
    directory: Path, step: int, world_size: int, *, missing: tuple[int, ...] = ()
) -> list[Path]:
    """What the ranks of a group do; rank 0 last, which then waits for nobody."""
    number = CheckpointStore(directory).next_number()
    paths = []
    for rank in reversed(range(world_size)):
        if rank not in missing:
            store = CheckpointStore(directory, sharded=True, parts_timeout_s=0.05)
            path = store.save(state(step), step, part=Part(rank, world_size, number))
            assert path is not None
            paths.append(path)
    return paths[::-1]


def test_parts_of_many_ranks_are_read_as_one_state(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_in_parts(tmp_path, step, 3)
    assert loaded(CheckpointStore(tmp_path)) == 5
    assert len(list(tmp_path.iterdir())) == 3 * 4
    found = CheckpointStore(tmp_path).load_latest()
    assert found is not None
    assert np.array_equal(found.state["model"]["b"], np.full(2, -5.0))


def test_parts_and_whole_files_may_follow_each_other(tmp_path: Path) -> None:
    save_in_parts(tmp_path, 1, 2)
    CheckpointStore(tmp_path).save(state(2), 2)
    assert loaded(CheckpointStore(tmp_path)) == 2
    save_in_parts(tmp_path, 3, 4)
    assert loaded(CheckpointStore(tmp_path)) == 3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_flipped_byte_in_any_part_means_the_previous_checkpoint(
    tmp_path: Path, rank: int
) -> None:
    save_in_parts(tmp_path, 1, 3)
    path = save_in_parts(tmp_path, 2, 3)[rank]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert loaded(CheckpointStore(tmp_path)) == 1


def test_a_part_that_never_comes_is_named_and_the_previous_checkpoint_counts(
    tmp_path: Path,
) -> None:
    save_in_parts(tmp_path, 1, 3)
    with pytest.raises(CheckpointError, match=r"000002-step-2.part-2-of-3 is not in .* share"):
        save_in_parts(tmp_path, 2, 3, missing=(1,))
    assert loaded(CheckpointStore(tmp_path)) == 1
    save_in_parts(tmp_path, 3, 2)
    assert loaded(CheckpointStore(tmp_path)) == 3
    assert len(list(tmp_path.iterdir())) == 4 + 3, "the incomplete one is swept"


def test_when_a_rank_is_lost_its_part_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, sharded=True, asynchronous=True, parts_timeout_s=600)
    store.save(state(1), 1, part=Part(0, 2, 1))
    store.give_up()
    store.wait()
    assert "not complete" in caplog.text
    assert "a rank was lost meanwhile" in caplog.text


def test_the_number_of_a_part_that_is_not_on_the_disk_yet_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two checkpoints under one number could mix: one's parts with the other's hashes."""
    begun, opened = threading.Event(), threading.Event()
    real = store_module.encode_entries

    def held(tree: object, entries: dict[str, Entry]) -> bytes:
        begun.set()
        assert opened.wait(30)
        return real(tree, entries)

    monkeypatch.setattr(store_module, "encode_entries", held)
    store = CheckpointStore(tmp_path, sharded=True, asynchronous=True)
    number = store.next_number()
    store.save(state(1), 1, part=Part(1, 2, number))
    assert begun.wait(30)
    assert not list(tmp_path.iterdir())
    assert store.next_number() == number + 1
    opened.set()
    store.wait()


# ---------------------------------------------------------------- in the background


class Gate:
    """Holds every fsync up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        real = os.fsync

        def held(fd: int) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            real(fd)

        monkeypatch.setattr(files_module.os, "fsync", held)


def test_a_state_that_changes_while_it_is_written_is_written_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    store = CheckpointStore(tmp_path, asynchronous=True)
    weights = np.full(8, 1.0)
    assert store.save({"model": {"w": weights}}, 1) is None
    assert gate.reached.wait(30)
    weights += 41  # training goes on
    assert store.load_latest() is None
    gate.opened.set()
    store.wait()
    assert loaded(store) == 1


def test_only_one_is_written_at_a_time_and_the_next_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    store = CheckpointStore(tmp_path, asynchronous=True)
    store.save(state(1), 1)
    assert gate.reached.wait(30)
    second = threading.Thread(target=store.save, args=(state(2), 2))
    second.start()
    assert len(list(tmp_path.glob("*.writing"))) == 1
    gate.opened.set()
    second.join(30)
    store.close()
    assert loaded(store) == 2


def test_what_a_background_write_raised_surfaces_at_the_next_save_which_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, asynchronous=True)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files_module.os, "fsync", full)
        store.save(state(1), 1)
        store._writer._thread.join()  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"step 1 can't be written.*No space left"):
        store.save(state(2), 2)
    store.close()
    assert loaded(store) == 2


def test_facts_of_the_world_come_back(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(state(1), 1, facts={"world_size": 4})
    found = CheckpointStore(tmp_path).load_latest()
    assert found is not None
    assert found.facts == {"world_size": 4}


def test_a_number_below_that_of_another_training_is_refused_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    """It would be the first to be removed, and still count."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save({"x": 1}, 10, part=Part(number=500))
    for number in (6, 500):
        with pytest.raises(CheckpointError, match="has a checkpoint 500 of another training"):
            store.save({"x": 2}, 20, part=Part(number=number))
    found = store.load_latest()
    assert found is not None
    assert (found.number, found.step, store.whole) == (500, 10, 500)
