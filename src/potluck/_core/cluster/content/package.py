"""Packages: files in the form in which they travel between nodes, and by which they are verified.

A package is a manifest (paths, sizes, roots of all files) and is named by the manifest's SHA-256. A
file's *root* names its content: the SHA-256 of the bytes of a file of at most one chunk, else of
the list of its chunks' SHA-256. The *description* of a package is its manifest with these lists. It
is verified by the package's name, so each chunk can be verified as soon as it has arrived, and a
node that sends a wrong one is known by name.

Paths are checked before anything is written: they consist of plain names, below one folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from potluck._core.system import need_posix
from potluck._core.wire.bulk import CHUNK_BYTES, MAX_CHUNKS, MAX_FILES, MAX_MANIFEST, Size
from potluck._core.wire.format import Digest, decoded
from potluck.errors import ConfigurationError, ProtocolError

MAX_CODE_BYTES = 256 << 20
"""Of the files of a code package."""
MAX_PATH = 1024
MAX_PARTS = 32
"""Of a path: folders and the file's name. A manifest with many paths of many folders would take
long to check."""
MAX_DESCRIPTION = 4 + MAX_MANIFEST + 32 * MAX_CHUNKS

_RESERVED = {"con", "prn", "aux", "nul"}
_LIST = b"potluck chunks v1"
_LENGTH = struct.Struct("<I")


class Content(NamedTuple):
    """The content of a file, whatever its path."""

    root: bytes
    size: int

    @property
    def num_chunks(self) -> int:
        """Chunks in it; an empty file has one."""
        return max(1, -(-self.size // CHUNK_BYTES))


class PackageFile(msgspec.Struct, frozen=True, order=True):
    """One file: its path below the folder (with ``/``), its bytes, whether it may be executed."""

    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
    size: Size
    root: Digest
    executable: bool = False

    @property
    def content(self) -> Content:
        """What it holds."""
        return Content(self.root, self.size)


class PackageManifest(msgspec.Struct, frozen=True):
    """All files of a package, by path."""

    files: Annotated[tuple[PackageFile, ...], msgspec.Meta(max_length=MAX_FILES)]

    @property
    def num_bytes(self) -> int:
        """The bytes of all files together."""
        return sum(file.size for file in self.files)


_manifests = msgspec.msgpack.Decoder(PackageManifest)


def root_of(size: int, hashes: Sequence[bytes]) -> bytes:
    """The root of a content of ``size`` bytes whose chunks have these SHA-256."""
    if len(hashes) == 1:
        return hashes[0]
    bound = _LIST + struct.pack("<QQ", size, CHUNK_BYTES)
    return hashlib.sha256(bound + b"".join(hashes)).digest()


def scan(
    file: BinaryIO, on_chunk: Callable[[int], None] = lambda num_bytes: None
) -> tuple[Content, tuple[bytes, ...]]:
    """The content of ``file``, which is read once, chunk by chunk, and its chunks' hashes.
    ``on_chunk(num_bytes)`` is called after each."""
    hashes, size = [], 0
    while chunk := file.read(CHUNK_BYTES):
        hashes.append(hashlib.sha256(chunk).digest())
        size += len(chunk)
        on_chunk(len(chunk))
    hashes = hashes or [hashlib.sha256(b"").digest()]
    return Content(root_of(size, hashes), size), tuple(hashes)


class Package:
    """A package with all that verifies it. Its contents, one after the other, are one sequence of
    bytes; its chunks are numbered through, and chunk ``n`` begins at byte ``offsets[n]``. A content
    that several files have is in it once."""

    def __init__(self, manifest: PackageManifest, lists: Mapping[Content, Sequence[bytes]]) -> None:
        """``lists`` has the chunks' hashes of the contents of several chunks, which are not
        verified here."""
        self.manifest = manifest
        self.contents = tuple(dict.fromkeys(file.content for file in manifest.files))
        data = msgspec.msgpack.encode(manifest)
        self.name = hashlib.sha256(data).digest()
        self.hashes: list[bytes] = []
        self._firsts: dict[Content, int] = {}
        sizes: list[int] = []
        listed = [_LENGTH.pack(len(data)), data]
        for content in self.contents:
            self._firsts[content] = len(self.hashes)
            hashes = lists[content] if content.num_chunks > 1 else (content.root,)
            if content.num_chunks > 1:
                listed += hashes
            self.hashes += hashes
            left = content.size - (len(hashes) - 1) * CHUNK_BYTES
            sizes += [CHUNK_BYTES] * (len(hashes) - 1) + [left]
        self.sizes: NDArray[np.int64] = np.array(sizes, np.int64)
        self.offsets: NDArray[np.int64] = np.concatenate(([0], np.cumsum(self.sizes)))
        self._order = np.array([*self._firsts.values()], np.int64)
        self.description = b"".join(listed)

    @property
    def num_bytes(self) -> int:
        """Of all contents."""
        return int(self.offsets[-1])

    def chunks_of(self, content: Content) -> range:
        """The numbers of the chunks of ``content``."""
        first = self._firsts[content]
        return range(first, first + content.num_chunks)

    def place_of(self, chunk: int) -> tuple[Content, int]:
        """The content that ``chunk`` belongs to, and the chunk's first byte in there."""
        content = self.contents[int(np.searchsorted(self._order, chunk, "right")) - 1]
        return content, (chunk - self._firsts[content]) * CHUNK_BYTES

    def chunks_in(self, begin: int, count: int) -> range:
        """The chunks with the ``count`` bytes from ``begin`` on; empty if there are none such."""
        if not 0 <= begin < begin + count <= self.num_bytes:
            return range(0)
        ends = np.searchsorted(self.offsets, (begin, begin + count - 1), "right")
        return range(int(ends[0]) - 1, int(ends[1]))


