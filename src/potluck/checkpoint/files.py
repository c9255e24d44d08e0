"""Files that are there whole and on the disk, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from potluck import system
from potluck.errors import CheckpointError

TEMPORARY = ".writing"
"""What ends the name of a file that is not whole yet."""


def make_directory(path: Path) -> None:
    """Make ``path`` if need be, so that it is still there after a crash."""
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
    """Hold the only writer's lock on ``directory``; yields a descriptor of it."""
    system.need_posix("writing a checkpoint")
    fd = os.open(directory, os.O_RDONLY)
    try:
        try:
            system.lock(fd)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is writing a checkpoint to {directory}"
            ) from error
        yield fd
    finally:
        os.close(fd)


def write(path: Path, data: bytes, directory_fd: int) -> None:
    """Write ``path`` so that, whatever happens, it is there whole and on the disk or not at all."""
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
    """All of ``path``, which should not be longer than ``limit``."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path} has {size} bytes; {limit} are expected")
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
