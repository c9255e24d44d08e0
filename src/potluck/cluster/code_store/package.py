"""A code package: a script's folder in the form in which it is sent to other nodes and stored
there.

A package is a manifest (paths, sizes, SHA-256 of each file) and is named by the manifest's own
SHA-256. Files are stored by their hash, so a file that a node already has is not sent again, and an
unpacked package is a folder of its own that no later package changes. Received files are written
only below the store: every path is checked first, consists of plain names, and is no link.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from potluck.errors import ConfigurationError, ProtocolError
from potluck.wire.names import Digest
from potluck.wire.peers import MAX_FILES

IGNORE_FILE = ".potluckignore"
MAX_BYTES = 256 << 20
MAX_MANIFEST = 8 << 20
MAX_PATH = 1024

ALWAYS_IGNORED = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", "venv", ".tox", ".nox"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints"),
    *("node_modules", ".DS_Store", ".idea", ".vscode", "*.egg-info", ".env", ".potluck"),
)
"""Never sent: they are large, made again by themselves, or hold secrets."""

_RESERVED = {"con", "prn", "aux", "nul"}


class PackageFile(msgspec.Struct, frozen=True, order=True):
    """One file: its path below the folder (with ``/``), its bytes, whether it may be executed."""

    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
    sha256: Digest
    executable: bool = False


class PackageManifest(msgspec.Struct, frozen=True):
    """All files of a folder, by path."""

    files: Annotated[tuple[PackageFile, ...], msgspec.Meta(max_length=MAX_FILES)]

    @property
    def num_bytes(self) -> int:
        """The bytes of all files together."""
        return sum(file.size for file in self.files)


def scan(folder: Path) -> PackageManifest:
    """The manifest of ``folder``: all files but those ignored by rule or by ``.potluckignore``.

    That file holds one pattern a line, as of ``fnmatch``: with a ``/`` it is compared with the path
    below the folder, without one with every name on the way. Links and special files don't travel.
    ConfigurationError names the largest files if there are more than ``MAX_BYTES`` or
    ``MAX_FILES`` in it. Reads every file once.
    """
    patterns = (*ALWAYS_IGNORED, *_own_patterns(folder))
    found: list[tuple[str, int, bool]] = []
    total = 0
    for path, status in _walk(folder, "", patterns):
        found.append((path, status.st_size, bool(status.st_mode & 0o100)))
        total += status.st_size
        if len(found) > MAX_FILES:
            raise ConfigurationError(
                f"{folder} holds more than {MAX_FILES} files; it travels to all nodes with the "
                f"script. Move the script to a folder of its own, or name what may stay in "
                f"{folder / IGNORE_FILE}"
            )
    if total > MAX_BYTES:
        largest = sorted(found, key=lambda each: -each[1])[:3]
        named = ", ".join(f"{path} ({size / 2**20:.0f} MiB)" for path, size, _ in largest)
        raise ConfigurationError(
            f"{folder} holds {total / 2**20:.0f} MiB; at most {MAX_BYTES >> 20} travel with a "
            f"script. The largest: {named}. Name what may stay in {folder / IGNORE_FILE}"
        )
    files = []
    for path, _, executable in found:
        digest, size = _hash_file(folder / path)
        files.append(PackageFile(path, size, digest, executable))
    return PackageManifest(tuple(sorted(files)))


def check_script(folder: Path, script: str, manifest: PackageManifest) -> None:
    """ConfigurationError, with the reason and what to do, if ``script`` (its path below ``folder``)
    is not in the ``manifest`` of it: it would be missing on the other nodes."""
    if any(file.path == script for file in manifest.files):
        return
    path = folder / script
    if path.is_symlink():
        why = "it is a link, and links do not travel"
        todo = f"run the file that it leads to: potluck run {path.resolve()}"
    elif pattern := _pattern_against(script, ALWAYS_IGNORED):
        why = f"potluck never sends what is named {pattern!r} (caches, environments, secrets)"
        todo = "give it another name"
    elif pattern := _pattern_against(script, _own_patterns(folder)):
        why = f"the line {pattern!r} of {folder / IGNORE_FILE} says that it stays"
        todo = "change that line"
    else:
        why, todo = "it is not a file of its folder", "run one that is"
    raise ConfigurationError(
        f"the script {path} can't travel to the other nodes: {why}. To run it on the cluster, "
        f"{todo}. Nothing was started"
    )


def encode_manifest(manifest: PackageManifest) -> tuple[bytes, bytes]:
    """The manifest's bytes, and the name of the package: their SHA-256."""
    data = msgspec.msgpack.encode(manifest)
    return data, hashlib.sha256(data).digest()


