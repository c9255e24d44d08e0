"""A script's folder on its way to other nodes: its parts, and what can't be written there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from potluck._core.cluster.code_store import package as packages
from potluck._core.cluster.code_store.package import (
    PackageFile,
    PackageFiles,
    PackageManifest,
    PackageServer,
    decode_manifest,
    encode_manifest,
    fetch_package,
    objection_to_path,
    unpacked_manifest,
)
from potluck._core.cluster.jobs.placement import differences
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.wire import peers
from potluck.errors import LinkError, ProtocolError
from support.requests import asking

ADA, BOB = "a1" * 32, "b2" * 32


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


def test_a_manifest_names_the_same_folder_alike(folder: Path) -> None:
    manifest = unpacked_manifest(folder)
    assert [file.path for file in manifest.files] == [
        *(".config", "data/keep.csv", "lib/model.py", "run.sh", "train.py")
    ]
    assert [file.path for file in manifest.files if file.executable] == ["run.sh"]
    data, name = encode_manifest(manifest)
    assert decode_manifest(data, name) == manifest
    assert encode_manifest(unpacked_manifest(folder))[1] == name
    (folder / "train.py").write_text("print('changed')")
    assert encode_manifest(unpacked_manifest(folder))[1] != name


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
        content = packages.hashlib.sha256(b"x").digest()
        manifest = PackageManifest((PackageFile(path, 1, content),))
        data, name = encode_manifest(manifest)
        with pytest.raises(ProtocolError):
            decode_manifest(data, name)
        store = PackageFiles(tmp_path / "store")
        store.add(b"x", content)
        with pytest.raises(ProtocolError):
            store.unpack(manifest, name)
        assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [content.hex()]


@pytest.mark.parametrize("path", ["train.py", "a/b/c", "ä ö.txt", ".hidden", "a..b", "console.py"])
def test_plain_paths_may_travel(path: str) -> None:
    assert objection_to_path(path) == ""


@pytest.mark.parametrize(
    "files",
    [
        (PackageFile("A.py", 1, bytes(32)), PackageFile("a.py", 1, bytes(32))),
        (PackageFile("a", 1, bytes(32)), PackageFile("a/b", 1, bytes(32))),
        (PackageFile("a", packages.MAX_BYTES, bytes(32)), PackageFile("b", 1, bytes(32))),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(files: tuple[PackageFile, ...]) -> None:
    data, name = encode_manifest(PackageManifest(files))
    with pytest.raises(ProtocolError):
        decode_manifest(data, name)


def test_junk_is_no_manifest() -> None:
    for data in (b"", b"\xc1", b"\x81\xa5files\xa1x", msgspec.msgpack.encode({"files": [1]})):
        with pytest.raises(ProtocolError):
            decode_manifest(data, packages.hashlib.sha256(data).digest())
    with pytest.raises(ProtocolError, match="hash"):
        decode_manifest(encode_manifest(PackageManifest(()))[0], bytes(32))


class Wire:
    """Two nodes and the messages between them; ``change`` plays a node that lies."""

    def __init__(self, store: PackageFiles) -> None:
        self.sent: list[peers.PackagePart] = []
        self.change: Change = lambda part, wanted: part
        self.server = PackageServer()
        self._store = store

    async def fetch(self, package: bytes) -> Path:
        return await fetch_package(asking(self._answer, BOB), self._store, ADA, package)

    def _answer(self, node: str, wanted: peers.PartRequest) -> peers.PackagePart:
        self.sent.append(self.change(self.server.part(wanted), wanted))
        return self.sent[-1]


Change = Callable[[peers.PackagePart, peers.PartRequest], peers.PackagePart]


def test_a_package_arrives_as_it_was_and_only_what_is_new_is_sent_again(
    folder: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        (folder / "large.npy").write_bytes(os.urandom(700_000))
        wire = Wire(PackageFiles(tmp_path / "store"))
        first = wire.server.offer(folder, unpacked_manifest(folder))
        target = await wire.fetch(first)
        for file in unpacked_manifest(folder).files:
            assert (target / file.path).read_bytes() == (folder / file.path).read_bytes()
        assert os.access(target / "run.sh", os.X_OK)
        assert not os.access(target / "train.py", os.X_OK) or os.geteuid() == 0
        assert len(list(target.rglob("*"))) == 8
        assert max(len(part.data) for part in wire.sent) == peers.MAX_PART
        wire.sent.clear()
        (folder / "train.py").write_text("print('changed')")
        second = wire.server.offer(folder, unpacked_manifest(folder))
        other = await wire.fetch(second)
        assert (other / "train.py").read_text() == "print('changed')"
        assert (target / "train.py").read_text() == "print('hello')"
        assert len(wire.sent) == 2, "the manifest and one file"

    asyncio.run(story())


def test_a_node_that_lies_is_found_out(folder: Path, tmp_path: Path) -> None:
    def change_a_byte(part: peers.PackagePart, wanted: peers.PartRequest) -> peers.PackagePart:
        if part.data:
            return msgspec.structs.replace(part, data=bytes([part.data[0] ^ 1]) + part.data[1:])
        return part

    def only_files(part: peers.PackagePart, wanted: peers.PartRequest) -> peers.PackagePart:
        return change_a_byte(part, wanted) if wanted.file else part

    def endless(part: peers.PackagePart, wanted: peers.PartRequest) -> peers.PackagePart:
        return msgspec.structs.replace(part, size=(1 << 40) - 1)

    def empty(part: peers.PackagePart, wanted: peers.PartRequest) -> peers.PackagePart:
        return msgspec.structs.replace(part, data=b"")

    async def story() -> None:
        for lie in (change_a_byte, only_files, endless, empty):
            store = PackageFiles(tmp_path / lie.__name__)
            wire = Wire(store)
            wire.change = lie
            name = wire.server.offer(folder, unpacked_manifest(folder))
            with pytest.raises(ProtocolError):
                await wire.fetch(name)
            assert not any((tmp_path / lie.__name__).glob("packages/*"))

    asyncio.run(story())


def test_what_is_not_there_changed_or_gone_is_said(folder: Path, tmp_path: Path) -> None:
    async def story() -> None:
        wire = Wire(PackageFiles(tmp_path / "store"))
        with pytest.raises(LinkError, match="no such package"):
            await wire.fetch(bytes(32))
        name = wire.server.offer(folder, unpacked_manifest(folder))
        (folder / "train.py").write_text("changed after it was scanned")
        with pytest.raises(LinkError, match="changed while it was being sent"):
            await wire.fetch(name)
        (folder / "train.py").write_text("print('hellO')")
        with pytest.raises(ProtocolError, match="changed while it was being sent"):
            await wire.fetch(name)
        wire.server.withdraw(name)
        with pytest.raises(LinkError, match="no such package"):
            await wire.fetch(name)

    asyncio.run(story())


def test_only_files_of_an_offered_package_are_sent(folder: Path) -> None:
    server = PackageServer()
    name = server.offer(folder, unpacked_manifest(folder))
    for wanted in (peers.PartRequest(bytes(32), b"", 0), peers.PartRequest(name, bytes(32), 0)):
        with pytest.raises(ProtocolError, match="no such"):
            server.part(wanted)


def test_versions_that_do_not_fit_are_told_with_the_name_of_the_node() -> None:
    pytest.importorskip("torch")
    mine = own_versions()
    fits = msgspec.structs.replace(mine, python=mine.python.rpartition(".")[0] + ".99")
    assert differences("attic", mine, fits) == differences("laptop", mine, mine) == []
    cases = {
        "has Python 3.9.1": msgspec.structs.replace(mine, python="3.9.1"),
        "has torch 1.0": msgspec.structs.replace(mine, torch="1.0"),
        "has no torch": msgspec.structs.replace(mine, torch=""),
        "has potluck 9": msgspec.structs.replace(mine, potluck="9"),
        "big-endian": msgspec.structs.replace(mine, byte_order="big"),
    }
    for text, theirs in cases.items():
        [told] = differences("attic", mine, theirs)
        assert text in told
        assert "attic" in told
