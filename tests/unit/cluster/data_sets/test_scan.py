"""The package of a folder of data, and what can't travel."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from potluck._core.cluster.content.package import scanned
from potluck._core.cluster.data_sets import scan
from potluck._core.cluster.data_sets.scan import Stopped, changed_file, scan_folder
from potluck.errors import ConfigurationError


def _note_total(totals: list[int], so_far: int, total: int) -> None:
    totals.append(total)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pets"
    (made / "deep").mkdir(parents=True)
    (made / "large").write_bytes(bytes(9 << 20))
    (made / "deep" / "small").write_text("small")
    for path in (made / "large", made / "deep" / "small"):
        os.utime(path, (1, 1))
    return made


def test_the_package_is_that_of_the_files(folder: Path, tmp_path: Path) -> None:
    found = scan_folder(folder, tmp_path / "cache")
    assert found.package.name == scanned(folder, ["deep/small", "large"]).name
    assert set(found.stamps) == {"deep/small", "large"}
    assert found.changed == ()


def test_only_what_changed_is_read_again(folder: Path, tmp_path: Path) -> None:
    cache, read = tmp_path / "cache", list[tuple[int, int]]()
    first = scan_folder(folder, cache)

    def on_progress(so_far: int, total: int) -> None:
        read.append((so_far, total))

    again = scan_folder(folder, cache, on_progress=on_progress)
    assert again.package.name == first.package.name
    assert read == []
    (folder / "deep" / "small").write_text("other")
    os.utime(folder / "deep" / "small", (2, 2))
    third = scan_folder(folder, cache, on_progress=on_progress)
    assert read == [(0, 5), (5, 5)]
    assert third.changed == ("deep/small",)
    assert third.package.name != first.package.name


def test_a_file_that_was_just_written_is_read_again(folder: Path, tmp_path: Path) -> None:
    """It may change once more without another time."""
    os.utime(folder / "large")
    totals = list[int]()
    for _ in range(2):
        read = list[int]()
        on_progress = partial(_note_total, read)
        scan_folder(folder, tmp_path / "cache", on_progress=on_progress)
        totals += dict.fromkeys(read)
    assert totals == [(9 << 20) + 5, 9 << 20]


def test_a_damaged_cache_is_no_cache(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"\xc1 nothing")
    assert len(scan_folder(folder, tmp_path / "cache").stamps) == 2


def test_a_stopped_scan_ends(folder: Path, tmp_path: Path) -> None:
    """Also amid a large file, of which it tells how much was read."""
    stop, read = threading.Event(), list[int]()

    def on_progress(so_far: int, total: int) -> None:
        read.append(so_far)
        if so_far > 5:
            stop.set()

    for _ in range(2):
        with pytest.raises(Stopped):
            scan_folder(folder, tmp_path / "cache", on_progress=on_progress, stop=stop)
    assert read == [0, 5, 5, 5 + (4 << 20)]


def test_a_change_after_the_scan_is_found(folder: Path, tmp_path: Path) -> None:
    stamps = scan_folder(folder, tmp_path / "cache").stamps
    assert changed_file(folder, stamps) == ""
    (folder / "large").write_text("shorter")
    assert changed_file(folder, stamps) == "large"
    (folder / "large").unlink()
    assert changed_file(folder, stamps) == "large"


def _link_out(folder: Path) -> None:
    (folder / "out").symlink_to("/etc/hostname")


def _linked_folder(folder: Path) -> None:
    (folder / "out").symlink_to("/etc")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _escape(folder: Path) -> None:
    (folder / "\x1b[2Jclear").touch()


def _odd(folder: Path) -> None:
    (folder / "con").touch()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_link_out, "out can't travel with the data set: it is a link"),
        (_linked_folder, "out can't travel with the data set: it is a link"),
        (_pipe, "pipe can't travel with the data set: it is no file"),
        (_escape, r"\\x1b\[2Jclear can't travel with the data set: it holds a character"),
        (_odd, "con can't travel with the data set: a name in it means something else"),
    ],
)
def test_what_can_not_travel_is_named(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], None], text: str
) -> None:
    spoil(folder)
    with pytest.raises(ConfigurationError, match=text):
        scan_folder(folder, tmp_path / "cache")


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="empty has no files"):
        scan_folder(tmp_path / "empty", tmp_path / "cache")


def test_too_many_files_are_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MAX_FILES", 1)
    with pytest.raises(ConfigurationError, match="more than 1 files: put them into archives"):
        scan_folder(folder, tmp_path / "cache")


def test_a_file_that_changes_while_it_is_read_is_named(folder: Path, tmp_path: Path) -> None:
    def on_progress(so_far: int, total: int) -> None:
        (folder / "large").write_text("changed")

    with pytest.raises(ConfigurationError, match="large was changed while it was being read"):
        scan_folder(folder, tmp_path / "cache", on_progress=on_progress)
