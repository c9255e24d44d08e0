"""The code packages of this node: made from a folder here or fetched, served to other nodes, copied
into a folder for each job to work in. What is no longer needed is bounded.

Below ``root``: ``objects`` and ``packages`` (see ``package.py``), never changed once there;
``origins``, the nodes that packages came from; ``jobs``, one folder for each job, in which its
workers may write. Its name has the job, and a hash of the job, its starter and its package: scripts
of one starter never run from a folder that another one's package filled.

Packages travel over the links of agents: one node serves parts of what it has, another asks for
parts. Each part is at most 256 KiB, so heartbeats on the same link are never far behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from potluck.cluster.code_store.origins import Origins
from potluck.cluster.code_store.package import (
    MAX_MANIFEST,
    PackageFile,
    PackageFiles,
    PackageManifest,
    decode_manifest,
    encode_manifest,
    manifest_of,
    read_part,
    unpacked_manifest,
)
from potluck.cluster.code_store.selection import Selection, check_script, readable, select
from potluck.cluster.home.directory import make_private
from potluck.errors import ConfigurationError, LinkError, PotluckError, ProtocolError
from potluck.wire import peers

KEPT_JOBS = 4
KEPT_PACKAGES = 8
KEPT_BYTES = 1 << 30

Send = Callable[[str, peers.PeerMessage], bool]
"""``send(node, message)``: False without a link to that node."""

_STEP_S = 10.0
_DIGITS = 20
"""Of the hash in a folder's name, 80 bits: nobody makes a second package of the same name."""


class CodeStore:
    """The code packages of one node, ``me``: made, fetched and served. Every linked node may have
    every package. They are in ``home/code_store``; nothing is on disk before the first package.
    ``send`` is as in ``Send``."""

    def __init__(self, home: Path, me: str, send: Send) -> None:
        self._home = home
        self._me = me
        self._root = root = home / "code_store"
        self._origins = Origins(root / "origins")
        self._server = PackageServer(send)
        self._store = PackageFiles(root)
        self._fetcher = PackageFetcher(self._store, send)
        self._in_use: set[str] = set()

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
        too; see ``PackageFetcher.fetch``.

        ConfigurationError if there is no room.
        """
        with self._saying_what_is_wrong():
            await asyncio.to_thread(self._origins.came_from, package, origin)
            folder = await self._fetcher.fetch(node, package)
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
            for name in self._origins.drop(package):
                shutil.rmtree(self._root / "jobs" / name, ignore_errors=True)
            self._store.delete(package)
        return len(packages)

    def open(self, package: bytes, job: str, starter: str) -> Path:
        """The folder in which the workers of ``job`` of ``starter`` run: a copy of ``package`` of
        their own.

        It appears whole or not at all: this process may be killed while it copies, and the job be
        ordered again. ConfigurationError if the package is not here any more or there is no room.
        """
        target = self._root / "jobs" / _folder_name(package, job, starter)
        self._in_use.add(target.name)
        if target.is_dir():
            return target
        source = self._server.folder_of(package)
        if source is None:
            raise ConfigurationError("the script's folder was removed here; start the job again")
        self._origins.used_by(package, target.name)
        temporary = target.with_name(f".{secrets.token_hex(8)}")
        try:
            with self._saying_what_is_wrong():
                make_private(target.parent)
                shutil.copytree(source, temporary)
                os.utime(temporary)  # the copy's age counts, not the package's
                temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

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

    def close(self, folder: Path) -> None:
        """The job of ``folder`` is over. The folder, with what its workers wrote there, is kept
        until ``KEPT_JOBS`` others have ended; so are ``KEPT_PACKAGES`` packages, and
        ``KEPT_BYTES``."""
        self._in_use.discard(folder.name)
        for path in _newest(self._root / "jobs")[KEPT_JOBS:]:
            if path.name not in self._in_use:
                shutil.rmtree(path, ignore_errors=True)
        for path in _newest(self._root / "packages")[KEPT_PACKAGES:]:
            package = bytes.fromhex(path.name) if len(path.name) == 64 else b""
            if not self._in_use:
                self._server.withdraw(package)
                self._origins.drop(package)
                shutil.rmtree(path, ignore_errors=True)
        total = 0
        for path in _newest(self._root / "objects"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                if total > KEPT_BYTES and not self._in_use:
                    path.unlink()


def _folder_name(package: bytes, job: str, starter: str) -> str:
    identity = hashlib.sha3_256(b"\0".join((package, starter.encode(), job.encode())))
    return f"{job}-{identity.hexdigest()[:_DIGITS]}"


def _newest(folder: Path) -> list[Path]:
    """What is in ``folder``, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


