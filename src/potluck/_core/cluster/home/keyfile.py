"""Private files and folders: files that only their owner can read, created once even by concurrent
processes, in folders that only their owner may change."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from potluck._core import system
from potluck._core.system import need_posix
from potluck.errors import IdentityError


def make_private(folder: Path) -> Path:
    """``folder``, made with mode 0700 if it is missing; folders on the way to it as well.

    IdentityError as for ``check_private``; OSError if it can't be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """IdentityError, with what to do, if users other than this one and root may change what is in
    ``folder``; nothing if there is no such folder.

    Who may write there can put other keys, bans and programs in the place of this node's, whatever
    the modes of the files. OpenSSH refuses such folders of keys, too.
    """
    need_posix("a folder that only its owner can change")
    try:
        status = os.stat(folder)
    except OSError:
        return  # the file that is looked for there is not there either
    if status.st_uid not in (os.geteuid(), 0):
        raise IdentityError(
            f"{folder} belongs to user {status.st_uid}, who could replace this node's keys there; "
            "point POTLUCK_HOME at a folder of your own"
        )
    if status.st_mode & 0o022:
        raise IdentityError(
            f"{folder} can be changed by other users (mode {stat.S_IMODE(status.st_mode):04o}), "
            f"who could replace this node's keys there; run: chmod go-w {folder}"
        )


_MAX_BYTES = 1 << 20


def load_or_create(path: Path, what: str, make: Callable[[], bytes]) -> bytes:
    """The content of ``path``; a missing file is first created with the content ``make()``.

    The file is created atomically with mode 0600; processes that create it at the same time all
    get the content of the first. ``what`` names the content in errors. IdentityError if other users
    may read the file or change its folder, if it belongs to another user, or can't be read or
    written.
    """
    try:
        return read_private(path, what)
    except FileNotFoundError:
        pass
    _create(path, what, make())
    try:
        return read_private(path, what)
    except FileNotFoundError as error:
        raise IdentityError(f"{what} {path} vanished while it was being made") from error


def replace_private(path: Path, what: str, data: bytes) -> None:
    """Write a file that may exist: readers find the old content or the new, never a part of it.

    IdentityError if it can't be written.
    """
    try:
        _put(path, data, os.replace)
    except OSError as error:
        raise _cannot_create(path, what, error) from error


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Keep other processes from changing a private file meanwhile, by a lock on ``path`` beside it,
    which is made if it is missing. IdentityError if it can't be; ``what`` names the file."""
    try:
        make_private(path.parent)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise IdentityError(f"{what} in {path.parent} can't be changed: {error}") from error
    try:
        system.lock(lock, wait=True)
        yield
    finally:
        os.close(lock)


Stamp = tuple[int, int, int, int, int]

UNKNOWN: Stamp = (-1, -1, -1, -1, -1)
"""The stamp of a file whose status the system does not give."""


def stamp(path: Path | str) -> Stamp | None:
    """What changes whenever the file at ``path`` does; None if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError:
        return UNKNOWN
    return (
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_mode,
        status.st_size,
    )


def read_private(path: Path, what: str, *, max_bytes: int = _MAX_BYTES) -> bytes:
    """The content of ``path``.

    FileNotFoundError if there is no file; IdentityError if other users may read or change it or its
    folder, if it belongs to another user, is longer than ``max_bytes``, or can't be read.
    """
    system.need_posix("a file that only its owner can read")
    check_private(path.parent)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IdentityError(
            f"{what} {path} can't be opened: {error.strerror}. potluck keeps its keys in "
            f"{path.parent}; set POTLUCK_HOME to a directory that you can read and write"
        ) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"{what} {path} is not a file")
        if status.st_uid not in (os.geteuid(), 0):
            raise IdentityError(
                f"{what} {path} belongs to user {status.st_uid}, not to you; "
                "move it away, or point POTLUCK_HOME at a directory of your own"
            )
        if status.st_mode & 0o077:
            raise IdentityError(
                f"{what} {path} can be read or changed by other users "
                f"(mode {stat.S_IMODE(status.st_mode):04o}); run: chmod 600 {path}"
            )
        if status.st_size > max_bytes:
            raise IdentityError(
                f"{what} {path} has {status.st_size} bytes; at most {max_bytes} are read"
            )
        return os.read(fd, max_bytes)
    except OSError as error:
        raise IdentityError(f"{what} {path} can't be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _create(path: Path, what: str, data: bytes) -> bool:
    """Whether this call created the file (False: another process did)."""
    try:
        # Unlike rename, link never replaces: the first process wins, all others read its file.
        _put(path, data, os.link)
    except FileExistsError as error:
        if path.exists():
            return False
        raise _cannot_create(path, what, error) from error
    except OSError as error:
        raise _cannot_create(path, what, error) from error
    return True


def _put(path: Path, data: bytes, place: Callable[[Path, Path], None]) -> None:
    """Write ``data`` to a temporary file and sync it, then ``place`` the file at ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    make_private(path.parent)
    try:
        _write(temporary, data)
        place(temporary, path)
        _sync_directory(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def _cannot_create(path: Path, what: str, error: OSError) -> IdentityError:
    return IdentityError(
        f"{what} {path} can't be made: {error.strerror or error}. potluck keeps its keys in "
        f"{path.parent}; set POTLUCK_HOME to a directory that can be written"
    )


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
