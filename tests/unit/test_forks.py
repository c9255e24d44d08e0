"""What a forked child closes, and what it is refused."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck._core import forks
from potluck.checkpoint import files
from potluck.errors import CheckpointError, ForkedProcess

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

CHILD_S = 60


def in_child(check: Callable[[], bool]) -> bool:
    """What ``check()`` says in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests
        pid = os.fork()
    if pid == 0:
        import signal

        signal.alarm(CHILD_S)
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def is_refused(owner: forks.Owner, parent: int) -> bool:
    with pytest.raises(ForkedProcess, match=f"this thing belongs to process {parent}, and this is"):
        owner.check()
    return not owner.is_here


def test_an_owner_is_refused_in_children_and_theirs_and_nowhere_else() -> None:
    owner, me = forks.Owner("this thing"), os.getpid()
    owner.check()
    assert in_child(lambda: is_refused(owner, me))
    assert in_child(lambda: in_child(lambda: is_refused(owner, me)))
    assert in_child(lambda: forks.Owner("this thing").is_here)
    owner.check()
    assert owner.is_here


def test_a_connection_ends_with_its_process_though_a_child_lives() -> None:
    with forks.opening() as mine:
        near, far = (mine(each) for each in socket.socketpair())
    number = near.fileno()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)  # lives until the parent lets go
        os._exit(0 if near.fileno() == number else 1)
    os.close(reader)
    near.close()
    far.settimeout(CHILD_S)
    assert far.recv(1) == b""
    far.close()
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_a_child_opens_at_a_number_of_a_closed_socket_is_left_alone(tmp_path: Path) -> None:
    with forks.opening() as mine:
        sock = mine(socket.socket())
    number = sock.fileno()
    sock.close()
    path = tmp_path / "file"
    path.write_text("kept")
    fd = os.open(path, os.O_RDONLY)
    assert fd == number, "the test needs that number"
    assert in_child(lambda: os.read(fd, 4) == b"kept")
    os.close(fd)


def test_a_lock_on_checkpoints_ends_with_its_writer_though_a_child_lives(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with files.locked(tmp_path):
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        with pytest.raises(CheckpointError), files.locked(tmp_path):
            pass
    with files.locked(tmp_path):
        pass
    os.close(reader)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


SCRIPT = """
import os, sys
from potluck._core import forks

def said(): print("called in", "the parent" if os.getpid() == parent else "the child", flush=True)

parent = os.getpid()
forks.at_exit(said)
pid = os.fork()
if pid:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
else:
    forks.at_exit(lambda: print("the child's own", flush=True))
sys.exit(0)
"""


def test_a_child_calls_at_exit_what_is_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=CHILD_S
    )
    assert (done.stdout, done.stderr) == ("the child's own\ncalled in the parent\n", "")


def test_not_at_exit_undoes_at_exit() -> None:
    called: list[int] = []

    def function() -> None:
        called.append(1)

    forks.at_exit(function)
    forks.not_at_exit(function)
    forks.not_at_exit(function)
    atexit.unregister(function)
    assert function not in forks._at_exit
