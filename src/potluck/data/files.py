"""The files that a pattern, a folder or a list names."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from potluck.errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a folder, a pattern such as ``data/train-*.parquet``, or a list of those."""


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
