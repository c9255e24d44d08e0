"""Files of data: what each format gives, and what is said of files that are torn."""

from __future__ import annotations

import io
import os
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from potluck.data import ArrowFiles, NumpyFiles, ParquetFiles, ShardedDataset, WebDatasetFiles
from potluck.data.reader import ShardReader
from potluck.data.shards import Deferred, one_by_one
from potluck.errors import DataError, MissingDependency

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def samples_of(dataset: ShardedDataset, *rows: int) -> Any:
    reader = ShardReader(dataset)
    try:
        found = reader.take(np.array(rows or range(len(dataset)), np.int64))
        return one_by_one(found) if isinstance(found, list) else found
    finally:
        reader.close()


def table(start: int, stop: int, **columns: Any) -> Any:
    numbers = list(range(start, stop))
    given = {
        "id": pa.array(numbers, pa.int64()),
        "x": pa.array([[n, n + 0.5] for n in numbers], pa.list_(pa.float32(), 2)),
        "name": pa.array([f"n{n}" for n in numbers]),
    }
    return pa.table(given | columns)


def write_parquet(path: Path, start: int, stop: int, **columns: Any) -> Path:
    pq.write_table(table(start, stop, **columns), path, row_group_size=3)
    return path


def write_arrow(path: Path, start: int, stop: int, **columns: Any) -> Path:
    found = table(start, stop, **columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, found.schema) as writer:
        for batch in found.to_batches(max_chunksize=3):
            writer.write_batch(batch)
    return path


