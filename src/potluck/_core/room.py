"""The memory that this process may take: the limits that would end it, and what is used of each."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from typing import NamedTuple

import psutil


class Room(NamedTuple):
    """Bytes of memory of one kind: the ``limit``, and what is ``used`` of it."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        """What may still be taken."""
        return self.limit - self.used


def own_room() -> Room | None:
    """The tightest limit of this process by itself (RLIMIT_DATA, RLIMIT_AS); None without any.

    An allocation beyond it fails. Cost: some 20 microseconds.
    """
    if sys.platform != "linux":
        return None
    import resource

    size, *_, data, _ = map(int, Path("/proc/self/statm").read_text().split())
    page = resource.getpagesize()
    rooms = [
        Room(limit, pages * page)
        for kind, pages in ((resource.RLIMIT_DATA, data), (resource.RLIMIT_AS, size))
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    return min(rooms, key=lambda room: room.left, default=None)


def host_room(cgroup: Path | None = None) -> Room:
    """The tightest of this process's own limits, its control group's, and the host's memory: what
    this process has and what others have left. ``cgroup`` is the group's folder, by default
    found."""
    mine = int(psutil.Process().memory_info().rss)
    host = Room(mine + psutil.virtual_memory().available, mine)
    rooms = [own_room(), _cgroup_room(cgroup or _own_cgroup(), mine), host]
    return min((room for room in rooms if room is not None), key=lambda room: room.left)


def begin_peak() -> int:
    """The resident memory of this process now, from which ``peak`` begins anew."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it: the peak is then an older one
        Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def peak() -> int:
    """The largest resident memory of this process since ``begin_peak``. On Linux."""
    return _resident("VmHWM")


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def return_at_once() -> None:
    """Have the C library (glibc) return freed memory of a megabyte and more to the system at once.

    By itself it keeps what it may need again, up to 32 MB a piece, in a heap whose free parts count
    for a limit. Costs page faults where large arrays are made and dropped often.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3


def _own_cgroup() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = [line[3:] for line in lines if line.startswith("0::")]
    return Path("/sys/fs/cgroup", own[0].lstrip("/")) if own else None


def _cgroup_room(path: Path | None, mine: int) -> Room | None:
    """What the group's processes may take together, of which ``mine`` are this one's. Pages of
    files do not count: the kernel takes them back."""
    try:
        if path is None:
            return None
        limit, current, stat = (
            (path / name).read_text() for name in ("memory.max", "memory.current", "memory.stat")
        )
        of_files = int(dict(line.split() for line in stat.splitlines() if line)["file"])
        return Room(mine + int(limit) - (int(current) - of_files), mine)
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return None