class PackageServer:
    """Sends packages of folders on this machine to nodes of the cluster that request them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._offered: dict[bytes, tuple[Path, dict[bytes, PackageFile], bytes]] = {}

    def offer(self, folder: Path, manifest: PackageManifest) -> bytes:
        """Offer the files of ``folder`` in ``manifest`` until ``withdraw``; the package's name."""
        data, package = encode_manifest(manifest)
        files = {file.sha256: file for file in manifest.files}
        self._offered[package] = (folder, files, data)
        return package

    def folder_of(self, package: bytes) -> Path | None:
        """The folder that ``package`` is served from; None if it is not served."""
        found = self._offered.get(package)
        return None if found is None else found[0]

    def withdraw(self, package: bytes) -> None:
        """End the offer of ``package``."""
        self._offered.pop(package, None)

    def answer(self, node: str, wanted: peers.PartWanted) -> None:
        """Send ``node`` the part that it requests, or the reason why there is none."""
        package, file, offset = wanted.package, wanted.file, wanted.offset
        try:
            size, data = self._part(package, file, offset)
        except (PotluckError, OSError) as error:
            self._send(node, peers.NotHere(package, file, str(error)[:4096]))
            return
        self._send(node, peers.PackagePart(package, file, offset, size, data))

    def _part(self, package: bytes, sha256: bytes, offset: int) -> tuple[int, bytes]:
        if package not in self._offered:
            raise ProtocolError("this node has no such package")
        folder, files, data = self._offered[package]
        if not sha256:
            return len(data), data[offset : offset + peers.MAX_PART]
        if sha256 not in files:
            raise ProtocolError("the package has no such file")
        file = files[sha256]
        return file.size, read_part(folder, file, offset, peers.MAX_PART)


class PackageFetcher:
    """Gets packages from other nodes into ``store``. ``arrived`` feeds it their answers."""

    def __init__(self, store: PackageFiles, send: Send) -> None:
        self._store = store
        self._send = send
        self._waiting: dict[tuple[str, bytes, bytes], asyncio.Future[peers.PackagePart]] = {}

    def arrived(self, node: str, message: peers.PackagePart | peers.NotHere) -> None:
        """``node`` answered. What was not asked for is dropped."""
        future = self._waiting.get((node, message.package, message.file))
        if future is None or future.done():
            return
        if isinstance(message, peers.NotHere):
            future.set_exception(LinkError(f"node {node[:12]} can't give it: {message.reason}"))
        else:
            future.set_result(message)

    def lost(self, node: str) -> None:
        """The link to ``node`` ended: so do the transfers from it."""
        for (source, _, _), future in self._waiting.items():
            if source == node and not future.done():
                future.set_exception(LinkError(f"the link to node {node[:12]} ended"))

    async def fetch(self, node: str, package: bytes) -> Path:
        """The folder of ``package``, with what is missing here brought over from ``node``.

        LinkError if it goes away, has no such package, or is silent for 10 s; ProtocolError if what
        it sends is not what was asked for. Sends only files that no earlier package brought.
        """
        data = await self._bytes(node, package, b"", MAX_MANIFEST)
        manifest = decode_manifest(data, package)
        for file in await asyncio.to_thread(self._store.missing, manifest):
            content = await self._bytes(node, package, file.sha256, file.size, exact=True)
            await asyncio.to_thread(self._store.add, content, file.sha256)
        return await asyncio.to_thread(self._store.unpack, manifest, package)

    async def _bytes(
        self, node: str, package: bytes, sha256: bytes, limit: int, *, exact: bool = False
    ) -> bytes:
        data = bytearray()
        while True:
            part = await self._part(node, package, sha256, len(data))
            too_long = part.size > limit or (exact and part.size != limit)
            if part.offset != len(data) or too_long or len(data) + len(part.data) > part.size:
                raise ProtocolError(f"node {node[:12]} sent another part than was asked for")
            data += part.data
            if len(data) == part.size:
                return bytes(data)
            if not part.data:
                raise ProtocolError(f"node {node[:12]} sent an empty part")

    async def _part(
        self, node: str, package: bytes, sha256: bytes, offset: int
    ) -> peers.PackagePart:
        key = (node, package, sha256)
        if key in self._waiting:
            raise LinkError("the same package is being fetched from this node already")
        future: asyncio.Future[peers.PackagePart] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            if not self._send(node, peers.PartWanted(package, sha256, offset)):
                raise LinkError(f"there is no link to node {node[:12]}")
            async with asyncio.timeout(_STEP_S):
                return await future
        except TimeoutError:
            raise LinkError(
                f"node {node[:12]} sent nothing of the script's folder for {_STEP_S:g} s"
            ) from None
        finally:
            del self._waiting[key]
