"""Columns in files: Parquet, whose shards are row groups, and Arrow, whose shards are batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.data.files import Paths, find_files
from potluck.data.shards import Samples, Shard, ShardedDataset
from potluck.errors import DataError
from potluck.optional import require


class _Tables(ShardedDataset):
    """Files of tables, each in pieces. A subclass lists and reads the pieces."""

    _suffixes: tuple[str, ...]

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        lanes: int = 8,
    ) -> None:
        self.columns = None if columns is None else list(columns)
        self._pieces: list[tuple[Path, int]] = []
        sizes: list[int] = []
        for path in find_files(paths, *self._suffixes):
            try:
                names, rows = self._list(path)
            except Exception as error:
                raise DataError(f"{path} can't be read: {error}") from error
            missing = sorted(set(self.columns or ()) - set(names))
            if missing:
                raise DataError(
                    f"{path} has no column {', '.join(missing)}; it has: {', '.join(names)}"
                )
            self._pieces += [(path, number) for number in range(len(rows))]
            sizes += rows
        super().__init__(sizes, transform=transform, lanes=lanes)

    def read(self, shard: int) -> Shard:
        table = self._table(*self._pieces[shard])
        self._check(shard, {table.num_rows})
        return _Rows(table) if self.transform is not None else _Columns(table, self.describe(shard))

    def describe(self, shard: int) -> str:
        path, number = self._pieces[shard]
        return f"{path}, shard {number} of the file"

    def _list(self, path: Path) -> tuple[list[str], list[int]]:
        """The columns of a file, and the rows of each of its pieces."""
        raise NotImplementedError

    def _table(self, path: Path, number: int) -> Any:
        """A piece of a file, a ``pyarrow.Table``."""
        raise NotImplementedError


class ParquetFiles(_Tables):
    """Parquet files: each row group is a shard.

        data = ParquetFiles("data/train-*.parquet", columns=["features", "label"])

    ``paths`` is a file, a folder, a pattern, or a list of those. A batch is a dict: for each column
    a tensor, or a list of its values if they are no numbers. Lists of equal length become rows of a
    tensor. With ``transform`` a batch is whatever ``collate`` makes of the transformed rows, which
    are dicts of Python values.

    DataError for a file that is damaged or has other columns, and, without ``transform``, for nulls
    and for lists of unlike lengths; MissingDependency without pyarrow.
    """

    _suffixes = (".parquet",)

    def _list(self, path: Path) -> tuple[list[str], list[int]]:
        parquet = require("pyarrow.parquet", "data")
        with parquet.ParquetFile(path) as file:
            groups = range(file.num_row_groups)
            return file.schema_arrow.names, [file.metadata.row_group(i).num_rows for i in groups]

    def _table(self, path: Path, number: int) -> Any:
        parquet = require("pyarrow.parquet", "data")
        with parquet.ParquetFile(path) as file:
            return file.read_row_group(number, columns=self.columns, use_threads=False)


class ArrowFiles(_Tables):
    """Arrow IPC files (also called Feather): each record batch is a shard, mapped into memory.

    As [ParquetFiles][potluck.data.ParquetFiles]. Files of Hugging Face ``datasets`` are in the
    streaming format: pass ``datasets.load_from_disk(folder)`` itself to the loop.
    """

    _suffixes = (".arrow", ".feather")

    def _list(self, path: Path) -> tuple[list[str], list[int]]:
        file = self._open(path)
        batches = range(file.num_record_batches)
        return file.schema.names, [file.get_batch(number).num_rows for number in batches]

    def _table(self, path: Path, number: int) -> Any:
        arrow = require("pyarrow", "data")
        table = arrow.Table.from_batches([self._open(path).get_batch(number)])
        return table if self.columns is None else table.select(self.columns)

    @staticmethod
    def _open(path: Path) -> Any:
        arrow, ipc = require("pyarrow", "data"), require("pyarrow.ipc", "data")
        return ipc.open_file(arrow.memory_map(str(path)))


class _Rows:
    """A piece that has been read; samples are dicts of Python values."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def take(self, rows: NDArray[np.int64]) -> Samples:
        return self._table.take(rows).to_pylist()  # type: ignore[no-any-return]


class _Columns:
    """A piece that has been read; samples are an array for each column. Numbers are arrays over the
    piece's own memory; other values become Python objects when they are taken."""

    def __init__(self, table: Any, name: str) -> None:
        columns = {each: table.column(each).combine_chunks() for each in table.column_names}
        self._columns = {
            each: _numbers(column, f"{name}: column {each!r}") for each, column in columns.items()
        }

    def take(self, rows: NDArray[np.int64]) -> Samples:
        return {
            each: column[rows] if isinstance(column, np.ndarray) else _objects(column.take(rows))
            for each, column in self._columns.items()
        }


def _numbers(column: Any, name: str) -> Any:
    """The column as an array, if it has numbers or lists of numbers. DataError for what a tensor
    can't hold; ``name`` is what the error calls the column."""
    types = require("pyarrow", "data").types
    kind, values, shape = column.type, column, [len(column)]
    widths = {1}
    if types.is_fixed_size_list(kind):
        widths, values = {kind.list_size}, column.flatten()
        shape.append(kind.list_size)
    elif types.is_list(kind) or types.is_large_list(kind):
        widths, values = set(np.diff(column.offsets.to_numpy()).tolist()), column.flatten()
        shape.append(max(widths, default=0))
    if column.null_count or values.null_count or len(widths) > 1:
        what = "nulls" if len(widths) <= 1 else "lists of unlike lengths"
        raise DataError(
            f"{name} ({kind}) has {what}, which a tensor can't hold: pass a transform, or other "
            "columns"
        )
    if not (types.is_integer(values.type) or types.is_floating(values.type)):
        return column
    return values.to_numpy(zero_copy_only=False).reshape(shape)


def _objects(column: Any) -> NDArray[Any]:
    found: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return found
