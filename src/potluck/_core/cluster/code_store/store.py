"""The code packages of this node: made from a folder here or fetched, served to other nodes, copied
into a folder for each job to work in. What is no longer needed is bounded.

Below ``root``: ``objects`` and ``packages`` (see ``package.py``), never changed once there;
``origins``, the nodes that packages came from, so that a node's packages can be deleted; ``jobs``,
one folder for each job, in which its workers may write (``job_folders.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from potluck._core.cluster.code_store import job_folders
from potluck._core.cluster.code_store.package import (
    Ask,
    PackageFiles,
    PackageServer,
    encode_manifest,
    fetch_package,
    manifest_of,
    read_part,
    unpacked_manifest,
)
from potluck._core.cluster.code_store.selection import Selection, check_script, readable, select
from potluck._core.cluster.home.keyfile import replace_private
from potluck._core.wire import peers
from potluck.errors import ConfigurationError, ProtocolError


class _Origin(msgspec.Struct, frozen=True):
    nodes: tuple[str, ...] = ()


class Origins:
    """The records in ``folder``, which is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def came_from(self, package: bytes, node: str) -> None:
        """``package`` is a folder of ``node``. Recorded before the package is stored."""
        before = self._read(package)
        self._write(package, _Origin(tuple({*before.nodes, node})))

    def drop(self, package: bytes) -> None:
        """Forget ``package``."""
        self._path(package).unlink(missing_ok=True)

    def disown(self, node: str) -> list[bytes]:
        """Take ``node`` out of all records; the packages that are nobody's any more."""
        left = []
        for path in self._folder.glob("[0-9a-f]*"):
            package = bytes.fromhex(path.name)
            before = self._read(package)
            if node in before.nodes:
                nodes = tuple(each for each in before.nodes if each != node)
                self._write(package, _Origin(nodes))
                if not nodes:
                    left.append(package)
        return left

    def _path(self, package: bytes) -> Path:
        return self._folder / package.hex()

    def _read(self, package: bytes) -> _Origin:
        try:
            return msgspec.json.decode(self._path(package).read_bytes(), type=_Origin)
        except (FileNotFoundError, msgspec.MsgspecError):
            return _Origin()

    def _write(self, package: bytes, origin: _Origin) -> None:
        data = msgspec.json.encode(origin)
        replace_private(self._path(package), "where a script's folder came from", data)


KEPT_PACKAGES = 8
KEPT_BYTES = 1 << 30


