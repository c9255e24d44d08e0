"""The files of one namespace on this machine's disk, by their content.

Below ``root``: ``objects``, whole verified files, never changed once there; ``partial``, files of
several chunks that are being fetched; ``packages``, descriptions, by name, whose times say when
they were used last.

A process may be killed at any time. An object appears whole, by a rename; of a partial file each
chunk is verified again before it is trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from potluck._core import system
from potluck._core.cluster.content.package import (
    Content,
    Package,
    decode_description,
    objection_to_path,
    scan,
)
from potluck._core.cluster.home.keyfile import make_private
from potluck._core.wire.bulk import CHUNK_BYTES
from potluck.errors import ProtocolError

_ABANDONED_S = 3600.0
_WHOLE_NS, _CHANGED_NS = 946_684_800 * 10**9, 946_684_801 * 10**9
"""The times of objects that were verified; no write gives a file one of them. They are years ago,
in whole seconds, which all file systems have."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A package on the disk: the bytes of its files, and when it was used last (Unix time)."""

    package: bytes
    num_bytes: int
    used: float


class Shelf:
    """The files below ``root`` (mode 0700), which is made with the first of them. May be used from
    several threads. ``is_durable``: small files, too, outlast a loss of power. ``is_linked``: jobs
    see links to them, and may have changed one."""

    def __init__(self, root: Path, *, is_durable: bool = False, is_linked: bool = False) -> None:
        self._root = root
        self._objects, self._partial = root / "objects", root / "partial"
        self._packages = root / "packages"
        self._is_durable = is_durable
        self._is_linked = is_linked
        self._busy = threading.RLock()

    # Contents.

    def has(self, content: Content) -> bool:
        """Whether all of it is here. Blocks, for as long as reading it takes, if jobs see links to
        it and it was written to."""
        try:
            with self.path_of(content).open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size != content.size or status.st_mtime_ns == _CHANGED_NS:
                    return False
                if status.st_mtime_ns == _WHOLE_NS or not self._is_linked:
                    return True
                found, _ = scan(file)
                is_same = os.fstat(file.fileno()).st_mtime_ns == status.st_mtime_ns
                is_whole = found == content and is_same
                os.utime(file.fileno(), ns=(_WHOLE_NS if is_whole else _CHANGED_NS,) * 2)
                return is_whole
        except OSError:
            return False

    def path_of(self, content: Content) -> Path:
        """The file with this content, if it is here; nobody may write to it."""
        return self._objects / _name(content)

    def present(self, package: Package) -> NDArray[np.bool_]:
        """By chunk of ``package``, whether it is here. Reads what there is of partial files."""
        found = np.zeros(len(package.hashes), bool)
        for content in package.contents:
            chunks = package.chunks_of(content)
            if self.has(content):
                found[chunks.start : chunks.stop] = True
            elif content.num_chunks > 1:
                with contextlib.suppress(FileNotFoundError), self._part(content).open("rb") as file:
                    for chunk in chunks:
                        data = file.read(CHUNK_BYTES)
                        found[chunk] = hashlib.sha256(data).digest() == package.hashes[chunk]
        return found

    def read(self, content: Content, offset: int, count: int) -> bytes:
        """Bytes of a content that is here at least in these; OSError if it is not (any more)."""
        path = self.path_of(content) if self.has(content) else self._part(content)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            if not self.has(content):
                raise
            # It has become whole since.
            file = self.path_of(content).open("rb")
        with file:
            file.seek(offset)
            return file.read(count)

    def write(self, content: Content, offset: int, data: bytes | memoryview) -> None:
        """Write a chunk, which the caller has verified."""
        if content.num_chunks == 1:
            self._make()
            self._write_whole(self.path_of(content), data, self._is_durable)
            self._mark_whole(content)
            return
        self._make()
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(self._part(content), flags, 0o600), "r+b") as file:
            file.seek(offset)
            file.write(data)

    def hash(self, content: Content) -> bytes:
        """The SHA-256 of all of a content of several chunks that were all written."""
        with self._part(content).open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def finish(self, content: Content) -> None:
        """All chunks of a content of several were written: it counts from now on."""
        part = self._part(content)
        with self._busy:
            if self.has(content):  # by the fetch of another package
                part.unlink(missing_ok=True)
            else:
                os.utime(part, ns=(_WHOLE_NS, _WHOLE_NS))
                _flush(part)
                part.rename(self.path_of(content))

    def add(self, source: BinaryIO, content: Content) -> None:
        """Copy ``source``; ProtocolError if it does not have this content (any more)."""
        self._make()
        temporary = self._temporary()
        try:
            with open(_new(temporary, 0o600), "w+b") as file:
                shutil.copyfileobj(source, file, CHUNK_BYTES)
                file.seek(0)
                found, _ = scan(file)
            if found != content:
                raise ProtocolError("it was changed while it was being copied; start again")
            if content.num_chunks > 1 or self._is_durable:
                _flush(temporary)
            temporary.rename(self.path_of(content))
            self._mark_whole(content)
        finally:
            temporary.unlink(missing_ok=True)

    # Packages.

    def package(self, name: bytes) -> Package | None:
        """The description of the package ``name``, whose files may be missing; None if it is not
        here."""
        try:
            data = (self._packages / name.hex()).read_bytes()
            return decode_description(data, name, is_own=True)
        except (FileNotFoundError, ProtocolError):
            return None

    def keep(self, package: Package, *, anew: bool = False) -> None:
        """Remember ``package``, and that it is used now: from now on its files stay. Look for them
        after this. ``anew``: with hashes that may differ."""
        self._make()
        path = self._packages / package.name.hex()
        with self._busy:
            try:
                if anew:
                    raise FileNotFoundError
                os.utime(path)
            except FileNotFoundError:
                self._write_whole(path, package.description, not anew)

    def unpack(self, package: Package, target: Path) -> None:
        """Make the folder ``target`` with copies of the files of ``package``, which may be changed
        without harm. All files must be here."""
        target.mkdir(mode=0o700)
        for file in package.manifest.files:
            if why := objection_to_path(file.path):
                raise ProtocolError(f"a package names {file.path!r}: {why}")
            path = target / file.path
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (
                self.path_of(file.content).open("rb") as source,
                open(_new(path, 0o700 if file.executable else 0o600), "wb") as copy,
            ):
                if not system.clone(source.fileno(), copy.fileno()):
                    shutil.copyfileobj(source, copy, CHUNK_BYTES)

    def packages(self) -> list[Kept]:
        """What is kept, the newest first."""
        found = []
        for path in _files(self._packages):
            with contextlib.suppress(ValueError, OSError):
                package = self.package(bytes.fromhex(path.name))
                if package is not None:
                    used = path.stat().st_mtime
                    found.append(Kept(package.name, package.num_bytes, used))
        return sorted(found, key=lambda kept: -kept.used)

    def forget(self, name: bytes) -> None:
        """Delete a package; its files stay until ``sweep``."""
        (self._packages / name.hex()).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete the files that are in no package."""
        with self._busy:
            # Before the packages: what is written meanwhile is of one that was kept before it.
            files = [*_files(self._objects), *_files(self._partial)]
            named = {
                _name(content)
                for kept in self.packages()
                if (package := self.package(kept.package)) is not None
                for content in package.contents
            }
            for path in files:
                if path.name not in named and not _is_being_written(path):
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, *, shared: bool) -> Iterator[bool]:
        """Whether this process alone (``shared``: with others that do) uses what is kept. Who uses
        it waits for the end of a deletion; who deletes, in another process than the agent, does not
        wait: False."""
        self._make()
        with (self._root / "lock").open("ab") as file:
            try:
                system.lock(file.fileno(), shared=shared, wait=shared)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _part(self, content: Content) -> Path:
        return self._partial / _name(content)

    def _temporary(self) -> Path:
        return self._partial / f".{secrets.token_hex(8)}"

    def _make(self) -> None:
        for folder in (self._root, self._objects, self._partial, self._packages):
            make_private(folder)

    def _mark_whole(self, content: Content) -> None:
        """``content`` was verified. A temporary file is never marked: by that time ``sweep`` takes
        it for one that nobody writes any more."""
        with contextlib.suppress(FileNotFoundError):  # its package is deleted already
            os.utime(self.path_of(content), ns=(_WHOLE_NS, _WHOLE_NS))

    def _write_whole(self, path: Path, data: bytes | memoryview, is_durable: bool) -> None:
        temporary = self._temporary()
        try:
            with open(_new(temporary, 0o600), "wb") as file:
                file.write(data)
            if is_durable:
                _flush(temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)


def _name(content: Content) -> str:
    return f"{content.root.hex()}-{content.size}"


def _is_being_written(path: Path) -> bool:
    """Whether some thread may be about to give a temporary file its name."""
    with contextlib.suppress(OSError):
        return path.name.startswith(".") and time.time() - path.stat().st_mtime < _ABANDONED_S
    return True


def _files(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from folder.iterdir()


def _new(path: Path, mode: int) -> int:
    """A file that this call makes, never through a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, mode)


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
