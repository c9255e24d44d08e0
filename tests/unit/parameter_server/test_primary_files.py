"""A server's checkpoints: killed at any file operation, damaged, or on a full disk."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck._core.types import Group, Member
from potluck.checkpoint import CheckpointStore
from potluck.checkpoint import files as files_module
from potluck.errors import CheckpointError
from potluck.parameter_server import SGD, Synchronous
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.layout import layout_of, plain
from potluck.parameter_server.primary import Primary
from potluck.parameter_server.replica import Replica
from potluck.parameter_server.service import PrimaryService
from potluck.services import Call
from potluck.services.presence import Presence

ALONE = Group(1, 0, (Member("0"),))


class Server:
    """A server that is alone, and the calls of worker 0."""

    def __init__(self, folder: Path, save_every: int = 1) -> None:
        replica = Replica(Synchronous(), SGD(1.0, momentum=0.5), Presence(lambda: ALONE, 30.0))
        self.primary = Primary(
            replica,
            checkpoints=Checkpoints(CheckpointStore(folder), replica),
            save_every=save_every,
            worker_timeout_s=30.0,
        )
        self.service = PrimaryService(self.primary)
        self.term = replica.term
        self.save, self.close = self.primary.save, self.primary.close

    def ask(self, method: str, *arguments: Any) -> Any:
        call = Call("node", "0", 0, "parameters", method, 1.0)
        return getattr(self.service, method)(call, *arguments)


def train(it: Server, num_steps: int) -> None:
    tensors = {"w": np.zeros(3), "b": np.zeros(2)}
    it.ask("create", "m", tensors, plain(layout_of(tensors)), 0, False, {})
    for _ in range(num_steps):
        step = it.ask("stats")["m"]["version"]
        tensors = {"w": -np.ones(3), "b": -np.ones(2)}
        assert it.ask("push", "m", tensors, step, step + 1, it.term, {})["counted"]


def version_in(folder: Path) -> int:
    """The version that a server goes on from; its tensors must be of that version, all of them."""
    it = Server(folder)
    found = it.ask("pull", "m", None, 0.0, False).result(0)
    whole = Server(folder / "beside", save_every=1000)
    train(whole, found["version"])
    expected = whole.ask("pull", "m", None, 0.0, False).result(0)["tensors"]
    whole.close()
    for name in ("w", "b"):
        np.testing.assert_array_equal(found["tensors"][name], expected[name])
    return int(found["version"])


KILLED = """
import os, pathlib, shutil, signal, sys
sys.path.insert(0, sys.argv[2])
import test_primary_files as here
folder = pathlib.Path(sys.argv[1])
for call in range(1, 100):
    shutil.copytree(folder / "0", folder / str(call))
    child = os.fork()
    if not child:
        it = here.Server(folder / str(call))
        count = 0
        def counted(inner):
            def wrapper(*args, **named):
                global count
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return inner(*args, **named)
            return wrapper
        for name in ("open", "fsync", "rename", "unlink", "mkdir", "listdir"):
            setattr(os, name, counted(getattr(os, name)))
        here.train(it, 1)
        it.close()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, here.version_in(folder / str(call)), flush=True)
    if not status:
        break
"""


def test_a_server_killed_at_any_file_operation_comes_back_with_the_old_or_the_new(
    tmp_path: Path,
) -> None:
    """It has version 2 on the disk, and is killed while it writes version 3 and its last one."""
    before = Server(tmp_path / "0")
    train(before, 2)
    before.close()
    arguments = [str(tmp_path), str(Path(__file__).parent)]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], timeout=200, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    codes, versions = [int(code) for code, _ in lines], [int(version) for _, version in lines]
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert codes[-1] == 0
    assert len(codes) > 10
    assert versions == sorted(versions)
    assert set(versions) == {2, 3}


def test_one_flipped_byte_means_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    it = Server(tmp_path)
    train(it, 3)
    it.close()
    newest = sorted(tmp_path.glob("*.safetensors"))[-2:]  # after version 3, and at the end
    for path in newest:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert version_in(tmp_path) == 2
    assert "is damaged" in caplog.text


def test_without_an_intact_checkpoint_the_server_does_not_start_anew_in_silence(
    tmp_path: Path,
) -> None:
    it = Server(tmp_path)
    train(it, 1)
    it.close()
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"none of the .* checkpoints in .* is intact"):
        Server(tmp_path)


def test_training_goes_on_while_the_disk_is_full_and_the_last_checkpoint_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = Server(tmp_path)
    train(it, 1)
    it.save()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files_module.os, "fsync", full)
    train(it, 3)
    assert it.ask("stats")["m"]["version"] == 4
    with pytest.raises(CheckpointError, match="No space left on device"):
        it.close()
    monkeypatch.undo()
    assert "No space left" in caplog.text
    assert version_in(tmp_path) == 1


def test_parameters_that_no_checkpoint_can_hold_are_refused_before_they_are_set(
    tmp_path: Path,
) -> None:
    it = Server(tmp_path)
    tensors = {"w": np.zeros(3), "z": np.zeros(2, np.complex128)}
    with pytest.raises(ValueError, match="for 'odd' has 'z' of dtype complex128, which a checkp"):
        it.ask("create", "odd", tensors, plain(layout_of(tensors)), 1, False, {})
    train(it, 3)
    assert it.ask("stats") == {"m": {"version": 3, "counted": 3}}
    it.close()
    assert version_in(tmp_path) == 3


def test_a_push_that_waited_when_the_server_was_started_again_is_dropped(tmp_path: Path) -> None:
    """Its worker asks what became of it, and would ask for ever."""
    it = Server(tmp_path)
    train(it, 1)
    it.close()
    again = Server(tmp_path)
    dropped = {"counted": False, "version": 1, "reason": "restarted"}
    assert again.ask("outcome", "m", 99, it.term, 5.0).result(0) == dropped
    assert again.ask("outcome", "m", 99, it.term, 5.0).result(0) == dropped
    assert again.ask("stats")["m"] == {"version": 1, "counted": 1, "restarted": 1}
    assert "waits_for" in again.ask("outcome", "m", 100, again.term, 0.0).result(0)
    again.close()


def test_parameters_that_are_set_twice_by_one_call_are_one_version(tmp_path: Path) -> None:
    """The caller repeats a call whose reply it did not get, also from a server started again."""
    tensors = {"w": np.ones(3), "b": np.ones(2)}

    def replace(it: Server, push: int) -> int:
        layout = plain(layout_of(tensors))
        return int(it.ask("create", "m", tensors, layout, push, True, {})["version"])

    it = Server(tmp_path)
    assert replace(it, 7) == 0
    assert replace(it, 7) == 0
    train(it, 1)
    assert replace(it, 8) == 2
    it.close()
    again = Server(tmp_path)
    assert replace(again, 8) == 2
    assert replace(again, 9) == 3
    again.close()
