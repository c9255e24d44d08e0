"""Packages on the links between nodes: one node serves parts of what it has, another asks for
parts. Each part is at most 256 KiB, so heartbeats on the same link are never far behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol, TypeVar

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
from potluck.errors import ProtocolError

_STEP_S = 10.0

T = TypeVar("T", bound=peers.ResponseContent)


class Ask(Protocol):
    """``ask(node, request, kind, timeout_s=...)``: the response of ``node``, of type ``kind``.
    Errors as for ``links.peers.Requests.ask``."""

    async def __call__(
        self, node: str, request: peers.RequestContent, kind: type[T], *, timeout_s: float | None
    ) -> T: ...


class PackageServer:
    """Packages of folders on this machine that nodes of the cluster may request."""

    def __init__(self) -> None:
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

    def part(self, wanted: peers.PartRequest) -> peers.PackagePart:
        """The requested part; ProtocolError if there is none, ConfigurationError or OSError if it
        can't be read."""
        if wanted.package not in self._offered:
            raise ProtocolError("this node has no such package")
        folder, files, data = self._offered[wanted.package]
        if not wanted.file:
            part = data[wanted.offset : wanted.offset + peers.MAX_PART]
            return peers.PackagePart(len(data), part)
        if wanted.file not in files:
            raise ProtocolError("the package has no such file")
        file = files[wanted.file]
        return peers.PackagePart(file.size, read_part(folder, file, wanted.offset, peers.MAX_PART))


async def fetch_parts(
    ask: Ask, node: str, package: bytes, sha256: bytes, limit: int, *, exact: bool = False
) -> AsyncIterator[bytes]:
    """The file ``sha256`` of ``package`` (empty: its manifest) at ``node``, of at most ``limit``
    bytes, or of ``exact``ly so many, piece by piece.

    LinkError if ``node`` goes away, has no such file, or is silent for 10 s; ProtocolError if
    what it sends is not what was asked for. The caller checks the hash.
    """
    count = 0
    while True:
        request = peers.PartRequest(package, sha256, count)
        part = await ask(node, request, peers.PackagePart, timeout_s=_STEP_S)
        too_long = part.size > limit or (exact and part.size != limit)
        if too_long or count + len(part.data) > part.size:
            raise ProtocolError(f"node {node[:12]} sent another part than was asked for")
        count += len(part.data)
        yield part.data
        if count == part.size:
            return
        if not part.data:
            raise ProtocolError(f"node {node[:12]} sent an empty part")


async def fetch_whole(
    ask: Ask, node: str, package: bytes, sha256: bytes, limit: int, *, exact: bool = False
) -> bytes:
    """The same in one piece."""
    data = bytearray()
    async for part in fetch_parts(ask, node, package, sha256, limit, exact=exact):
        data += part
    return bytes(data)


async def fetch_package(ask: Ask, store: PackageFiles, node: str, package: bytes) -> Path:
    """The folder of ``package`` in ``store``, with what is missing there brought from ``node``.

    Errors as for ``fetch_parts``. Sends only files that no earlier package brought.
    """
    data = await fetch_whole(ask, node, package, b"", MAX_MANIFEST)
    manifest = decode_manifest(data, package)
    for file in await asyncio.to_thread(store.missing, manifest):
        content = await fetch_whole(ask, node, package, file.sha256, file.size, exact=True)
        await asyncio.to_thread(store.add, content, file.sha256)
    return await asyncio.to_thread(store.unpack, manifest, package)
