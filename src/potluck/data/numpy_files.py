"""Arrays in ``.npy`` files: shards are ranges of their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.data.shards import ListedFile, Paths, ShardedDataset, find_files
from potluck.data.shared import arrived
from potluck.errors import DataError

_SHARD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in a file. It is read, not mapped: a map of a file that is cut off later ends the
    process with SIGBUS."""

    file: ListedFile
    offset: int  # of the first element, in bytes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool  # the rows are the last axis of what is stored

    def read(self, start: int, end: int) -> NDArray[Any]:
        """The rows from ``start`` to ``end``. DataError if the file was changed or cut off."""
        rows, inner, size = end - start, self.shape[1:], self.dtype.itemsize
        if self.is_fortran:
            found = np.empty((*reversed(inner), rows), self.dtype)
            runs = [(n * self.shape[0] + start) * size for n in range(math.prod(inner))]
        else:
            found = np.empty((rows, *inner), self.dtype)
            runs = [start * math.prod(inner) * size]
        if found.nbytes:
            parts = found.reshape(len(runs), -1).view(np.uint8)
            with arrived(self.file.path).open("rb") as file:
                self.file.check(file.fileno())
                for offset, part in zip(runs, parts, strict=True):
                    file.seek(self.offset + offset)
                    if file.readinto(part.data) < part.nbytes:
                        raise DataError(f"{self.file.path} is cut off in rows {start} to {end}")
        return found.T if self.is_fortran else found


class NumpyFiles(ShardedDataset):
    """Columns that are stored as ``.npy`` files, with samples along the first axis.

        data = NumpyFiles({"x": "data/x-*.npy", "y": "data/y-*.npy"})

    Each column has one or more files; the n-th files of all columns have equally many rows. A batch
    is a dict of tensors. A shard is ``rows_per_shard`` rows, by default as many as take 16 MiB; the
    files may be larger than memory.

    DataError for files that do not fit together, are damaged, hold Python objects, or are changed
    later; TypeError for ``columns`` that are no dict.
    """

    def __init__(
        self,
        columns: Mapping[str, Paths],
        *,
        rows_per_shard: int | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        lanes: int = 8,
    ) -> None:
        if not isinstance(columns, Mapping):
            raise TypeError(
                f"NumpyFiles takes a dict, of files by column, not {columns!r:.200}; for one "
                'column: NumpyFiles({"x": "x-*.npy"})'
            )
        if not columns:
            raise DataError("NumpyFiles needs at least one column")
        if rows_per_shard is not None and rows_per_shard < 1:
            raise ValueError(f"rows_per_shard is {rows_per_shard}; it must be at least 1")
        files = {name: find_files(paths, ".npy") for name, paths in columns.items()}
        if len({len(found) for found in files.values()}) > 1:
            counts = ", ".join(f"{name} {len(found)}" for name, found in files.items())
            raise DataError(f"columns differ in their number of files: {counts}")
        self._arrays: list[dict[str, _Array]] = []
        self._pieces: list[tuple[int, int, int]] = []  # file, first row, end
        for number in range(len(next(iter(files.values())))):
            arrays = {name: _listed(found[number]) for name, found in files.items()}
            self._check_file(arrays)
            num_rows = next(iter(arrays.values())).shape[0]
            row_bytes = sum(
                math.prod(array.shape[1:]) * array.dtype.itemsize for array in arrays.values()
            )
            step = rows_per_shard or max(1, _SHARD_BYTES // max(1, row_bytes))
            for start in range(0, num_rows, step):
                end = min(start + step, num_rows)
                self._pieces.append((number, start, end))
            self._arrays.append(arrays)
        sizes = [end - start for _, start, end in self._pieces]
        super().__init__(sizes, transform=transform, lanes=lanes)

    def read(self, shard: int) -> Mapping[str, NDArray[Any]]:
        number, start, end = self._pieces[shard]
        arrays = self._arrays[number].items()
        return {name: array.read(start, end) for name, array in arrays}

    def describe(self, shard: int) -> str:
        number, start, end = self._pieces[shard]
        paths = ", ".join(str(array.file.path) for array in self._arrays[number].values())
        return f"rows {start} to {end} of {paths}"

    def _check_file(self, arrays: dict[str, _Array]) -> None:
        if len({array.shape[0] for array in arrays.values()}) > 1:
            rows = ", ".join(f"{array.file.path} {array.shape[0]}" for array in arrays.values())
            raise DataError(f"files that belong together differ in their rows: {rows}")
        for name, array in arrays.items():
            first = self._arrays[0][name] if self._arrays else array
            if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
                raise DataError(
                    f"{array.file.path} has rows of {array.dtype} {list(array.shape[1:])}, the "
                    f"first file of column {name!r} has {first.dtype} {list(first.shape[1:])}"
                )


def _listed(path: Path) -> _Array:
    try:
        source = arrived(path, outline=True)
        file = ListedFile.of(path, source)
        # Its header, and that all of it is there.
        array = np.lib.format.open_memmap(source, mode="r")
    except Exception as error:  # also tokenize.TokenError and SyntaxError, of a damaged header
        raise DataError(f"{path} can't be read: {error}") from error
    if not array.ndim:
        raise DataError(f"{path} holds a single number; samples are along the first axis")
    is_fortran = not array.flags.c_contiguous
    return _Array(file, array.offset, array.shape, array.dtype, is_fortran)
