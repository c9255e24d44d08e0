"""A control group (cgroup v2) of Linux for all workers of this machine.

The kernel then holds the processes of all workers together to a number of processors and an amount
of memory, whatever they do. A control group can be made where this process may write and where the
controllers ``cpu`` and ``memory`` are on for children, or can be switched on, which the kernel
allows in groups without processes of their own: as root; in a systemd service with
``Delegate=yes``; mostly not in a container.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from potluck._core.cluster.sharing.limits import Limits

_NEEDED = {"cpu", "memory"}
_PERIOD_US = 100_000


class Cgroup:
    """The control group at ``path``, made by ``make``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_kills = self._kills()

    def was_out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the group, since the last call, because the group
        had used up its memory."""
        before, self._num_kills = self._num_kills, self._kills()
        return self._num_kills > before

    def close(self) -> None:
        """Remove the group, whose processes have ended."""
        with contextlib.suppress(OSError):  # the kernel keeps it while a process is still ending
            self.path.rmdir()

    def _kills(self) -> int:
        for line in (self.path / "memory.events").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
        return 0


def make(limits: Limits, proc: Path = Path("/proc/self")) -> Cgroup | str:
    """A control group with these limits for processes that this one will start; or why there is
    none. ``proc`` is this process's folder in /proc."""
    try:
        parent = find_parent(proc)
        if isinstance(parent, str):
            return parent
        _switch_on(parent)
        path = parent / f"potluck-{os.getpid()}"
        path.mkdir()
        try:
            _limit(path, limits)
            return Cgroup(path)
        except BaseException:
            path.rmdir()
            raise
    except OSError as error:
        return f"no control group can be made: {error.strerror or error}"


def find_parent(
    proc: Path = Path("/proc/self"), may_write: Callable[[Path], bool] | None = None
) -> Path | str:
    """The nearest group of or above this process in which a group for workers can be made, or why
    there is none. To move a process, the kernel asks for the right to write in a group above
    both."""
    may_write = may_write or (lambda path: os.access(path, os.W_OK))
    mounted = _mounted(proc / "mountinfo")
    own = [line[3:] for line in _lines(proc / "cgroup") if line.startswith("0::")]
    if mounted is None or not own:
        return "this system has no control groups of version 2"
    root = mounted.resolve()
    path = (root / own[0].lstrip("/")).resolve()
    if not path.is_relative_to(root):  # this process is in a group outside of what is mounted
        return "the control group of this process is not visible here"
    if not _words(root / "cgroup.controllers") >= _NEEDED:
        return "the controllers cpu and memory of control groups (version 2) are not in use here"
    for group in (path, *path.parents[: len(path.relative_to(root).parts)]):
        may = may_write(group) and may_write(group / "cgroup.procs")
        if may and (_is_on(group) or _can_be_on(group)):
            return group
    return "this user may not make control groups here; a systemd service may, with Delegate=yes"


def _is_on(group: Path) -> bool:
    """Whether children of ``group`` have the controllers."""
    return _words(group / "cgroup.subtree_control") >= _NEEDED


def _can_be_on(group: Path) -> bool:
    """Whether the controllers can be switched on for children: no other process is in ``group``."""
    others = _words(group / "cgroup.procs") - {str(os.getpid())}
    return _words(group / "cgroup.controllers") >= _NEEDED and not others


def _switch_on(group: Path) -> None:
    """Give children of ``group`` the controllers. If this process is in it, it moves to a child."""
    if _is_on(group):
        return
    if _words(group / "cgroup.procs"):
        (group / "potluck-agent").mkdir(exist_ok=True)
        (group / "potluck-agent" / "cgroup.procs").write_text("0")
    (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(_NEEDED)))


def _limit(path: Path, limits: Limits) -> None:
    if limits.cpus:
        (path / "cpu.max").write_text(f"{limits.cpus * _PERIOD_US} {_PERIOD_US}")
    if limits.memory_bytes:
        (path / "memory.max").write_text(str(limits.memory_bytes))
        swap = path / "memory.swap.max"
        if swap.exists():  # a kernel without swap has none
            swap.write_text("0")


def _mounted(mountinfo: Path) -> Path | None:
    """Where the control groups of version 2 are mounted. A line has a `` - `` before the file
    system's type, and the place as its fifth word (proc(5))."""
    for line in _lines(mountinfo):
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    return None


def _words(path: Path) -> set[str]:
    return set(" ".join(_lines(path)).split())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
