"""The file by which a running agent is found, and which holds its epoch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from potluck.cluster.home.runfile import RunFile, running_agents
from potluck.errors import ConfigurationError


def create(home: Path, job: str = "job") -> RunFile:
    return RunFile.create(
        home, job=job, node="n", host="127.0.0.1", port=1, script="s.py", started=1.0
    )


def test_a_running_agent_is_found_until_it_removes_its_file(tmp_path: Path) -> None:
    file = create(tmp_path)
    assert running_agents(tmp_path) == [file.record]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    file.remove()
    assert running_agents(tmp_path) == []
    file.remove()


def test_an_epoch_is_on_disk_before_it_is_used(tmp_path: Path) -> None:
    file = create(tmp_path)
    file.persist_epoch(3)
    (record,) = running_agents(tmp_path)
    assert record.epoch == 3
    with pytest.raises(AssertionError, match="used twice"):
        file.persist_epoch(3)
    assert [path.name for path in file.path.parent.iterdir()] == [f"{os.getpid()}.json"]


@pytest.mark.parametrize("change", [{"pid": 2**22 + 5}, {"process_started": 12.0}])
def test_the_file_of_a_process_that_is_gone_is_removed(tmp_path: Path, change: dict) -> None:
    file = create(tmp_path)
    file.path.write_bytes(msgspec.json.encode(msgspec.structs.replace(file.record, **change)))
    assert running_agents(tmp_path) == []
    assert not file.path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": "x"}', b"\xff" * 100_000])
def test_a_damaged_file_is_removed(tmp_path: Path, content: bytes) -> None:
    path = create(tmp_path).path
    path.write_bytes(content)
    assert running_agents(tmp_path) == []
    assert not path.exists()


def test_without_a_home_there_are_no_agents(tmp_path: Path) -> None:
    assert running_agents(tmp_path / "nowhere") == []


def test_a_home_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("")
    with pytest.raises(ConfigurationError, match="POTLUCK_HOME chooses another directory"):
        create(home)
