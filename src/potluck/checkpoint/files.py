"""Durable files: written completely and flushed to the disk, or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from potluck import system
from potluck.errors import CheckpointError

TEMPORARY = ".writing"
"""The suffix of a file that is being written."""


def make_directory(path: Path) -> None:
    """Make the directory ``path`` and its parents durably (fsync), unless it exists."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
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
    fd = os.open(directory, os.O_RDONLY)
    try:
        try:
            system.lock(fd)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is writing a checkpoint to {directory}; give each job a "
                "directory of its own"
            ) from error
        yield fd
    finally:
        os.close(fd)


def write(path: Path, data: bytes, directory_fd: int) -> None:
    """Write ``data`` to ``path`` atomically: after a crash the file is complete or absent.

    The data goes to a temporary file, is flushed (fsync) and renamed; ``directory_fd`` is flushed
    after the rename.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
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
    """The bytes of ``path``; CheckpointError if it can't be read or has more than ``limit``
    bytes."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path} has {size} bytes; at most {limit} are expected")
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
