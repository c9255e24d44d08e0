"""A code package: a script's folder in the form in which it is sent to other nodes and stored
there.

A package is a manifest (paths, sizes, SHA-256 of each file) and is named by the manifest's own
SHA-256. Files are stored by their hash, so a file that a node already has is not sent again, and an
unpacked package is a folder of its own that no later package changes. Received files are written
only below the store: every path is checked first, consists of plain names, and is no link.

On the links between nodes one node serves parts of what it has, another asks for parts. Each part
is at most 256 KiB, so heartbeats on the same link are never far behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import msgspec

from potluck._core.cluster.home.keyfile import make_private
from potluck._core.system import need_posix
from potluck._core.wire import peers
from potluck._core.wire.format import Digest, decoded
from potluck._core.wire.peers import MAX_FILES, Offset
from potluck.errors import ConfigurationError, ProtocolError

MAX_BYTES = 256 << 20
MAX_MANIFEST = 8 << 20
MAX_PATH = 1024
MAX_PARTS = 32
"""Of a path: folders and the file's name. A manifest with many paths of many folders would take
long to check."""

_RESERVED = {"con", "prn", "aux", "nul"}


class PackageFile(msgspec.Struct, frozen=True, order=True):
    """One file: its path below the folder (with ``/``), its bytes, whether it may be executed."""

    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
    size: Offset
    sha256: Digest
    executable: bool = False


class PackageManifest(msgspec.Struct, frozen=True):
    """All files of a folder, by path."""

    files: Annotated[tuple[PackageFile, ...], msgspec.Meta(max_length=MAX_FILES)]

    @property
    def num_bytes(self) -> int:
        """The bytes of all files together."""
        return sum(file.size for file in self.files)


_manifests = msgspec.msgpack.Decoder(PackageManifest)


def manifest_of(folder: Path, paths: Iterable[str]) -> PackageManifest:
    """The manifest of the files ``paths`` below ``folder``. Reads every file once."""
    files = []
    for path in paths:
        executable = bool((folder / path).stat().st_mode & 0o100)
        digest, size = _hash_file(folder / path)
        files.append(PackageFile(path, size, digest, executable))
    return PackageManifest(tuple(sorted(files)))


def unpacked_manifest(package: Path) -> PackageManifest:
    """The manifest of the unpacked ``package``: of all files in it."""
    files = (path for path in package.rglob("*") if path.is_file() and not path.is_symlink())
    return manifest_of(package, (path.relative_to(package).as_posix() for path in files))


def encode_manifest(manifest: PackageManifest) -> tuple[bytes, bytes]:
    """The manifest's bytes, and the name of the package: their SHA-256."""
    data = msgspec.msgpack.encode(manifest)
    return data, hashlib.sha256(data).digest()


def decode_manifest(
    data: bytes, package: bytes, *, max_bytes: int = MAX_BYTES, portable: bool = True
) -> PackageManifest:
    """The manifest of ``package``; ProtocolError if it is another, names a path that may not be, or
    has more than ``max_bytes`` in all its files.

    Paths must be relative and made of plain names, all different; if ``portable``, also where case
    does not count.
    """
    if hashlib.sha256(data).digest() != package:
        raise ProtocolError("a manifest does not have the hash that it was asked for by")
    manifest = decoded(_manifests, data, "a manifest")
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
    return manifest


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


class PackageFiles:
    """Files by hash, and unpacked packages, below ``root`` (mode 0700), which is made with the
    first of them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._objects = root / "objects"
        self._packages = root / "packages"

    def has(self, sha256: bytes) -> bool:
        """Whether the file is here."""
        return self._object(sha256).is_file()

    def missing(self, manifest: PackageManifest) -> list[PackageFile]:
        """The files of ``manifest`` that are not here, each content once."""
        wanted = {file.sha256: file for file in manifest.files if not self.has(file.sha256)}
        return list(wanted.values())

    def add(self, data: bytes, sha256: bytes) -> None:
        """Keep a file's content; ProtocolError if it does not have this hash."""
        if hashlib.sha256(data).digest() != sha256:
            raise ProtocolError(
                "a file does not have the hash that it was asked for by: it was changed while it "
                "was being sent; start the job again"
            )
        self._make_folders()
        path = self._object(sha256)
        if not path.is_file():
            _write_whole(path, data)

    def unpack(self, manifest: PackageManifest, package: bytes) -> Path:
        """The folder that holds exactly the files of ``manifest``, made if it is not there.

        All files must be here (``missing`` is empty). The folder appears whole or not at all.
        """
        self._make_folders()
        target = self._packages / package.hex()
        if target.is_dir():
            return target
        temporary = self._packages / f".{package.hex()[:16]}.{secrets.token_hex(8)}"
        temporary.mkdir(mode=0o700)
        try:
            for file in manifest.files:
                why = objection_to_path(file.path)
                if why:
                    raise ProtocolError(f"a package names {file.path!r}: {why}")
                path = temporary / file.path
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                data = self._object(file.sha256).read_bytes()
                _write_new(path, data, 0o700 if file.executable else 0o600)
            try:
                os.rename(temporary, target)
            except OSError:
                if not target.is_dir():  # else another process was first
                    raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(temporary)
        return target

    def delete(self, package: bytes) -> None:
        """Delete the unpacked ``package``, and the files of it by hash."""
        target = self._packages / package.hex()
        if not target.is_dir():
            return
        for file in unpacked_manifest(target).files:
            self._object(file.sha256).unlink(missing_ok=True)
        shutil.rmtree(target)

    def _make_folders(self) -> None:
        for folder in (self._root, self._objects, self._packages):
            make_private(folder)

    def _object(self, sha256: bytes) -> Path:
        return self._objects / sha256.hex()


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


def read_part(folder: Path, file: PackageFile, offset: int, count: int) -> bytes:
    """Up to ``count`` bytes of ``file`` from ``offset``; the receiver checks the whole's hash.

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


def _hash_file(path: Path) -> tuple[bytes, int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        return digest, file.tell()


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    try:
        _write_new(temporary, data, 0o600)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Only a file that this call makes, never through a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, flags, mode), "wb") as file:
        file.write(data)


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
