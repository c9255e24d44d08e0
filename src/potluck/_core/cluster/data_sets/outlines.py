"""The outline of shards: of each file the few bytes that say how many samples it has.

A file of the same size with these bytes in their places, and zeros between them, can be listed by a
reader before the shard itself is there: the footer of a Parquet file, the header of an array, the
headers in a tar archive. Files of which there is no outline are no shards.
"""

from __future__ import annotations

import io
import os
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from potluck._core.cluster.content.package import Package, PackageFile, PackageManifest, scan
from potluck._core.wire.bulk import MAX_FILES, Size
from potluck._core.wire.format import decoded
from potluck.errors import ProtocolError

MAX_OUTLINE = 64 << 20
_MAX_FILE = 16 << 20
_Span = tuple[int, int]

Part = tuple[Size, bytes]
"""Where bytes are in a file, and the bytes."""
Parts = tuple[Part, ...]


class _Outline(msgspec.Struct, frozen=True, array_like=True):
    path: str
    parts: Parts


_outlines = msgspec.msgpack.Decoder(
    Annotated[tuple[_Outline, ...], msgspec.Meta(max_length=MAX_FILES)]
)


def outline_of(path: str, file: BinaryIO, size: int) -> Parts:
    """The outline of ``file``, of ``size`` bytes, which ``path`` names; empty if it is no shard, is
    damaged, or has an outline of more than 16 MiB. Blocks."""
    listing = _KINDS.get(os.path.splitext(path)[1])
    if listing is None:
        return ()
    try:
        spans = listing(file, size)
        if sum(count for _, count in spans) > _MAX_FILE:
            return ()
        return tuple((at, _read(file, at, count)) for at, count in spans)
    except (ValueError, struct.error, tarfile.TarError, OverflowError):
        return ()


def encoded(outlines: Mapping[str, Parts]) -> bytes:
    """The outline of a folder, by path; empty if it has no shards. What is beyond 64 MiB is left
    out: those files are no shards."""
    found = [_Outline(path, parts) for path, parts in sorted(outlines.items()) if parts]
    while len(data := msgspec.msgpack.encode(found)) > MAX_OUTLINE:
        del found[len(found) // 2 :]
    return data if found else b""


def package_of(path: str, data: bytes) -> Package:
    """The package of one file, ``path``, by which the outline of a folder travels."""
    content, hashes = scan(io.BytesIO(data))
    manifest = PackageManifest((PackageFile(path, content.size, content.root),))
    return Package(manifest, {content: hashes})


def lay_out(data: bytes, manifest: PackageManifest, folder: Path) -> frozenset[str]:
    """Make the outlines of the shards of ``manifest`` below ``folder``; their paths. ProtocolError
    if ``data`` is no outline of these files; OSError. Blocks."""
    sizes = {file.path: file.size for file in manifest.files}
    found = decoded(_outlines, data, "an outline")
    for each in found:
        size = sizes.get(each.path, -1)
        if size < 0 or any(at + len(part) > size for at, part in each.parts):
            raise ProtocolError("an outline is not of the files of its data set")
        path = folder / each.path
        if path.exists():  # a script may read it
            continue
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
            for at, part in each.parts:
                file.seek(at)
                file.write(part)
    return frozenset(each.path for each in found)


def _parquet(file: BinaryIO, size: int) -> list[_Span]:
    length, magic = struct.unpack("<I4s", _read(file, size - 8, 8))
    if magic != b"PAR1":
        raise ValueError
    return [(0, 4), (size - 8 - length, length + 8)]


def _npy(file: BinaryIO, size: int) -> list[_Span]:
    head = _read(file, 0, 12)
    if head[:6] != b"\x93NUMPY":
        raise ValueError
    length = struct.unpack_from("<H", head, 8)[0] + 10
    return [(0, length if head[6] == 1 else struct.unpack_from("<I", head, 8)[0] + 12)]


def _tar(file: BinaryIO, size: int) -> list[_Span]:
    spans, at = [], 0
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            spans.append((at, member.offset_data - at))
            at = archive.offset
    if at + tarfile.BLOCKSIZE > size or _read(file, at, tarfile.BLOCKSIZE).strip(b"\0"):
        raise ValueError
    return spans


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)  # ValueError if it is negative
    data = file.read(count)
    if len(data) != count:
        raise ValueError
    return data


_KINDS: dict[str, Callable[[BinaryIO, int], list[_Span]]] = {
    ".parquet": _parquet,
    ".npy": _npy,
    ".tar": _tar,
}
