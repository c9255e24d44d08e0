"""Anonymous memory that processes of one host share: a Linux ``memfd``, opened through ``/proc``.

The memory has no name in any directory, so it is gone with the last process that maps it, however
that process ends. To open it, a process names the maker's process id and descriptor.
"""

from __future__ import annotations

import functools
import mmap
import os
import stat
import sys

from potluck._core.forks import close_in_children

_NAME = "potluck-shm"


def create(size: int) -> tuple[int, mmap.mmap]:
    """New zeroed memory: its descriptor, for others to open, and its mapping here.

    OSError where the system has no memfd or gives none.
    """
    if sys.platform != "linux":
        raise OSError("this system has no memfd")
    import fcntl

    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # Sealed, because a process that shrank the file would kill all others with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
        return fd, _mapped(fd, size)
    except OSError:
        os.close(fd)
        raise


def open_shared(boot: str, pid: int, fd: int, size: int) -> mmap.mmap:
    """Memory of ``size`` bytes that process ``pid`` of boot ``boot`` made as its ``fd``.

    The three come from another process and may be anything: nothing is opened that is not memory
    made by ``create``, and nothing is mapped that could be truncated while it is mapped. OSError or
    ValueError, with the reason, if the memory can't be mapped.
    """
    if sys.platform != "linux" or not boot or boot != boot_id():
        raise ValueError("it runs on another host")
    import fcntl

    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise ValueError("the descriptor is not shared memory (another container?)")
    opened = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise ValueError(f"it has {status.st_size} bytes, {size} were offered")
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise ValueError("it is not sealed against resizing")
        return _mapped(opened, size)
    finally:
        os.close(opened)


def _mapped(fd: int, size: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, size)
    close_in_children(mapped)
    return mapped


def _seals() -> int:
    if sys.platform != "linux":
        return 0
    import fcntl

    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@functools.cache
def boot_id() -> str:
    """A name for this boot of this kernel; empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