class CodeStore:
    """The code packages of one node, ``me``: made, fetched and served. Every linked node may have
    every package. They are in ``home/code_store``; nothing is on disk before the first package.
    It asks other nodes by ``ask``."""

    def __init__(
        self,
        home: Path,
        me: str,
        ask: Ask,
        *,
        keeping: job_folders.Keeping = job_folders.KEEPING,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``keeping`` and ``on_note`` are as for ``JobFolders``."""
        self._home = home
        self._me = me
        self._root = root = home / "code_store"
        self._origins = Origins(root / "origins")
        self._ask = ask
        self._server = PackageServer()
        self._store = PackageFiles(root)
        self.folders = job_folders.JobFolders(root / "jobs", keeping=keeping, on_note=on_note)
        self._results = job_folders.ResultsServer(me, self.folders)
        self._in_use: set[Path] = set()

    def answer(
        self, node: str, request: peers.PartRequest | peers.ResultsRequest
    ) -> peers.ResponseContent | Awaitable[peers.ResponseContent]:
        """The response to ``node``."""
        if isinstance(request, peers.ResultsRequest):
            return self._results.answer(node, request)
        if self.has(request.package):
            return self._server.part(request)
        return self._results.part(node, request)

    def has(self, package: bytes) -> bool:
        """Whether ``package`` is here, and served."""
        return self._server.folder_of(package) is not None

    async def take_in(
        self, folder: Path, script: str, include: Sequence[str]
    ) -> tuple[bytes, Selection]:
        """Make a package of ``folder`` and serve it; its name, and what is in it. Copies every file
        that is new.

        ConfigurationError as for ``select``, if ``script`` (its path below ``folder``) does not
        travel, if a file can't be read or is being changed meanwhile, or if there is no room.
        """
        return await asyncio.to_thread(self._copy, folder, script, include)

    def _copy(self, folder: Path, script: str, include: Sequence[str]) -> tuple[bytes, Selection]:
        with self._saying_what_is_wrong():
            selection = select(folder, self._home, include)
            check_script(folder, script, selection)
            with readable(folder):
                manifest = manifest_of(folder, (file.path for file in selection.files))
            _, package = encode_manifest(manifest)
            self._origins.came_from(package, self._me)
            for file in self._store.missing(manifest):
                data = bytearray()
                with readable(folder):
                    while part := read_part(folder, file, len(data), peers.MAX_PART):
                        data += part
                self._store.add(bytes(data), file.sha256)
            self._serve(self._store.unpack(manifest, package), package)
        return package, selection

    async def fetch(self, node: str, package: bytes, origin: str) -> None:
        """Bring ``package``, a folder of the node ``origin``, over from ``node``, and serve it,
        too; see ``fetch_package``.

        ConfigurationError if there is no room.
        """
        with self._saying_what_is_wrong():
            await asyncio.to_thread(self._origins.came_from, package, origin)
            folder = await fetch_package(self._ask, self._store, node, package)
            await asyncio.to_thread(self._serve, folder, package)

    def _serve(self, folder: Path, package: bytes) -> None:
        if self._server.offer(folder, unpacked_manifest(folder)) != package:
            raise ProtocolError(f"{folder} was changed; remove it")
        os.utime(folder)  # the one used last is kept longest

    async def delete_from(self, node: str) -> int:
        """Delete the packages that came from ``node`` and no other, with the folders of their jobs;
        how many packages. The jobs must be over here. Files that other packages have, too, are
        fetched again when they are next needed."""
        return await asyncio.to_thread(self._delete_from, node)

    def _delete_from(self, node: str) -> int:
        packages = self._origins.disown(node)
        for package in packages:
            self._server.withdraw(package)
            self._origins.drop(package)
            self._store.delete(package)
        for folder in self.folders.all():
            if folder.record.package in {package.hex() for package in packages}:
                self.folders.remove(folder)
        return len(packages)

    def open(self, record: job_folders.Record) -> job_folders.JobFolder:
        """The folder of a job, with a copy of its package. It appears whole or not at all: this
        process may be killed while it copies, and the job be ordered again. ConfigurationError if
        the package is not here any more or there is no room."""
        package = bytes.fromhex(record.package)
        source = self._server.folder_of(package) if package else None
        with self._saying_what_is_wrong():
            folder = self.folders.open(record, source)
        self._in_use.add(folder.path)
        return folder

    @contextlib.contextmanager
    def _saying_what_is_wrong(self) -> Iterator[None]:
        """ConfigurationError with what to do for a store that can't be written."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, shutil.Error):  # holds what went wrong with each file, and where
                reason = str(error.args[0][0][-1]).partition(": '")[0]
            raise ConfigurationError(
                f"the script's folder can't be kept in {self._root}: {reason}. Make room there, or "
                "set POTLUCK_HOME to a directory on another disk"
            ) from error

    def close(self, folder: job_folders.JobFolder) -> None:
        """The job of ``folder`` is over. What is kept of old ones: ``JobFolders.prune`` says it of
        their folders; of packages ``KEPT_PACKAGES`` are, and ``KEPT_BYTES`` of their files."""
        self._in_use.discard(folder.path)
        self.folders.close(folder)
        for path in job_folders.newest(self._root / "packages")[KEPT_PACKAGES:]:
            package = bytes.fromhex(path.name) if len(path.name) == 64 else b""
            if not self._in_use:
                self._server.withdraw(package)
                self._origins.drop(package)
                shutil.rmtree(path, ignore_errors=True)
        total = 0
        for path in job_folders.newest(self._root / "objects"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                if total > KEPT_BYTES and not self._in_use:
                    path.unlink()
