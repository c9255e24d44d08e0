"""The package of a folder of data. What was read once is read again only if it has changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from potluck._core.cluster.content.package import (
    Package,
    PackageFile,
    PackageManifest,
    objection_to_path,
    open_below,
    scan,
)
from potluck._core.cluster.data_sets import outlines
from potluck._core.cluster.home.keyfile import replace_private
from potluck._core.printable import plain
from potluck._core.wire.bulk import MAX_CHUNKS, MAX_FILES, Size
from potluck._core.wire.format import Digest
from potluck.errors import ConfigurationError

Stamp = tuple[int, int, int]
"""Inode, size and time of the last change (ns) of a file."""

_SETTLED_NS = 2 * 10**9
"""A file that was written so shortly before it was read may change without another time."""


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """What was read of a file."""

    stamp: Stamp
    size: Size
    root: Digest
    hashes: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_CHUNKS)]
    outline: outlines.Parts = ()


@dataclass(frozen=True, slots=True)
class Scanned:
    """The ``package`` of a folder. ``stamps`` of its files, by path, as they were read; of these
    ``changed`` had another content when the folder was read before. ``outline`` is that of its
    shards, as a package that lies beside the cache; None if it has none."""

    package: Package
    stamps: dict[str, Stamp]
    changed: tuple[str, ...]
    outline: Package | None


class Stopped(Exception):
    """The scan was asked to stop."""


def scan_folder(
    folder: Path,
    cache: Path,
    *,
    on_progress: Callable[[int, int], None] = lambda so_far, total: None,
    stop: threading.Event | None = None,
) -> Scanned:
    """Read the files of ``folder`` that are new or changed since ``cache`` was written, which is
    written again. Blocks. ``on_progress(so_far, total)``: bytes read, of those to read, before each
    file and after each chunk; ``stop`` ends it there, with Stopped.

    ConfigurationError, naming the file and with what to do, if the folder can't travel.
    """
    found = dict(_files(folder))
    if not found:
        raise ConfigurationError(f"{folder} has no files: there is no data in it")
    before, known = _read_cache(cache), dict[str, _Known]()
    to_read = {p: s for p, s in found.items() if p not in before or before[p].stamp != s}
    total, so_far, began = sum(each[1] for each in to_read.values()), 0, time.time_ns()
    files, lists = [], {}

    def on_chunk(num_bytes: int) -> None:
        nonlocal so_far
        so_far += num_bytes
        if stop is not None and stop.is_set():
            raise Stopped
        on_progress(so_far, total)

    for path, stamp in sorted(found.items()):
        if path in to_read:
            on_chunk(0)
            known[path] = _scanned(folder, path, stamp, on_chunk)
        else:
            known[path] = before[path]
        file = PackageFile(path, known[path].size, known[path].root)
        files.append(file)
        lists[file.content] = known[path].hashes
    if sum(content.num_chunks for content in lists) > MAX_CHUNKS:
        raise ConfigurationError(f"{folder} has more than {MAX_CHUNKS} chunks of 4 MiB")
    settled = {p: each for p, each in known.items() if each.stamp[2] < began - _SETTLED_NS}
    replace_private(cache, "what was read of a data set", msgspec.msgpack.encode(settled))
    changed = tuple(p for p in before if p not in known or known[p].root != before[p].root)
    outline = None
    if data := outlines.encoded({path: each.outline for path, each in known.items()}):
        beside = cache.with_name(f"{cache.name}.outline")
        replace_private(beside, "the outline of a data set", data)
        outline = outlines.package_of(beside.name, data)
    return Scanned(Package(PackageManifest(tuple(files)), lists), found, changed, outline)


def cache_name(folder: Path) -> str:
    """The name of the cache of ``folder``."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]


def changed_file(folder: Path, stamps: dict[str, Stamp]) -> str:
    """The first file of ``folder`` that is not as it was when it was read; empty if all are. Looks
    at each file, and reads none."""
    for path, stamp in stamps.items():
        try:
            status = os.lstat(folder / path)
        except OSError:
            return path
        if stamp_of(status) != stamp:
            return path
    return ""


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file with this status."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _scanned(folder: Path, path: str, stamp: Stamp, on_chunk: Callable[[int], None]) -> _Known:
    try:
        with open_below(folder, path) as file:
            content, hashes = scan(file, on_chunk)
            outline = outlines.outline_of(path, file, content.size)
            status = os.fstat(file.fileno())
    except OSError as error:
        where = plain(str(folder / path))
        raise ConfigurationError(f"{where} can't be read: {error.strerror or error}") from error
    if stamp_of(status) != stamp or content.size != stamp[1]:
        raise ConfigurationError(
            f"{plain(str(folder / path))} was changed while it was being read: start again when "
            "nothing writes to the data set any more"
        )
    return _Known(stamp, content.size, content.root, hashes, outline)


def _files(folder: Path) -> Iterator[tuple[str, Stamp]]:
    """The files below ``folder``, with their stamps."""
    waiting, count = [""], 0
    while waiting:
        below = waiting.pop()
        try:
            with os.scandir(folder / below) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            where = plain(str(folder / below))
            raise ConfigurationError(f"{where} can't be read: {error.strerror or error}") from error
        for entry in listed:
            path = f"{below}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                waiting.append(f"{path}/")
                continue
            count += 1
            why = objection_to_path(path)
            if stat.S_ISLNK(status.st_mode):
                why = (
                    "it is a link, and may lead out of the folder; put the file itself there, or "
                    "give the folder that it leads to"
                )
            elif not stat.S_ISREG(status.st_mode):
                why = "it is no file"
            if why:
                where = plain(str(folder / path))
                raise ConfigurationError(f"{where} can't travel with the data set: {why}")
            if count > MAX_FILES:
                raise ConfigurationError(
                    f"{folder} has more than {MAX_FILES} files: put them into archives "
                    "(WebDataset) or tables (Parquet), which also travel one by one"
                )
            yield path, stamp_of(status)


def _read_cache(cache: Path) -> dict[str, _Known]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.msgpack.decode(cache.read_bytes(), type=dict[str, _Known])
    return {}
