"""Columns in files: Parquet, whose shards are row groups, and Arrow, whose shards are batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck._core import hints
from potluck._core.optional import require
from potluck.data.shards import Paths, Samples, Shard, ShardedDataset, find_files, kind_of
from potluck.data.shared import arrived
from potluck.errors import DataError, MissingDependency


class _Tables(ShardedDataset):
    """Files of tables, each in pieces. A subclass lists and reads the pieces."""

    _suffixes: tuple[str, ...]

    @hints.arguments({})
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
        first: tuple[Path, Any] | None = None  # the first file that has rows, and its schema
        for path in find_files(paths, *self._suffixes):
            try:
                schema, rows = self._list(arrived(path, outline=True))
            except MissingDependency:
                raise
            except Exception as error:
                raise DataError(f"{path} can't be read: {error}") from error
            names = schema.names
            missing = sorted(set(self.columns or ()) - set(names))
            if missing:
                raise DataError(
                    f"{path} has no column {', '.join(missing)}; it has: {', '.join(names)}"
                )
            if transform is None and any(rows):
                first = first or (path, schema)
                with _naming(str(path)):
                    self._check_schema(path, schema, *first)
            self._pieces += [(path, number) for number in range(len(rows))]
            sizes += rows
        super().__init__(sizes, transform=transform, lanes=lanes)

    def read(self, shard: int) -> Shard:
        path, number = self._pieces[shard]
        table = self._table(arrived(path), number)
        self._check(shard, {table.num_rows})
        name = self.describe(shard)
        return _Rows(table, name) if self.transform is not None else _Columns(table, name)

    def describe(self, shard: int) -> str:
        path, number = self._pieces[shard]
        return f"{path}, shard {number} of the file"

    def _check_schema(self, path: Path, schema: Any, first_path: Path, first: Any) -> None:
        """DataError if the columns of a file don't fit those of the first file."""
        if schema.equals(first):
            return
        if self.columns is None and set(schema.names) != set(first.names):
            raise DataError(
                f"{path} has the columns {', '.join(schema.names)}, {first_path} has "
                f"{', '.join(first.names)}: pass the columns= to read"
            )
        for name in self.columns or first.names:
            kind, other = (each.types[each.names.index(name)] for each in (schema, first))
            if kind != other and _array_kind(kind) != _array_kind(other):
                raise DataError(
                    f"column {name!r} of {path} is {kind}, that of {first_path} is {other}, which "
                    "one tensor can't hold: pass a transform, or other columns"
                )

    def _list(self, path: Path) -> tuple[Any, list[int]]:
        """The ``pyarrow.Schema`` of a file, and the rows of each of its pieces."""
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

    DataError for a file that is damaged or has not all of ``columns``, and, without ``transform``,
    for files whose columns differ, for nulls and for lists of unlike lengths; MissingDependency
    without pyarrow. Pages that have checksums are checked.
    """

    _suffixes = (".parquet",)

    def _list(self, path: Path) -> tuple[Any, list[int]]:
        with self._open(path) as file:
            groups = range(file.num_row_groups)
            return file.schema_arrow, [file.metadata.row_group(i).num_rows for i in groups]

    def _table(self, path: Path, number: int) -> Any:
        with self._open(path) as file:
            return file.read_row_group(number, columns=self.columns, use_threads=False)

    @staticmethod
    def _open(path: Path) -> Any:
        parquet = require("pyarrow.parquet", "data")
        return parquet.ParquetFile(path, page_checksum_verification=True)


class ArrowFiles(_Tables):
    """Arrow IPC files (also called Feather): each record batch is a shard, mapped into memory.

    As [ParquetFiles][potluck.data.ParquetFiles]. The format has no checksums: a batch is validated
    when it is read, which finds damaged lengths, offsets and text, but no changed numbers. Files of
    Hugging Face ``datasets`` are in the streaming format: pass ``datasets.load_from_disk(folder)``
    itself to the loop.
    """

    _suffixes = (".arrow", ".feather")

    def _list(self, path: Path) -> tuple[Any, list[int]]:
        file = self._open(path)
        batches = range(file.num_record_batches)
        return file.schema, [file.get_batch(number).num_rows for number in batches]

    def _table(self, path: Path, number: int) -> Any:
        arrow = require("pyarrow", "data")
        batch = self._open(path).get_batch(number)
        if self.columns is not None:
            batch = batch.select(self.columns)
        # Else Arrow would follow a damaged offset out of the batch, and the process could crash.
        batch.validate(full=True)
        return arrow.Table.from_batches([batch])

    @staticmethod
    def _open(path: Path) -> Any:
        arrow, ipc = require("pyarrow", "data"), require("pyarrow.ipc", "data")
        return ipc.open_file(arrow.memory_map(str(path)))


class _Rows:
    """A piece that has been read; samples are dicts of Python values."""

    def __init__(self, table: Any, name: str) -> None:
        self._table = table
        self._name = name

    def take(self, rows: NDArray[np.int64]) -> Samples:
        with _naming(self._name):
            return self._table.take(rows).to_pylist()  # type: ignore[no-any-return]


class _Columns:
    """A piece that has been read; samples are an array for each column. Numbers are arrays over the
    piece's own memory; other values become Python objects when they are taken."""

    def __init__(self, table: Any, name: str) -> None:
        self._name = name
        columns = {each: table.column(each).combine_chunks() for each in table.column_names}
        self._columns = {
            each: _numbers(column, f"{name}: column {each!r}") for each, column in columns.items()
        }

    def take(self, rows: NDArray[np.int64]) -> Samples:
        with _naming(self._name):
            return {
                each: column[rows] if isinstance(column, np.ndarray) else _objects(column, rows)
                for each, column in self._columns.items()
            }


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors of values that can't be converted, such as text that is no UTF-8, become a DataError
    that says ``name``."""
    arrow = require("pyarrow", "data")
    try:
        yield
    except (arrow.ArrowException, OSError, SystemError, ValueError, OverflowError) as error:
        raise DataError(f"{name} can't be read: {type(error).__name__}: {error}") from error


def _array_kind(kind: Any) -> tuple[str, int]:
    """``kind_of`` the array that a column of this ``pyarrow.DataType`` becomes."""
    column = _numbers(require("pyarrow", "data").array([], kind), "")
    return kind_of(column if isinstance(column, np.ndarray) else _objects(column, np.arange(0)))


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


def _objects(column: Any, rows: NDArray[np.int64]) -> NDArray[Any]:
    found: NDArray[Any] = column.take(rows).to_numpy(zero_copy_only=False)
    return found
