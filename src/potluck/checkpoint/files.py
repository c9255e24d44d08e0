"""Durable files: written completely and flushed to the disk, or absent.

Only their owner can read them. A directory may belong to others as well (``/tmp``, a shared disk),
so temporary names are random and must be new, and a link in place of a file is not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from potluck._core import forks, system
from potluck.errors import CheckpointError

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.writing\Z")


def final_name(name: str) -> str:
    """The name that the file ``name`` has, or will have once it is complete."""
    return _TEMPORARY.sub("", name)


def make_directory(path: Path) -> None:
    """Make the directory ``path`` and its parents durably (fsync), for this user alone, unless it
    exists."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(0o700, exist_ok=True)
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold the exclusive lock of writers on ``directory``; yields its file descriptor.

    CheckpointError if another process holds the lock.
    """
    system.need_posix("writing a checkpoint")
    with forks.opened(directory, os.O_RDONLY) as fd:
        try:
            system.lock(fd)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is writing a checkpoint to {directory}; give each job a "
                "directory of its own"
            ) from error
        try:
            yield fd
        finally:
            system.unlock(fd)


def write(path: Path, data: bytes, directory_fd: int) -> None:
    """Write ``data`` to ``path`` atomically: after a crash the file is complete or absent.

    The data goes to a temporary file, is flushed (fsync) and renamed; ``directory_fd`` is flushed
    after the rename.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.writing")
    file = open(temporary, "xb", opener=_open)  # noqa: SIM115 (what it removes below is its own)
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        os.fsync(directory_fd)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read(path: Path, limit: int) -> bytes:
    """The bytes of ``path``; CheckpointError if it can't be read, is no file, or has more than
    ``limit`` bytes."""
    try:
        with open(path, "rb", opener=_open) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a file")
            if status.st_size > limit:
                raise CheckpointError(
                    f"{path} has {status.st_size} bytes; at most {limit} are expected"
                )
            return file.read(limit)
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno == errno.ELOOP:
            what = "it is a link, and links are not followed; put the file itself there"
        raise CheckpointError(f"{path} can't be read: {what}") from error


def _open(path: str, flags: int) -> int:
    # Without O_NONBLOCK a named pipe in place of a file would block for ever. Windows has neither.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags, 0o600)
