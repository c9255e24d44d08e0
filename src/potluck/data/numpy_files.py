"""Arrays in ``.npy`` files: shards are ranges of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.data.files import Paths, find_files
from potluck.data.shards import ShardedDataset
from potluck.errors import DataError

_SHARD_BYTES = 16 << 20


class NumpyFiles(ShardedDataset):
    """Columns that are stored as ``.npy`` files, with samples along the first axis.

        data = NumpyFiles({"x": "data/x-*.npy", "y": "data/y-*.npy"})

    Each column has one or more files; the n-th files of all columns have equally many rows. A batch
    is a dict of tensors. A shard is ``rows_per_shard`` rows, by default as many as take 16 MiB; the
    files may be larger than memory.

    DataError for files that do not fit together, are damaged, or hold Python objects; TypeError for
    ``columns`` that are no dict.
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
        self._arrays: list[dict[str, NDArray[Any]]] = []
        self._pieces: list[tuple[int, int, int]] = []  # file, first row, end
        for number in range(len(next(iter(files.values())))):
            arrays = {name: _mapped(found[number]) for name, found in files.items()}
            self._check_file(arrays, {name: found[number] for name, found in files.items()})
            num_rows = len(next(iter(arrays.values())))
            row_bytes = sum(array[:1].nbytes for array in arrays.values())
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
        return {name: np.array(array[start:end]) for name, array in arrays}  # read, not mapped

    def describe(self, shard: int) -> str:
        number, start, end = self._pieces[shard]
        return f"rows {start} to {end} of file {number}"

    def _check_file(self, arrays: dict[str, NDArray[Any]], paths: dict[str, Path]) -> None:
        if len({len(array) for array in arrays.values()}) > 1:
            rows = ", ".join(f"{paths[name]} {len(array)}" for name, array in arrays.items())
            raise DataError(f"files that belong together differ in their rows: {rows}")
        for name, array in arrays.items():
            first = self._arrays[0][name] if self._arrays else array
            if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
                raise DataError(
                    f"{paths[name]} has rows of {array.dtype} {list(array.shape[1:])}, the first "
                    f"file of column {name!r} has {first.dtype} {list(first.shape[1:])}"
                )


def _mapped(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if not array.ndim:
        raise DataError(f"{path} holds a single number; samples are along the first axis")
    return array
