"""What a private agent leaves on disk while it runs, and that nothing outlives it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from potluck._core.cluster.home import keyfile
from potluck._core.cluster.home.node_state import (
    AgentRecord,
    PrivateState,
    find_agent,
    private_agents,
)
from potluck.errors import ConfigurationError

KILLED = """
import os, signal, sys
from pathlib import Path
from potluck._core.cluster.home.node_state import PrivateState

PrivateState(Path(sys.argv[1])).listening(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_running_agent_is_found_until_it_ends(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    assert private_agents(tmp_path) == []
    state.listening(4711)
    assert private_agents(tmp_path) == [AgentRecord(os.getpid(), 4711)]
    (file,) = (tmp_path / "run").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    state.close()
    assert private_agents(tmp_path) == []
    assert list((tmp_path / "run").iterdir()) == []
    state.close()


def test_a_private_agent_is_not_the_machines(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    state.listening(4711)
    assert find_agent(tmp_path) is None
    state.close()


def test_the_file_of_a_killed_agent_is_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert private_agents(tmp_path) == []
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": "x"}', b"\xff" * 100_000])
def test_a_damaged_file_is_removed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run" / "7.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert private_agents(tmp_path) == []
    assert not path.exists()


def test_without_a_home_there_are_no_agents(tmp_path: Path) -> None:
    assert private_agents(tmp_path / "nowhere") == []


def test_a_home_that_cannot_be_written_to_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigurationError, match="POTLUCK_HOME chooses another directory"):
        PrivateState(tmp_path).listening(1)


def test_the_stamp_of_a_longer_file_of_the_same_time_differs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    before = os.stat(path)
    stamped = keyfile.stamp(path)
    path.write_bytes(b"longer")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_mtime_ns == before.st_mtime_ns
    assert keyfile.stamp(path) != stamped
