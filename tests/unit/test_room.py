"""The memory that a process may take, by its limits, its control group's, and the host's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from potluck._core.room import Room, host_room

LIMITED = """
import resource, sys
from potluck._core.room import own_room, return_at_once
assert own_room() is None
return_at_once()
limit = 2 << 30
for name in ("RLIMIT_DATA", "RLIMIT_AS"):
    kind = getattr(resource, name)
    resource.setrlimit(kind, (limit, resource.RLIM_INFINITY))
    before = own_room()
    assert before.limit == limit
    arrays = [bytearray(20 << 20) for _ in range(5)]
    taken = own_room().used - before.used
    assert 100 << 20 <= taken < 110 << 20, taken
    del arrays
    assert own_room().used - before.used < 10 << 20
    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_what_a_process_has_taken_of_its_own_limit() -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_without_a_limit_the_host_bounds_a_process(tmp_path: Path) -> None:
    room = host_room(tmp_path)
    assert 0 < room.used < room.limit <= psutil.virtual_memory().total
    assert room.left == room.limit - room.used


def test_a_control_group_with_less_bounds_it_and_pages_of_files_do_not_count(
    tmp_path: Path,
) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100000\n")
    (tmp_path / "memory.stat").write_text("anon 60000\nfile 40000\nkernel 0\n")
    assert host_room(tmp_path).left > 1_000_000
    (tmp_path / "memory.max").write_text("70000\n")
    room = host_room(tmp_path)
    assert room.left == 10_000
    assert room.used == room.limit - 10_000 > 1_000_000, "of this process alone"
    (tmp_path / "memory.stat").write_text("anon 60000\n")
    assert host_room(tmp_path).left > 1_000_000, "what can't be read bounds nothing"


def test_what_is_left() -> None:
    assert Room(10, 4).left == 6
