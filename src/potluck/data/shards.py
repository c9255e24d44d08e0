"""``ShardedDataset``: samples that are stored in pieces, each of which is read as a whole."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.data.shared import SharedFolder, arrived
from potluck.errors import DataError

Samples = list[Any] | dict[str, NDArray[Any]]
"""Some samples: a list of them, or an array for each column, with samples along the first axis."""


class Deferred:
    """A sample that is not read yet. It is read where it is transformed: in a loader's worker, if
    there is one."""

    __slots__ = ()

    def read(self) -> Any:
        """The sample. DataError if it can't be read."""
        raise NotImplementedError


class Shard(Protocol):
    """A shard that has been read."""

    def take(self, rows: NDArray[np.int64]) -> Samples:
        """The samples at ``rows`` of the shard, int64, in this order."""
        ...


class ShardedDataset:
    """A data set in shards, for ``ElasticLoop``: its base, for formats of your own.

        class Lines(ShardedDataset):
            def __init__(self, files):
                self.files = files
                super().__init__([count_lines(file) for file in files])

            def read(self, shard):
                return self.files[shard].read_text().splitlines()

    ``sizes`` are the numbers of samples of the shards. They must be known before the training: a
    sample that is not counted can't be trained on exactly once. ``transform(sample)`` turns a
    stored sample into one for the training; it runs in the loader's workers, if there are any.
    ``lanes``: how many shards a batch mixes (``training/shard_order.py``). A rank holds at most
    about twice its part of them in memory: ``2 * (lanes / world_size + 1) + 1``.

    Every rank needs all files, at any path.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        transform: Callable[[Any], Any] | None = None,
        lanes: int = 8,
    ) -> None:
        self.sizes = tuple(map(int, sizes))
        self.transform = transform
        self.lanes = lanes
        self._starts = np.array([0, *accumulate(self.sizes)], np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, shard: int) -> Shard | Sequence[Any] | Mapping[str, NDArray[Any]]:
        """The samples of a shard: a sequence of ``sizes[shard]`` samples, or a mapping of columns
        to arrays of as many rows. Called on a thread of its own, ahead of the shard's use."""
        raise NotImplementedError(f"{type(self).__name__} must define read(shard)")

    def describe(self, shard: int) -> str:
        """What an error calls the shard, for example its file."""
        return f"shard {shard} of {type(self).__name__}"

    def find(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The shard of each sample, and its row there."""
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        return shards, indices - self._starts[shards]

    def load(self, shard: int) -> Shard:
        """``read(shard)``, checked. DataError if it can't be read, or has another number of samples
        than ``sizes`` says."""
        try:
            found = self.read(shard)
        except DataError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{self.describe(shard)} can't be read: {reason}") from error
        if isinstance(found, Mapping):
            columns = {str(name): np.asarray(column) for name, column in found.items()}
            self._check(shard, {len(column) for column in columns.values()})
            return _Columns(columns)
        if isinstance(found, Sequence | np.ndarray):
            self._check(shard, {len(found)})
            return _List(found)
        return found

    def _check(self, shard: int, sizes: set[int]) -> None:
        if sizes != {self.sizes[shard]}:
            has = " and ".join(map(str, sorted(sizes)))
            raise DataError(
                f"{self.describe(shard)} has {has or 'no'} samples, but {self.sizes[shard]} were "
                "counted before the training"
            )


class _Columns:
    def __init__(self, columns: dict[str, NDArray[Any]]) -> None:
        self._columns = columns

    def take(self, rows: NDArray[np.int64]) -> Samples:
        return {name: column[rows] for name, column in self._columns.items()}


class _List:
    def __init__(self, samples: Sequence[Any] | NDArray[Any]) -> None:
        self._samples = samples

    def take(self, rows: NDArray[np.int64]) -> Samples:
        return [self._samples[row] for row in rows.tolist()]


def kind_of(column: NDArray[Any]) -> tuple[str, int]:
    """What a column holds, and its number of axes. Columns that differ in one of them can't be
    joined: NumPy would turn numbers and text into Python objects."""
    kind = column.dtype.kind
    return "numbers" if kind in "biufc" else kind, column.ndim


def joined(parts: Sequence[Samples], describe: Callable[[int], str]) -> Samples:
    """The samples of several shards, one after the other. DataError if columns differ;
    ``describe(n)`` is what it calls the shard of part ``n``."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for number, part in enumerate(parts):
        has, wanted = _names_of(part), _names_of(first)
        if set(has) != set(wanted):
            raise DataError(
                f"{describe(number)} has {', '.join(has) or 'a list'}, but {describe(0)} has "
                f"{', '.join(wanted) or 'a list'}: shards of one data set have the same columns"
            )
    if isinstance(first, list):
        return [sample for part in parts for sample in part]
    found: dict[str, NDArray[Any]] = {}
    for name, column in first.items():
        columns = [part[name] for part in parts if isinstance(part, dict)]
        for number, each in enumerate(columns):
            if kind_of(each) != kind_of(column) or each.shape[1:] != column.shape[1:]:
                raise DataError(
                    f"column {name!r} differs: {describe(number)} has rows of {each.dtype} "
                    f"{list(each.shape[1:])}, {describe(0)} has {column.dtype} "
                    f"{list(column.shape[1:])}"
                )
        found[name] = np.concatenate(columns)
    return found


def _names_of(samples: Samples) -> list[str]:
    return [] if isinstance(samples, list) else list(samples)


def one_by_one(samples: Samples) -> list[Any]:
    """Samples as a list; of columns, a dict for each, of Python's numbers or of arrays."""
    if isinstance(samples, list):
        return [each.read() if isinstance(each, Deferred) else each for each in samples]
    names = list(samples)
    columns = [c.tolist() if c.ndim == 1 else list(c) for c in samples.values()]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a folder, a pattern such as ``data/train-*.parquet``, or a list of these."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as it was when the data set was made."""

    path: Path
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path, source: Path | None = None, descriptor: int = -1) -> ListedFile:
        """The file at ``path``, or the open file of ``descriptor``. It is listed from ``source``:
        of an outline (``shared.arrived``) only the size counts. OSError if it has no status."""
        source = source or path
        stamp = _stamp(source if descriptor < 0 else descriptor)
        return cls(path, stamp if source == path else (0, stamp[1], 0))

    def check(self, descriptor: int) -> None:
        """DataError if the open file is not the listed file."""
        found = _stamp(descriptor)
        if found != self.stamp and (0, found[1], 0) != self.stamp:
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
        if isinstance(entry, SharedFolder):  # waits for no file
            path = entry.folder
            here = [each for each in entry.shards() if each.parent == path]
            here = [each for each in here if each.name.endswith(suffixes)]
        elif (path := Path(entry)).is_dir():
            here = sorted(each for each in path.iterdir() if each.name.endswith(suffixes))
        elif arrived(path, outline=True).exists():
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
