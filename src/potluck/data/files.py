"""The files that a pattern, a folder or a list names, and whether one was changed later."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a folder, a pattern such as ``data/train-*.parquet``, or a list of those."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as it was when the data set was made."""

    path: Path
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path, descriptor: int | None = None) -> ListedFile:
        """The file at ``path``, or the one that is open as ``descriptor``. OSError if it can't be
        looked at."""
        return cls(path, _stamp(path if descriptor is None else descriptor))

    def check(self, descriptor: int) -> None:
        """DataError if the open file is not the one that was listed."""
        if _stamp(descriptor) != self.stamp:
            raise DataError(f"{self.path} was changed or replaced after the data set was made")


def _stamp(file: Path | int) -> tuple[int, int, int]:
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


def find_files(paths: Paths, *suffixes: str) -> list[Path]:
    """The files, in the order of the list, those of a folder or a pattern by name. Of a folder the
    files that end in one of ``suffixes``. DataError if an entry names no file."""
    entries = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[Path] = []
    for entry in entries:
        path = Path(entry)
        if path.is_dir():
            here = sorted(each for each in path.iterdir() if each.name.endswith(suffixes))
        elif path.exists():
            here = [path]
        else:
            here = sorted(map(Path, glob.glob(os.fspath(entry), recursive=True)))
        if not here:
            wanted = f" with a file *{' or *'.join(suffixes)}" if path.is_dir() else ""
            raise DataError(f"{entry}: there is no such file, folder{wanted} or match")
        found += here
    if not found:
        raise DataError("no files are given")
    return found