@pytest.mark.parametrize(
    ("kind", "write", "ending"),
    [(ParquetFiles, write_parquet, "parquet"), (ArrowFiles, write_arrow, "arrow")],
)
class TestColumns:
    def test_pieces_of_files_are_shards(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        write(tmp_path / f"b.{ending}", 7, 9)
        write(tmp_path / f"a.{ending}", 0, 7)
        for paths in (
            tmp_path,
            f"{tmp_path}/*.{ending}",
            [tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"],
        ):
            dataset = kind(paths)
            assert dataset.sizes == (3, 3, 1, 2)
        found = samples_of(dataset, 8, 0, 4)
        assert found["id"].tolist() == [8, 0, 4]
        assert found["x"].tolist() == [[8, 8.5], [0, 0.5], [4, 4.5]]
        assert found["x"].dtype == np.float32
        assert found["name"].tolist() == ["n8", "n0", "n4"]

    def test_only_the_columns_that_are_wanted(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        write(tmp_path / f"a.{ending}", 0, 4)
        assert list(samples_of(kind(tmp_path, columns=["id"]), 1)) == ["id"]
        with pytest.raises(DataError, match=r"has no column age; it has: id, x, name"):
            kind(tmp_path, columns=["id", "age"])

    def test_a_transform_gets_rows(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        write(tmp_path / f"a.{ending}", 0, 4)
        [row] = samples_of(kind(tmp_path, transform=lambda row: row), 3)
        assert row == {"id": 3, "x": [3.0, 3.5], "name": "n3"}

    def test_a_torn_file_is_named(self, kind: Any, write: Any, ending: str, tmp_path: Path) -> None:
        path = write(tmp_path / f"a.{ending}", 0, 9)
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(DataError, match=rf"a\.{ending} can't be read"):
            kind(tmp_path)

    def test_a_file_with_other_columns_is_named(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        write(tmp_path / f"a.{ending}", 0, 3)
        write(tmp_path / f"b.{ending}", 3, 6, age=pa.array([1, 2, 3]))
        has = rf"b\.{ending} has the columns id, x, name, age, .*a\.{ending} has id, x, name: pass"
        with pytest.raises(DataError, match=has):
            kind(tmp_path)
        assert len(samples_of(kind(tmp_path, columns=["id"]))["id"]) == 6
        files = [tmp_path / f"{name}.{ending}" for name in "ba"]
        with pytest.raises(DataError, match=rf"a\.{ending} has no column age; it has: id, x, name"):
            kind(files, columns=["age", "id"])
        rows = samples_of(kind(tmp_path, transform=lambda row: row), 0, 5)
        assert [len(row) for row in rows] == [3, 4]

    def test_files_whose_columns_are_in_another_order_fit(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        one, two = pa.array([1, 2, 3]), pa.array([4, 5, 6])
        write(tmp_path / f"a.{ending}", 0, 3, one=one, two=two)
        write(tmp_path / f"b.{ending}", 3, 6, two=two, one=one)
        found = samples_of(kind(tmp_path))
        assert found["one"].tolist() == [1, 2, 3] * 2
        assert found["two"].tolist() == [4, 5, 6] * 2

    @pytest.mark.parametrize(
        "other",
        [
            pa.array(["1", "2", "3"]),
            pa.array([[1], [2], [3]]),
            pa.array([1, 2, 3], pa.timestamp("s")),
        ],
    )
    def test_a_file_with_a_column_of_another_type_is_named(
        self, kind: Any, write: Any, ending: str, other: Any, tmp_path: Path
    ) -> None:
        write(tmp_path / f"a.{ending}", 0, 3, y=pa.array([0.5, 1.5, 2.5]))
        write(tmp_path / f"b.{ending}", 3, 6, y=other)
        differs = rf"column 'y' of .*b\.{ending} is .*, that of .*a\.{ending} is double"
        with pytest.raises(DataError, match=differs):
            kind(tmp_path)
        assert len(kind(tmp_path, columns=["id"])) == 6
        assert len(samples_of(kind(tmp_path, transform=lambda row: row))) == 6

    def test_numbers_of_other_widths_fit(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        write(tmp_path / f"a.{ending}", 0, 3, y=pa.array([0.5, 1.5, 2.5]))
        write(tmp_path / f"b.{ending}", 3, 6, y=pa.array([3, 4, 5], pa.int32()))
        assert samples_of(kind(tmp_path))["y"].tolist() == [0.5, 1.5, 2.5, 3, 4, 5]

    def test_the_columns_of_a_file_without_rows_do_not_matter(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        write(tmp_path / f"a.{ending}", 0, 0, y=pa.array([], pa.null()), z=pa.array([], pa.null()))
        write(tmp_path / f"b.{ending}", 0, 3, y=pa.array([0.5, 1.5, 2.5]))
        assert samples_of(kind(tmp_path))["y"].tolist() == [0.5, 1.5, 2.5]

    def test_files_with_lists_of_another_length_are_named(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        write(tmp_path / f"a.{ending}", 0, 3, y=pa.array([[1, 2]] * 3))
        write(tmp_path / f"b.{ending}", 3, 6, y=pa.array([[1, 2, 3]] * 3))
        differs = rf"column 'y' differs: .*b\.{ending}.* rows of int64 \[3\], .*a\.{ending}.* \[2\]"
        with pytest.raises(DataError, match=differs):
            samples_of(kind(tmp_path))

    def test_text_that_is_no_utf8_is_named(
        self, kind: Any, write: Any, ending: str, tmp_path: Path
    ) -> None:
        torn = pa.array([b"a", b"\xff\xfe", b"c"]).view(pa.string())
        write(tmp_path / f"a.{ending}", 0, 3, text=torn)
        for options in ({}, {"transform": lambda row: row}):
            with pytest.raises(DataError, match=rf"a\.{ending}, shard 0 of the file can't be read"):
                samples_of(kind(tmp_path, **options))

    def test_without_pyarrow_it_says_what_to_install(
        self, kind: Any, write: Any, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / f"a.{ending}", 0, 3)
        for module in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingDependency, match="pip install"):
            kind(tmp_path)


def test_a_parquet_file_with_a_damaged_page_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(0, 9), path, compression="gzip", write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[40:60] = bytes(20)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.parquet, shard 0 of the file can't be read"):
        samples_of(ParquetFiles(path), 0)


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_parquet_page_is_checked_if_it_has_a_checksum(
    has_checksums: bool, tmp_path: Path
) -> None:
    """Without compression nothing else would tell that a number has changed."""
    path = tmp_path / "a.parquet"
    numbers = pa.table({"n": pa.array(range(1000), pa.int64())})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(numbers, path, write_page_checksum=has_checksums, **options)
    raw = path.read_bytes()
    path.write_bytes(raw.replace((500).to_bytes(8, "little"), (501).to_bytes(8, "little"), 1))
    assert path.read_bytes() != raw
    dataset = ParquetFiles(path)
    if has_checksums:
        damaged = r"a\.parquet, shard 0 of the file can't be read: .*CRC"
        with pytest.raises(DataError, match=damaged):
            samples_of(dataset)
    else:
        assert samples_of(dataset)["n"].sum() == sum(range(1000)) + 1


@pytest.mark.parametrize("transform", [None, dict])
@pytest.mark.parametrize("column", ["name", "code"])
def test_a_damaged_arrow_batch_is_named_when_it_is_read(
    column: str, transform: Any, tmp_path: Path
) -> None:
    """Offsets of text and codes of a dictionary that lead elsewhere would be followed."""
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), ["p", "q", "r"])
    path = write_arrow(tmp_path / "a.arrow", 0, 3, code=codes)
    raw = path.read_bytes()
    numbers = {"name": (0, 2, 4, 6), "code": (0, 1, 2)}[column]
    whole, damaged = (
        np.array(each, np.int32).tobytes() for each in (numbers, (*numbers[:1], 1 << 20, 1 << 30))
    )
    at = raw.rindex(whole)
    path.write_bytes(raw[:at] + damaged + raw[at + len(damaged) :])
    dataset = ArrowFiles(path, transform=transform)
    with pytest.raises(DataError, match=r"a\.arrow, shard 0 of the file can't be read"):
        samples_of(dataset)
    assert samples_of(ArrowFiles(path, columns=["id"]))["id"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (pa.array([1, None, 3]), "column 'bad' .int64. has nulls"),
        (pa.array([[1], [1, 2], [3]]), "lists of unlike lengths"),
        (pa.array([[1], [None], [3]]), "has nulls"),
    ],
)
def test_what_a_tensor_can_not_hold_is_refused(column: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(0, 3, bad=column), path)
    with pytest.raises(DataError, match=rf"a\.parquet, shard 0 of the file: .*{why}"):
        samples_of(ParquetFiles(path))
    assert len(samples_of(ParquetFiles(path, transform=lambda row: row))) == 3


def test_lists_of_equal_length_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(0, 3, y=pa.array([[1, 2], [3, 4], [5, 6]])), path)
    assert samples_of(ParquetFiles(path), 2, 1)["y"].tolist() == [[5, 6], [3, 4]]


def test_paths_that_name_no_file(tmp_path: Path) -> None:
    for paths in (tmp_path, tmp_path / "none.parquet", f"{tmp_path}/*.parquet", []):
        with pytest.raises(DataError, match=r"there is no such file|no files are given"):
            ParquetFiles(paths)


# ---------------------------------------------------------------- NumPy


def test_numpy_files_are_cut_into_shards(tmp_path: Path) -> None:
    for number, rows in enumerate((5, 3)):
        np.save(tmp_path / f"x-{number}.npy", np.arange(rows * 2).reshape(rows, 2) + 100 * number)
        np.save(tmp_path / f"y-{number}.npy", np.arange(rows, dtype=np.float32))
    dataset = NumpyFiles({"x": f"{tmp_path}/x-*.npy", "y": f"{tmp_path}/y-*.npy"}, rows_per_shard=2)
    assert dataset.sizes == (2, 2, 1, 2, 1)
    found = samples_of(dataset, 4, 7)
    assert found["x"].tolist() == [[8, 9], [104, 105]]
    assert found["y"].tolist() == [4, 2]


@pytest.mark.parametrize(
    "stored",
    [
        np.arange(60).reshape(5, 3, 4),
        np.asfortranarray(np.arange(60.0).reshape(5, 3, 4)),
        np.arange(5, dtype=">i4"),
        np.arange(5).astype("datetime64[s]"),
        np.array([(n, n / 2) for n in range(5)], [("a", "<i4"), ("b", "<f8")]),
        np.zeros((5, 0)),
        np.zeros((5, 0), order="F"),
    ],
    ids=lambda stored: f"{stored.dtype} {stored.shape}",
)
def test_numpy_files_hold_what_was_stored(stored: NDArray[Any], tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", stored)
    dataset = NumpyFiles({"x": tmp_path / "x.npy"}, rows_per_shard=2)
    assert dataset.sizes == (2, 2, 1)
    found = samples_of(dataset)["x"]
    np.testing.assert_array_equal(found, stored)
    assert dataset.read(0)["x"].dtype == stored.dtype


@pytest.mark.parametrize("change", ["cut off", "replaced", "gone"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_numpy_file_that_changes_after_it_was_listed_is_named(
    tmp_path: Path, order: Any, change: str
) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((4096, 4), order=order))
    dataset = NumpyFiles({"x": path}, rows_per_shard=2048)
    if change == "cut off":
        os.truncate(path, 200)
    elif change == "replaced":  # by one of the same size
        np.save(tmp_path / "other.npy", np.ones((4096, 4), order=order))
        (tmp_path / "other.npy").replace(path)
    else:
        path.unlink()
    text = r"x\.npy can't be read" if change == "gone" else r"x\.npy was changed or replaced"
    with pytest.raises(DataError, match=text):
        dataset.load(1)


def test_numpy_files_that_do_not_fit_together(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))
    np.save(tmp_path / "x2.npy", np.zeros((3, 4)))
    np.save(tmp_path / "y.npy", np.zeros(4))
    np.save(tmp_path / "one.npy", np.float64(1))
    np.save(tmp_path / "objects.npy", np.array([{}, 1], dtype=object))
    (tmp_path / "torn.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:100])
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    for columns, why in (
        ({"x": x, "y": y}, r"differ in their rows: .*x\.npy 3, .*y\.npy 4"),
        ({"x": [x, x], "y": y}, r"differ in their number of files: x 2, y 1"),
        ({"x": [x, tmp_path / "x2.npy"]}, r"x2\.npy has rows of float64 \[4\], the first"),
        ({"x": tmp_path / "one.npy"}, "single number"),
        ({"x": tmp_path / "objects.npy"}, r"objects\.npy can't be read"),
        ({"x": tmp_path / "torn.npy"}, r"torn\.npy can't be read"),
        ({}, "at least one column"),
    ):
        with pytest.raises(DataError, match=why):
            NumpyFiles(columns)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a dict, of files by column, not 'x-"):
        NumpyFiles("x-*.npy")  # type: ignore[arg-type]


# ---------------------------------------------------------------- WebDataset


def write_tar(path: Path, names: list[str], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name in names:
            data = f"<{name}>".encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_files_with_one_name_are_one_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", ["a.jpg", "a.cls", "dir/b.seg.png", "dir/b.cls", "README", ".x"])
    write_tar(tmp_path / "1.tar", ["c.jpg"])
    dataset = WebDatasetFiles(tmp_path)
    assert dataset.sizes == (2, 1)
    assert samples_of(dataset, 2, 1, 0) == [
        {"__key__": "c", "jpg": b"<c.jpg>"},
        {"__key__": "dir/b", "seg.png": b"<dir/b.seg.png>", "cls": b"<dir/b.cls>"},
        {"__key__": "a", "jpg": b"<a.jpg>", "cls": b"<a.cls>"},
    ]


def test_archives_that_are_torn_are_named(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", ["a.jpg", "b.jpg"]).read_bytes()
    for name, data, why in (
        ("cut.tar", whole[: 512 + 3], r"cut\.tar is cut off in a\.jpg"),
        ("none.tar", b"not an archive at all" * 100, r"none\.tar can't be read"),
        (
            "damaged.tar",
            whole[:1024] + b"x" * 300 + whole[1324:],
            r"damaged\.tar is damaged .* after a\.jpg",
        ),
        ("short.tar", whole[:1024], r"short\.tar is damaged or cut off after a\.jpg"),
        ("empty.tar", b"", r"empty\.tar can't be read"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=why):
            WebDatasetFiles(tmp_path / name)
    write_tar(tmp_path / "packed.tar", ["a.jpg"], "w:gz")
    with pytest.raises(DataError, match=r"packed\.tar can't be read as an uncompressed tar"):
        WebDatasetFiles(tmp_path / "packed.tar")
    write_tar(tmp_path / "twice.tar", ["a.jpg", "a.jpg"])
    with pytest.raises(DataError, match=r"twice\.tar has a\.jpg twice"):
        WebDatasetFiles(tmp_path / "twice.tar")


@pytest.mark.parametrize("change", ["cut off", "replaced", "gone"])
def test_an_archive_that_changes_after_it_was_listed_is_named(tmp_path: Path, change: str) -> None:
    path = write_tar(tmp_path / "a.tar", ["a.jpg", "b.jpg"])
    dataset = WebDatasetFiles(path)
    if change == "cut off":
        path.write_bytes(path.read_bytes()[:1030])
    elif change == "replaced":  # by one of the same size
        write_tar(tmp_path / "b.tar", ["c.jpg", "d.jpg"]).replace(path)
    else:
        path.unlink()
    text = r"a\.tar can't be read" if change == "gone" else r"a\.tar was changed or replaced"
    with pytest.raises(DataError, match=text):
        samples_of(dataset, 1)


def test_samples_of_archives_are_read_where_they_are_transformed(tmp_path: Path) -> None:
    """In a worker, if there is one; so what travels there is where they are."""
    dataset = WebDatasetFiles(write_tar(tmp_path / "a.tar", ["a.jpg", "b.jpg"]))
    [taken] = dataset.load(0).take(np.array([1]))
    assert isinstance(taken, Deferred)
    assert taken.read() == {"__key__": "b", "jpg": b"<b.jpg>"}


def test_large_lists_of_numbers_are_arrays(tmp_path: Path) -> None:
    column = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.large_list(pa.float32()))
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    found = samples_of(ParquetFiles(tmp_path / "a.parquet"))["x"]
    np.testing.assert_array_equal(found, np.array([[1, 2], [3, 4]], np.float32))


def test_a_shard_of_npy_files_is_read_as_a_whole_and_of_about_16_mib(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 1 << 20), np.float32))
    dataset = NumpyFiles({"x": tmp_path / "x.npy"})
    assert dataset.sizes == (4, 4, 2)
    found = dataset.read(2)["x"]
    assert not isinstance(found, np.memmap)
    assert found.flags.owndata


def write_npy(path: Path, start: int, stop: int) -> Path:
    np.save(path, np.arange(3 * start, 3 * stop, dtype=np.float32).reshape(-1, 3))
    return path


def write_samples(path: Path, start: int, stop: int) -> Path:
    return write_tar(path, [f"{number}.{end}" for number in range(start, stop) for end in "xy"])


def damaged(content: bytes, chance: random.Random) -> bytes:
    """``content`` with changed, lost or new bytes, mostly near an end, where headers are."""

    def place() -> int:
        near = min(chance.choice([200, 1500, len(content)]), len(content))
        return chance.choice([chance.randrange(near), len(content) - 1 - chance.randrange(near)])

    changed, at = bytearray(content), place()
    match chance.choice(["bit", "bytes", "cut", "insert", "zeros"]):
        case "bit":
            changed[at] ^= 1 << chance.randrange(8)
        case "bytes":
            for _ in range(chance.randrange(2, 20)):
                changed[place()] = chance.randrange(256)
        case "cut":
            del changed[at:]
        case "insert":
            changed[at:at] = chance.randbytes(chance.randrange(1, 9))
        case "zeros":
            changed[at : at + 16] = bytes(len(changed[at : at + 16]))
    return bytes(changed)


@pytest.mark.filterwarnings("default")  # NumPy's, of headers that look like Python 2's
@pytest.mark.parametrize(
    ("kind", "write", "ending"),
    [
        (lambda path: NumpyFiles({"x": path}), write_npy, "npy"),
        (ParquetFiles, write_parquet, "parquet"),
        (ArrowFiles, write_arrow, "arrow"),
        (WebDatasetFiles, write_samples, "tar"),
    ],
    ids=["npy", "parquet", "arrow", "tar"],
)
def test_damage_of_any_kind_is_found_as_a_data_error_or_not_at_all(
    kind: Any, write: Any, ending: str, tmp_path: Path
) -> None:
    content = write(tmp_path / f"right.{ending}", 0, 8).read_bytes()
    path, errors = tmp_path / f"wrong.{ending}", []
    for seed in range(400):
        path.write_bytes(damaged(content, random.Random(seed)))
        try:
            dataset = kind(path)
            for shard in range(len(dataset.sizes)):
                if dataset.sizes[shard]:
                    one_by_one(dataset.load(shard).take(np.zeros(1, np.int64)))
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert all(str(path) in error for error in errors)
