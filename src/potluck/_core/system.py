"""Differences between operating systems: signals, locks, waiting, processors,
accounts.

Linux has all features. macOS lacks shared memory between ranks (memfd), and the signal at a
parent's death. Windows also lacks the signals, file locks and file owners that jobs and keys need:
there `need_posix` ends a command with a clear error. `make check` type-checks the tree for all
three systems; docs/portability.md lists the tests that were run on each.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from potluck.errors import ConfigurationError

if sys.platform == "win32":

    def need_posix(what: str) -> NoReturn:
        """ConfigurationError on Windows, where ``what`` can't work; nothing on other systems."""
        raise not_on_windows(what)

    # Linux's numbers, for messages between nodes. Windows can't send these signals.
    SIGHUP, SIGKILL, SIGUSR1, SIGPIPE, SIGCONT, SIGSTOP = 1, 9, 10, 13, 18, 19
else:

    def need_posix(what: str) -> None:
        """ConfigurationError on Windows, where ``what`` can't work; nothing on other systems."""

    SIGHUP = signal.SIGHUP
    SIGKILL = signal.SIGKILL
    SIGUSR1 = signal.SIGUSR1
    SIGPIPE = signal.SIGPIPE
    SIGCONT = signal.SIGCONT
    SIGSTOP = signal.SIGSTOP

_FICLONE = 0x40049409


def not_on_windows(what: str) -> ConfigurationError:
    """The error of ``need_posix``."""
    return ConfigurationError(
        f"{what} does not work on Windows: potluck needs POSIX signals, file locks and file owners "
        "there. Run potluck under WSL 2 instead: https://learn.microsoft.com/windows/wsl"
    )


def heard(*numbers: int) -> tuple[int, ...]:
    """Those of these signals that this process was not started to ignore: ``nohup`` has SIGHUP
    ignored, a shell SIGINT for what it runs in the background. Only these may get a handler."""
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


def is_root() -> bool:
    """Whether this process may do anything on this machine."""
    return sys.platform != "win32" and os.geteuid() == 0


def account_home() -> Path:
    """The home folder of this process's user as the system's accounts have it, whatever HOME
    says."""
    if sys.platform == "win32":
        return Path.home()
    import pwd

    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:  # a container's user may have no account
        return Path.home()


def user_name() -> str:
    """The user of this process, for people."""
    if sys.platform == "win32":
        return getpass.getuser()
    import pwd

    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container may know no name for its user
        name = f"user {os.geteuid()}"
    return name if name == "root" or not is_root() else f"{name} (root)"


def forget_typed(fd: int) -> None:
    """Discard what was typed on the terminal ``fd`` and not read yet, where the system can."""
    if sys.platform != "win32":
        import termios

        termios.tcflush(fd, termios.TCIFLUSH)


def has_terminal() -> bool:
    """Whether a person can answer: input and output are a terminal, and this process is in its
    foreground."""
    if sys.platform == "win32":
        return False
    try:
        return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def usable_cpus() -> frozenset[int]:
    """The processors that this process may use; never empty."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def processor_name() -> str:
    """The processor's model, as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for text in cpuinfo.read_text(errors="replace").splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def software_name() -> str:
    """The system and its C library, by which mathematical functions are rounded."""
    return " ".join((platform.system(), *platform.libc_ver())).strip()


def lock(fd: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file or directory until ``fd`` is closed.

    BlockingIOError if another process holds the lock and this call must not ``wait``.
    """
    need_posix("locking a file")
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(fd, kind if wait else kind | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """Let go of what ``lock`` took, also where a forked child has a copy of ``fd``."""
    need_posix("locking a file")
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_UN)


def clone(source: int, copy: int) -> bool:
    """Let the empty file ``copy`` share the blocks of ``source`` until one of the two is written
    to. False if the file system can't."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.ioctl(copy, _FICLONE, source)
    except OSError:
        return False
    return True


def wait_ready(fd: int, *, write: bool, timeout_s: float) -> bool:
    """Wait until the socket ``fd`` can be written (or read), or has failed. False after
    ``timeout_s``."""
    if sys.platform == "win32":  # a refused connection shows in the third list
        return any(select.select([] if write else [fd], [fd] if write else [], [fd], timeout_s))
    poll = select.poll()
    poll.register(fd, select.POLLOUT if write else select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def wait_readable(fd: int) -> Callable[[float], bool]:
    """``wait_ready`` for reading, as a function of ``timeout_s``, for many waits on one socket."""
    if sys.platform == "win32":
        return lambda timeout_s: wait_ready(fd, write=False, timeout_s=timeout_s)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return lambda timeout_s: bool(poll.poll(timeout_s * 1000))


def wait_for_exit(pid: int) -> None:
    """Block until the child ``pid`` has ended, without reaping it, so that its id is not reused."""
    need_posix("waiting for a process")
    if sys.platform == "darwin":  # Python has os.waitid there from 3.13 on
        ended = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        with contextlib.closing(select.kqueue()) as queue:
            queue.control([ended], 1)  # also returns, with ESRCH, if the child has ended before
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
