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
    decode_manifest,
    encode_manifest,
    objection_to_path,
    unpacked_manifest,
)
from potluck._core.cluster.code_store.transfer import PackageFetcher, PackageServer
from potluck._core.cluster.jobs.placement import differences
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.wire import peers
from potluck.errors import LinkError, ProtocolError

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
        self.sent: list[peers.PeerMessage] = []
        self.change: Callable[[peers.PeerMessage], peers.PeerMessage] = lambda message: message
        self.server = PackageServer(self._to_bob)
        self.fetcher = PackageFetcher(store, self._to_ada)

    def _to_ada(self, node: str, message: peers.PeerMessage) -> bool:
        assert node == ADA
        assert isinstance(message, peers.PartWanted)
        asyncio.get_running_loop().call_soon(self.server.answer, BOB, message)
        return True

    def _to_bob(self, node: str, message: peers.PeerMessage) -> bool:
        data = peers.MESSAGE.encode(self.change(message))
        answer = peers.MESSAGE.decode(data[4:])
        assert isinstance(answer, peers.PackagePart | peers.NotHere)
        self.sent.append(answer)
        self.fetcher.arrived(ADA, answer)
        return True


def test_a_package_arrives_as_it_was_and_only_what_is_new_is_sent_again(
    folder: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        (folder / "large.npy").write_bytes(os.urandom(700_000))
        wire = Wire(PackageFiles(tmp_path / "store"))
        first = wire.server.offer(folder, unpacked_manifest(folder))
        target = await wire.fetcher.fetch(ADA, first)
        for file in unpacked_manifest(folder).files:
            assert (target / file.path).read_bytes() == (folder / file.path).read_bytes()
        assert os.access(target / "run.sh", os.X_OK)
        assert not os.access(target / "train.py", os.X_OK) or os.geteuid() == 0
        assert len(list(target.rglob("*"))) == 8
        assert (
            max(len(p.data) for p in wire.sent if isinstance(p, peers.PackagePart))
            == peers.MAX_PART
        )
        wire.sent.clear()
        (folder / "train.py").write_text("print('changed')")
        second = wire.server.offer(folder, unpacked_manifest(folder))
        other = await wire.fetcher.fetch(ADA, second)
        assert (other / "train.py").read_text() == "print('changed')"
        assert (target / "train.py").read_text() == "print('hello')"
        assert len(wire.sent) == 2, "the manifest and one file"

    asyncio.run(story())


def test_a_node_that_lies_is_found_out(folder: Path, tmp_path: Path) -> None:
    def change_a_byte(message: peers.PeerMessage) -> peers.PeerMessage:
        if isinstance(message, peers.PackagePart) and message.data:
            flipped = bytes([message.data[0] ^ 1]) + message.data[1:]
            return msgspec.structs.replace(message, data=flipped)
        return message

    def only_files(message: peers.PeerMessage) -> peers.PeerMessage:
        is_file = isinstance(message, peers.PackagePart) and message.file
        return change_a_byte(message) if is_file else message

    def endless(message: peers.PeerMessage) -> peers.PeerMessage:
        return msgspec.structs.replace(message, size=(1 << 40) - 1)

    def empty(message: peers.PeerMessage) -> peers.PeerMessage:
        return msgspec.structs.replace(message, data=b"")

    async def story() -> None:
        for lie in (change_a_byte, only_files, endless, empty):
            store = PackageFiles(tmp_path / lie.__name__)
            wire = Wire(store)
            wire.change = lie
            name = wire.server.offer(folder, unpacked_manifest(folder))
            with pytest.raises(ProtocolError):
                await wire.fetcher.fetch(ADA, name)
            assert not any((tmp_path / lie.__name__).glob("packages/*"))

    asyncio.run(story())


def test_what_is_not_there_changed_or_gone_is_said(folder: Path, tmp_path: Path) -> None:
    async def story() -> None:
        wire = Wire(PackageFiles(tmp_path / "store"))
        with pytest.raises(LinkError, match="no such package"):
            await wire.fetcher.fetch(ADA, bytes(32))
        name = wire.server.offer(folder, unpacked_manifest(folder))
        (folder / "train.py").write_text("changed after it was scanned")
        with pytest.raises(LinkError, match="changed while it was being sent"):
            await wire.fetcher.fetch(ADA, name)
        (folder / "train.py").write_text("print('hellO')")
        with pytest.raises(ProtocolError, match="changed while it was being sent"):
            await wire.fetcher.fetch(ADA, name)
        wire.server.withdraw(name)
        task = asyncio.create_task(wire.fetcher.fetch(ADA, name))
        await asyncio.sleep(0)
        wire.fetcher.lost(ADA)
        with pytest.raises(LinkError, match="the link to node"):
            await task

    asyncio.run(story())


def test_only_files_of_an_offered_package_are_sent(folder: Path) -> None:
    sent: list[peers.PeerMessage] = []

    def send(node: str, message: peers.PeerMessage) -> bool:
        sent.append(message)
        return True

    server = PackageServer(send)
    name = server.offer(folder, unpacked_manifest(folder))
    server.answer(ADA, peers.PartWanted(bytes(32), b"", 0))
    server.answer(BOB, peers.PartWanted(name, bytes(32), 0))
    assert [type(message) for message in sent] == [peers.NotHere, peers.NotHere]


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