def decode_manifest(data: bytes, package: bytes) -> PackageManifest:
    """The manifest of ``package``; ProtocolError if it is another, or names a path that may not be.

    Paths must be relative and made of plain names, all different also where case does not count.
    """
    if hashlib.sha256(data).digest() != package:
        raise ProtocolError("a manifest does not have the hash that it was asked for by")
    try:
        manifest = msgspec.msgpack.decode(data, type=PackageManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a manifest: {error}") from error
    seen: set[str] = set()
    for file in manifest.files:
        why = objection_to_path(file.path)
        if why:
            raise ProtocolError(f"a manifest names {file.path!r}: {why}")
        if file.path.casefold() in seen:
            raise ProtocolError(f"a manifest names {file.path!r} twice")
        seen.add(file.path.casefold())
    for path in seen:
        if any(str(parent) in seen for parent in PurePosixPath(path).parents):
            raise ProtocolError(f"a manifest has a file in the place of a folder of {path!r}")
    if manifest.num_bytes > MAX_BYTES:
        raise ProtocolError(f"a package of {manifest.num_bytes} bytes; at most {MAX_BYTES} travel")
    return manifest


def objection_to_path(path: str) -> str:
    """Why ``path`` may not be written below a folder; empty if it may."""
    if not path or len(path) > MAX_PATH:
        return "it is empty or too long"
    if path.startswith("/"):
        return "it is not relative"
    if "\\" in path or ":" in path or any(ord(each) < 32 or ord(each) == 127 for each in path):
        return "it holds a character that is special somewhere"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "it leaves the folder, or goes in circles"
        if len(part.encode("utf-8", "surrogatepass")) > 255:
            return "a name in it is too long"
        if part != part.rstrip(". ") or part.partition(".")[0].lower() in _RESERVED:
            return "a name in it means something else on another system"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "it is not text"
    return ""


class PackageFiles:
    """Files by hash, and unpacked packages, below ``root`` (mode 0700)."""

    def __init__(self, root: Path) -> None:
        self._objects = root / "objects"
        self._packages = root / "packages"
        for folder in (root, self._objects, self._packages):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

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
        path = self._object(sha256)
        if not path.is_file():
            _write_whole(path, data)

    def unpack(self, manifest: PackageManifest, package: bytes) -> Path:
        """The folder that holds exactly the files of ``manifest``, made if it is not there.

        All files must be here (``missing`` is empty). The folder appears whole or not at all.
        """
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

    def _object(self, sha256: bytes) -> Path:
        return self._objects / sha256.hex()


def read_part(folder: Path, file: PackageFile, offset: int, count: int) -> bytes:
    """Up to ``count`` bytes of ``file`` from ``offset``; the receiver checks the whole's hash.

    ConfigurationError if it has another size than when it was scanned.
    """
    path = folder / file.path
    with path.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size != file.size:
            raise ConfigurationError(
                f"{path} was changed while it was being sent to other nodes; start the job again"
            )
        opened.seek(offset)
        return opened.read(count)


def _walk(
    folder: Path, prefix: str, patterns: tuple[str, ...]
) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder / prefix) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for entry in children:
        path = prefix + entry.name
        if _pattern_of(path, entry.name, patterns) or entry.is_symlink():
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder, f"{path}/", patterns)
        elif entry.is_file(follow_symlinks=False):
            why = objection_to_path(path)
            if why:
                raise ConfigurationError(
                    f"{folder / path} can't travel to the other nodes: {why}. Rename it, or name "
                    f"it in {folder / IGNORE_FILE}"
                )
            yield path, entry.stat(follow_symlinks=False)


def _pattern_of(path: str, name: str, patterns: Iterable[str]) -> str:
    """The pattern that leaves ``path`` out, whose last part is ``name``; empty if none does."""
    for pattern in patterns:
        plain = pattern.rstrip("/")
        if fnmatch.fnmatchcase(path if "/" in plain else name, plain.removeprefix("/")):
            return pattern
    return ""


def _pattern_against(path: str, patterns: Iterable[str]) -> str:
    """The same for ``path`` and every folder on the way to it."""
    for each in (*reversed(PurePosixPath(path).parents[:-1]), PurePosixPath(path)):
        if pattern := _pattern_of(str(each), each.name, patterns):
            return pattern
    return ""


def _own_patterns(folder: Path) -> list[str]:
    try:
        text = (folder / IGNORE_FILE).read_text()
    except FileNotFoundError:
        return []
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


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
