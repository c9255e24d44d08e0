"""Data sets in shards: what a shard may be, and which errors its owner sees."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from potluck.data import ShardedDataset
from potluck.data.reader import ShardReader
from potluck.data.shards import one_by_one
from potluck.errors import DataError


class Numbers(ShardedDataset):
    """Shards of consecutive numbers; counts what is read."""

    def __init__(self, sizes: Sequence[int], **options: Any) -> None:
        super().__init__(sizes, **options)
        self.reads: list[int] = []

    def read(self, shard: int) -> list[int]:
        self.reads.append(shard)
        start = sum(self.sizes[:shard])
        return list(range(start, start + self.sizes[shard]))


def indices(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


@pytest.fixture
def numbers() -> Any:
    readers: list[ShardReader] = []

    def made(*sizes: int) -> tuple[Numbers, ShardReader]:
        dataset = Numbers(sizes)
        readers.append(ShardReader(dataset))
        return dataset, readers[-1]

    yield made
    for reader in readers:
        reader.close()


def test_samples_come_in_the_order_that_was_asked_for(numbers: Any) -> None:
    _, reader = numbers(3, 0, 4)
    assert reader.take(indices(5, 0, 3, 2, 2)) == [5, 0, 3, 2, 2]


def test_a_shard_is_read_once_while_it_is_used(numbers: Any) -> None:
    dataset, reader = numbers(4, 4)
    for _ in range(5):
        reader.take(indices(1, 6))
    assert sorted(dataset.reads) == [0, 1]


def test_shards_are_read_before_they_are_needed(numbers: Any) -> None:
    dataset, reader = numbers(2, 2, 2, 2)
    reader.expect(indices(0, 3))
    reader.expect(indices(4))
    assert reader.take(indices(0)) == [0]
    assert reader.take(indices(3)) == [3]
    assert reader.take(indices(4)) == [4]
    assert dataset.reads == [0, 1, 2]


def test_few_shards_are_held_however_many_were_expected(numbers: Any) -> None:
    dataset, reader = numbers(*[1] * 50)
    for shard in range(50):
        reader.expect(indices(shard))
    for shard in range(50):
        assert reader.take(indices(shard)) == [shard]
        assert len(reader._held) <= 3
    assert dataset.reads == list(range(50))


def test_columns_are_cut_row_by_row() -> None:
    class Table(ShardedDataset):
        def read(self, shard: int) -> dict[str, Any]:
            return {"x": np.arange(6).reshape(3, 2) + 10 * shard, "y": [1, 2, 3]}

    reader = ShardReader(Table([3, 3]))
    found = reader.take(indices(2, 4))
    reader.close()
    assert isinstance(found, dict)
    assert found["x"].tolist() == [[4, 5], [12, 13]]
    assert found["y"].tolist() == [3, 2]


def test_a_shard_that_has_other_samples_than_were_counted_is_an_error_that_names_it() -> None:
    class Short(ShardedDataset):
        def read(self, shard: int) -> list[int]:
            return [0]

    reader = ShardReader(Short([1, 2]))
    assert reader.take(indices(0)) == [0]
    with pytest.raises(DataError, match="shard 1 of Short has 1 samples, but 2 were counted"):
        reader.take(indices(1))
    reader.close()


def test_an_error_of_a_shard_comes_each_time_and_hurts_no_other() -> None:
    class Torn(ShardedDataset):
        def read(self, shard: int) -> list[int]:
            if shard == 1:
                raise OSError("no such sector")
            return [0]

    reader = ShardReader(Torn([1, 1]))
    reader.expect(indices(0, 1))
    for _ in range(2):
        with pytest.raises(DataError, match="shard 1 of Torn can't be read: OSError: no such"):
            reader.take(indices(1))
    assert reader.take(indices(0)) == [0]
    reader.close()


def test_shards_with_other_columns_are_refused() -> None:
    class Mixed(ShardedDataset):
        def read(self, shard: int) -> Any:
            return {"x": [1]} if shard else {"z": [1]}

    reader = ShardReader(Mixed([1, 1]))
    with pytest.raises(DataError, match="shard 1 of Mixed has x, but shard 0 of Mixed has z"):
        reader.take(indices(0, 1))
    reader.close()


@pytest.mark.parametrize(
    ("other", "has"),
    [([["a"]], r"<U1 \[1\]"), ([["a", "b"]], r"<U1 \[2\]"), ([[1.0]], r"float64 \[1\]")],
)
def test_shards_whose_columns_hold_other_things_are_named(other: Any, has: str) -> None:
    class Mixed(ShardedDataset):
        def read(self, shard: int) -> Any:
            return {"x": other if shard else [[1, 2]]}

    reader = ShardReader(Mixed([1, 1]))
    try:
        with pytest.raises(DataError, match=f"'x' differs: shard 1 of Mixed has rows of {has}"):
            reader.take(indices(0, 1))
    finally:
        reader.close()


def test_closing_ends_the_thread_and_what_waits_to_be_read(numbers: Any) -> None:
    dataset, reader = numbers(1, 1, 1)
    reader.take(indices(0))
    reader.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("potluck-shards")]
    assert dataset.reads == [0]


def test_a_transform_gets_numbers_and_arrays() -> None:
    [first, second] = one_by_one({"y": np.array([1, 2]), "x": np.eye(2)})
    assert type(first["y"]) is int
    assert isinstance(second["x"], np.ndarray)
    np.testing.assert_array_equal(second["x"], [0.0, 1.0])


def test_a_reader_that_was_closed_reads_again() -> None:
    reader = ShardReader(Numbers([2, 1]))
    assert reader.take(indices(2, 0)) == [2, 0]
    reader.close()
    assert reader.take(indices(1)) == [1]
    reader.close()
    reader.close()


def test_a_read_that_hangs_is_not_waited_for_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.data.reader._CLOSE_S", 0.05)
    goes_on, is_reading = threading.Event(), threading.Event()

    class Hangs(Numbers):
        def read(self, shard: int) -> list[int]:
            is_reading.set()
            assert goes_on.wait(30)
            return super().read(shard)

    reader = ShardReader(Hangs([1]))
    reader.expect(indices(0))
    assert is_reading.wait(30)
    reader.close()
    goes_on.set()
