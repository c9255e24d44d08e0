"""Packages: what is in them, what verifies them, and what can't be written anywhere."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from potluck._core.cluster.content.package import (
    MAX_CODE_BYTES,
    Content,
    Package,
    PackageFile,
    PackageManifest,
    check_manifest,
    decode_description,
    objection_to_path,
    root_of,
    scanned,
)
from potluck._core.cluster.content.shelf import Shelf
from potluck._core.cluster.jobs.placement import differences
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.wire.bulk import CHUNK_BYTES
from potluck.errors import ProtocolError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for path, text in {
        "train.py": "print('hello')",
        "lib/model.py": "W = 1",
        "data/keep.csv": "1,2",
        ".config": "named",
        "run.sh": "#!/bin/sh\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "run.sh").chmod(0o755)
    return root


def everything(folder: Path) -> Package:
    files = (path for path in folder.rglob("*") if path.is_file())
    return scanned(folder, (path.relative_to(folder).as_posix() for path in files))


def encoded(manifest: PackageManifest) -> tuple[bytes, bytes]:
    """The description of a package of small files, and its name."""
    package = Package(manifest, {})
    return package.description, package.name


def test_a_package_names_the_same_folder_alike(folder: Path) -> None:
    package = everything(folder)
    assert [file.path for file in package.manifest.files] == [
        *(".config", "data/keep.csv", "lib/model.py", "run.sh", "train.py")
    ]
    assert [file.path for file in package.manifest.files if file.executable] == ["run.sh"]
    found = decode_description(package.description, package.name)
    assert found.manifest == package.manifest
    check_manifest(found.manifest)
    assert everything(folder).name == package.name
    (folder / "train.py").write_text("print('changed')")
    assert everything(folder).name != package.name


def test_each_chunk_of_a_large_file_is_verified_by_the_name_of_the_package(
    tmp_path: Path,
) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 5)
    for name, content in (("a", b"small"), ("big", data), ("copy", data), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    package = everything(tmp_path)
    hashes = [hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() for at in (0, 4 << 20, 8 << 20)]
    big = Content(root_of(len(data), hashes), len(data))
    assert package.manifest.files[1].content == package.manifest.files[2].content == big
    assert package.hashes[1:4] == hashes
    assert list(package.sizes) == [5, CHUNK_BYTES, CHUNK_BYTES, 5, 0], "a content counts once"
    assert package.chunks_of(big) == range(1, 4)
    assert package.place_of(3) == (big, 2 * CHUNK_BYTES)
    assert package.chunks_in(0, 5) == range(0, 1)
    assert package.chunks_in(4, 2) == range(0, 2)
    assert package.chunks_in(5 + CHUNK_BYTES, 1) == range(2, 3)
    assert not package.chunks_in(0, package.num_bytes + 1)
    assert decode_description(package.description, package.name).hashes == package.hashes
    for at in range(len(package.description)):
        changed = bytearray(package.description)
        changed[at] ^= 1
        with pytest.raises(ProtocolError):
            decode_description(bytes(changed), package.name)
    for wrong in (package.description[:-32], package.description + bytes(32), b""):
        with pytest.raises(ProtocolError):
            decode_description(wrong, package.name)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/etc/passwd", "../up", "a/../../up", "a//b", "./a", "a/.", "a/..", "..", "a/"),
        *("C:/x", "a\\b", "a\x00b", "a\nb", "nul", "lib/CON.py", "a.", "a /b", "x" * 2000),
        *("a/" + "y" * 300, "bad\udc80"),
    ],
)
def test_no_path_leads_out_of_the_folder(path: str, tmp_path: Path) -> None:
    assert objection_to_path(path)
    if path and len(path) < 1024 and "\udc80" not in path:
        content = Content(hashlib.sha256(b"x").digest(), 1)
        manifest = PackageManifest((PackageFile(path, 1, content.root),))
        with pytest.raises(ProtocolError):
            check_manifest(manifest)
        shelf = Shelf(tmp_path / "shelf")
        shelf.write(content, 0, b"x")
        with pytest.raises(ProtocolError):
            shelf.unpack(Package(manifest, {}), tmp_path / "target")
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == [shelf.path_of(content)]


@pytest.mark.parametrize("path", ["train.py", "a/b/c", "ä ö.txt", ".hidden", "a..b", "console.py"])
def test_plain_paths_may_travel(path: str) -> None:
    assert objection_to_path(path) == ""


@pytest.mark.parametrize(
    "files",
    [
        (PackageFile("A.py", 1, bytes(32)), PackageFile("a.py", 1, bytes(32))),
        (PackageFile("a", 1, bytes(32)), PackageFile("a/b", 1, bytes(32))),
        (PackageFile("a", MAX_CODE_BYTES, bytes(32)), PackageFile("b", 1, bytes(32))),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(files: tuple[PackageFile, ...]) -> None:
    with pytest.raises(ProtocolError):
        check_manifest(PackageManifest(files), max_bytes=MAX_CODE_BYTES)


def test_junk_is_no_description() -> None:
    for data in (b"", b"\xc1", b"\x81\xa5files\xa1x", msgspec.msgpack.encode({"files": [1]})):
        with pytest.raises(ProtocolError):
            decode_description(
                len(data).to_bytes(4, "little") + data, hashlib.sha256(data).digest()
            )
    with pytest.raises(ProtocolError, match="hash"):
        decode_description(encoded(PackageManifest(()))[0], bytes(32))
    endless = PackageManifest((PackageFile("a", (1 << 50) - 1, bytes(32)),))
    data = msgspec.msgpack.encode(endless)
    with pytest.raises(ProtocolError, match="list of chunks"):
        decode_description(len(data).to_bytes(4, "little") + data, hashlib.sha256(data).digest())


def test_versions_that_do_not_fit_are_told_with_the_name_of_the_node() -> None:
    pytest.importorskip("torch")
    mine = own_versions()
    fits = msgspec.structs.replace(mine, python=mine.python.rpartition(".")[0] + ".99")
    assert differences("attic", mine, fits) == differences("laptop", mine, mine) == []
    assert differences("attic", mine, msgspec.structs.replace(mine, potluck="9", protocol=3)) == []
    assert differences("attic", mine, msgspec.structs.replace(mine, torch="1.0")) == []
    cases = {
        "has Python 3.9.1": msgspec.structs.replace(mine, python="3.9.1"),
        "has no torch": msgspec.structs.replace(mine, torch=""),
        "(there: /old/python -m pip install --upgrade potluck": msgspec.structs.replace(
            mine, potluck="0.0.9", protocol=1, executable="/old/python"
        ),
        "big-endian": msgspec.structs.replace(mine, byte_order="big"),
    }
    for text, theirs in cases.items():
        [told] = differences("attic", mine, theirs)
        assert text in told
        assert "attic" in told
