"""Packages on the links between nodes: one node serves parts of what it has, another asks for
parts. Each part is at most 256 KiB, so heartbeats on the same link are never far behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from potluck._core.cluster.code_store.package import (
    MAX_MANIFEST,
    PackageFile,
    PackageFiles,
    PackageManifest,
    decode_manifest,
    encode_manifest,
    read_part,
)
from potluck._core.wire import peers
from potluck.errors import LinkError, PotluckError, ProtocolError

Send = Callable[[str, peers.PeerMessage], bool]
"""``send(node, message)``: False without a link to that node."""

_STEP_S = 10.0


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


class PartFetcher:
    """Gets manifests and files of packages from other nodes. ``arrived`` feeds it their answers;
    ``what`` is what errors call that which is fetched."""

    def __init__(self, send: Send, what: str) -> None:
        self._send = send
        self._what = what
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

    def lost(self, node: str = "", reason: str = "") -> None:
        """The link to ``node`` (empty: to all) ended: so do the transfers from it."""
        for (source, _, _), future in self._waiting.items():
            if source.startswith(node) and not future.done():
                future.set_exception(LinkError(reason or f"the link to node {source[:12]} ended"))

    async def whole(
        self, node: str, package: bytes, sha256: bytes, limit: int, *, exact: bool = False
    ) -> bytes:
        """The file ``sha256`` of ``package`` (empty: its manifest), of at most ``limit`` bytes, or
        of ``exact``ly so many.

        LinkError if ``node`` goes away, has no such file, or is silent for 10 s; ProtocolError if
        what it sends is not what was asked for. The caller checks the hash.
        """
        data = bytearray()
        async for part in self.parts(node, package, sha256, limit, exact=exact):
            data += part
        return bytes(data)

    async def parts(
        self, node: str, package: bytes, sha256: bytes, limit: int, *, exact: bool = False
    ) -> AsyncIterator[bytes]:
        """The same piece by piece."""
        count = 0
        while True:
            part = await self._part(node, package, sha256, count)
            too_long = part.size > limit or (exact and part.size != limit)
            if part.offset != count or too_long or count + len(part.data) > part.size:
                raise ProtocolError(f"node {node[:12]} sent another part than was asked for")
            count += len(part.data)
            yield part.data
            if count == part.size:
                return
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
                f"node {node[:12]} sent nothing of {self._what} for {_STEP_S:g} s"
            ) from None
        finally:
            del self._waiting[key]


class PackageFetcher(PartFetcher):
    """Gets packages from other nodes into ``store``."""

    def __init__(self, store: PackageFiles, send: Send) -> None:
        super().__init__(send, "the script's folder")
        self._store = store

    async def fetch(self, node: str, package: bytes) -> Path:
        """The folder of ``package``, with what is missing here brought over from ``node``.

        LinkError if it goes away, has no such package, or is silent for 10 s; ProtocolError if what
        it sends is not what was asked for. Sends only files that no earlier package brought.
        """
        data = await self.whole(node, package, b"", MAX_MANIFEST)
        manifest = decode_manifest(data, package)
        for file in await asyncio.to_thread(self._store.missing, manifest):
            content = await self.whole(node, package, file.sha256, file.size, exact=True)
            await asyncio.to_thread(self._store.add, content, file.sha256)
        return await asyncio.to_thread(self._store.unpack, manifest, package)