UNKNOWN = bytes(32)
"""In the place of the SHA-256 of a chunk."""


def whole_file(sha256: bytes, size: int, hashes: Sequence[bytes] = ()) -> Package:
    """The package of one file of which only the SHA-256 of the whole is known, and maybe what nodes
    declared of its chunks. All nodes give it the same name."""
    file = PackageFile(sha256.hex(), size, sha256)
    lists = {file.content: hashes or (UNKNOWN,) * file.content.num_chunks}
    return Package(PackageManifest((file,)), lists)


def decode_description(data: bytes, name: bytes, *, is_own: bool = False) -> Package:
    """The package ``name`` of its description; ProtocolError if this is of another one, or lists
    of chunks do not belong to the files (not verified if this machine made it: ``is_own``).
    ``check_manifest`` is left to the caller."""
    length = _LENGTH.unpack_from(data)[0] if len(data) >= 4 else 0
    encoded = data[4 : 4 + length]
    if hashlib.sha256(encoded).digest() != name:
        raise ProtocolError("a manifest does not have the hash that it was asked for by")
    manifest = decoded(_manifests, encoded, "a manifest")
    offset, lists = 4 + length, dict[Content, list[bytes]]()
    for content in dict.fromkeys(file.content for file in manifest.files):
        if content.num_chunks > 1:
            end = offset + 32 * content.num_chunks
            hashes = [data[at : at + 32] for at in range(offset, min(end, len(data)), 32)]
            is_right = is_own or root_of(content.size, hashes) == content.root
            if len(data) < end or not is_right:
                raise ProtocolError("a list of chunks is not the one of its file")
            offset, lists[content] = end, hashes
    if offset != len(data):
        raise ProtocolError("a description has more bytes than its files need")
    return Package(manifest, lists)


def scanned(folder: Path, paths: Iterable[str]) -> Package:
    """The package of the files ``paths`` below ``folder``. Reads every file once."""
    files, lists = [], {}
    for path in paths:
        with (folder / path).open("rb") as file:
            executable = bool(os.fstat(file.fileno()).st_mode & 0o100)
            content, hashes = scan(file)
        files.append(PackageFile(path, content.size, content.root, executable))
        lists[content] = hashes
    return Package(PackageManifest(tuple(sorted(files))), lists)


def check_manifest(
    manifest: PackageManifest, *, max_bytes: int = 1 << 50, portable: bool = True
) -> None:
    """ProtocolError if ``manifest``, which another node made, names a path that may not be, or has
    more than ``max_bytes`` in all its files.

    Paths must be relative and made of plain names, all different; if ``portable``, also where case
    does not count.
    """
    seen: set[str] = set()
    for file in manifest.files:
        why = objection_to_path(file.path, portable=portable)
        if why:
            raise ProtocolError(f"a manifest names {file.path!r}: {why}")
        path = file.path.casefold() if portable else file.path
        if path in seen:
            raise ProtocolError(f"a manifest names {file.path!r} twice")
        seen.add(path)
    for path in seen:
        folder = path.rpartition("/")[0]
        while folder and folder not in seen:
            folder = folder.rpartition("/")[0]
        if folder:
            raise ProtocolError(f"a manifest has a file in the place of a folder of {path!r}")
    if manifest.num_bytes > max_bytes:
        raise ProtocolError(f"a package of {manifest.num_bytes} bytes; at most {max_bytes} travel")


def objection_to_path(path: str, *, portable: bool = True) -> str:
    """Why ``path`` may not be written below a folder; empty if it may. ``portable``: on every
    system, else on this one."""
    if not path or len(path) > MAX_PATH:
        return "it is empty or too long"
    if path.startswith("/"):
        return "it is not relative"
    if (portable and ("\\" in path or ":" in path)) or any(map(_is_control, path)):
        return "it holds a character that is special somewhere"
    parts = path.split("/")
    if len(parts) > MAX_PARTS:
        return f"it has more than {MAX_PARTS} parts"
    for part in parts:
        if part in ("", ".", ".."):
            return "it leaves the folder, or goes in circles"
        if len(part.encode("utf-8", "surrogatepass")) > 255:
            return "a name in it is too long"
        if portable and (part != part.rstrip(". ") or part.partition(".")[0].lower() in _RESERVED):
            return "a name in it means something else on another system"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "it is not text"
    return ""


def _is_control(character: str) -> bool:
    return ord(character) < 32 or ord(character) == 127


@contextlib.contextmanager
def open_below(folder: Path, path: str) -> Iterator[BufferedReader]:
    """The regular file ``path`` below ``folder``, opened for reading without following any link: a
    script may have put one, which leads out of its folder, in the place of what was listed.

    FileNotFoundError if there is no such file any more, or a link in its place.
    """
    need_posix("reading a job's files")
    *folders, name = path.split("/")
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for each in folders:
            inner = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.fdopen(os.open(name, flags, dir_fd=directory), "rb")
    except OSError as error:
        is_other = error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
        number = errno.ENOENT if is_other else error.errno
        raise OSError(number, os.strerror(number or 0), str(folder / path)) from None
    finally:
        os.close(directory)
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / path))
        yield file


def read_below(folder: Path, file: PackageFile, offset: int, count: int) -> bytes:
    """Up to ``count`` bytes of ``file`` from ``offset``; the receiver verifies them.

    ConfigurationError if it has another size than when it was scanned.
    """
    with open_below(folder, file.path) as opened:
        if os.fstat(opened.fileno()).st_size != file.size:
            raise ConfigurationError(
                f"{folder / file.path} was changed while it was being sent to other nodes; start "
                "again"
            )
        opened.seek(offset)
        return opened.read(count)
