"""The code packages of this node: made from a folder here or fetched, served to other nodes, copied
into a folder for each job to work in. What is no longer needed is bounded.

Below ``root``: ``objects`` and ``packages`` (see ``package.py``), never changed once there;
``jobs``, one folder for each job, in which its workers may write.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from potluck.cluster.code_store.package import (
    IGNORE_FILE,
    PackageFiles,
    check_script,
    encode_manifest,
    read_part,
    scan,
)
from potluck.cluster.code_store.transfer import PackageFetcher, PackageServer, Send
from potluck.errors import ConfigurationError, ProtocolError
from potluck.wire import peers

KEPT_JOBS = 4
KEPT_PACKAGES = 8
KEPT_BYTES = 1 << 30


class CodeStore:
    """``send`` as in ``PackageServer``; every linked node may have every package. Nothing is on
    disk before the first package."""

    def __init__(self, root: Path, send: Send) -> None:
        self._root = root
        self._server = PackageServer(send)
        self._send = send
        self._here: dict[bytes, Path] = {}
        self._in_use: set[str] = set()

    @functools.cached_property
    def _store(self) -> PackageFiles:
        return PackageFiles(self._root)

    @functools.cached_property
    def _fetcher(self) -> PackageFetcher:
        return PackageFetcher(self._store, self._send)

    def received(self, node: str, message: peers.PackageMessage) -> None:
        """``node`` asks for a part, or sends one."""
        if isinstance(message, peers.PartWanted):
            self._server.answer(node, message)
        else:
            self._fetcher.arrived(node, message)

    def lost(self, node: str) -> None:
        """The link to ``node`` ended."""
        self._fetcher.lost(node)

    def has(self, package: bytes) -> bool:
        """Whether it is here, and served."""
        return package in self._here

    async def take_in(self, folder: Path, script: str) -> bytes:
        """Make a package of ``folder`` and serve it; its name. Copies every file that is new.

        ConfigurationError as for ``scan``, if ``script`` (its path below ``folder``) does not
        travel, if a file can't be read or is being changed meanwhile, or if there is no room.
        """
        return await asyncio.to_thread(self._copy, folder, script)

    def _copy(self, folder: Path, script: str) -> bytes:
        with self._saying_what_is_wrong(folder):
            manifest = scan(folder)
            check_script(folder, script, manifest)
            _, package = encode_manifest(manifest)
            for file in self._store.missing(manifest):
                data = bytearray()
                while part := read_part(folder, file, len(data), peers.MAX_PART):
                    data += part
                self._store.add(bytes(data), file.sha256)
            self._serve(self._store.unpack(manifest, package), package)
        return package

    async def fetch(self, node: str, package: bytes) -> None:
        """Bring ``package`` over from ``node``, and serve it, too; see ``PackageFetcher.fetch``.

        ConfigurationError if there is no room.
        """
        with self._saying_what_is_wrong():
            folder = await self._fetcher.fetch(node, package)
            await asyncio.to_thread(self._serve, folder, package)

    def _serve(self, folder: Path, package: bytes) -> None:
        if self._server.offer(folder) != package:
            raise ProtocolError(f"{folder} was changed; remove it")
        os.utime(folder)  # the one used last is kept longest
        self._here[package] = folder

    def open(self, package: bytes, job: str) -> Path:
        """The folder in which the workers of ``job`` run: a copy of ``package`` of their own.

        It appears whole or not at all: this process may be killed while it copies, and the job be
        ordered again. ConfigurationError if the package is not here any more or there is no room.
        """
        target = self._root / "jobs" / job
        self._in_use.add(job)
        if target.is_dir():
            return target
        source = self._here.get(package)
        if source is None:
            raise ConfigurationError("the script's folder was removed here; start the job again")
        temporary = target.with_name(f".{secrets.token_hex(8)}")
        try:
            with self._saying_what_is_wrong():
                target.parent.mkdir(mode=0o700, exist_ok=True)
                shutil.copytree(source, temporary)
                os.utime(temporary)  # the copy's age counts, not the package's
                temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    @contextlib.contextmanager
    def _saying_what_is_wrong(self, folder: Path | None = None) -> Iterator[None]:
        """ConfigurationError with what to do for a file of ``folder`` that can't be read, or a
        store here that can't be written."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, shutil.Error):  # holds what went wrong with each file, and where
                reason = str(error.args[0][0][-1]).partition(": '")[0]
            named = Path(error.filename) if isinstance(error.filename, str) else None
            if folder is not None and named is not None and named.is_relative_to(folder):
                raise ConfigurationError(
                    f"{named} can't be read, and would travel to the other nodes with the script: "
                    f"{reason}. Make it readable, or name it in {folder / IGNORE_FILE}"
                ) from error
            raise ConfigurationError(
                f"the script's folder can't be kept in {self._root}: {reason}. Make room there, or "
                "set POTLUCK_HOME to a directory on another disk"
            ) from error

    def close(self, job: str) -> None:
        """``job`` is over. Its folder, with what its workers wrote there, is kept until
        ``KEPT_JOBS`` others have ended; so are ``KEPT_PACKAGES`` packages, and ``KEPT_BYTES``."""
        self._in_use.discard(job)
        for path in _newest(self._root / "jobs")[KEPT_JOBS:]:
            if path.name not in self._in_use:
                shutil.rmtree(path, ignore_errors=True)
        for path in _newest(self._root / "packages")[KEPT_PACKAGES:]:
            package = bytes.fromhex(path.name) if len(path.name) == 64 else b""
            if not self._in_use:
                self._server.withdraw(package)
                self._here.pop(package, None)
                shutil.rmtree(path, ignore_errors=True)
        total = 0
        for path in _newest(self._root / "objects"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                if total > KEPT_BYTES and not self._in_use:
                    path.unlink()


def _newest(folder: Path) -> list[Path]:
    """What is in ``folder``, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]
