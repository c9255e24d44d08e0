"""A package on its way between the stores of nodes: whole, from many, past liars and deaths."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck._core.cluster.content.package import Package, scanned
from potluck._core.cluster.content.shelf import Shelf
from potluck._core.cluster.content.store import ContentStore, Terms
from potluck._core.wire import bulk
from potluck._core.wire.bulk import CHUNK_BYTES
from potluck.errors import ConfigurationError, LinkError, ProtocolError
from support.requests import Nodes

ADA, BOB, CARL, EVE = "a1" * 32, "b2" * 32, "c3" * 32, "e5" * 32
ALL = Terms(lambda node, package: True)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three chunks and a bit, two small files, and one that is empty."""
    root = tmp_path / "folder"
    (root / "below").mkdir(parents=True)
    (root / "big").write_bytes(os.urandom(3 * CHUNK_BYTES + 10))
    (root / "below" / "small").write_bytes(b"small")
    (root / "other").write_bytes(b"other")
    (root / "empty").touch()
    (root / "other").chmod(0o755)
    return root


PATHS = ("big", "below/small", "other", "empty")


def store_of(nodes: Nodes, root: Path, me: str, terms: Terms = ALL) -> ContentStore:
    store = nodes.store(root / me[:2], me)
    store.open("data", terms)
    return store


def shelf_of(root: Path, me: str) -> Shelf:
    return Shelf(root / me[:2] / "data")


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def same(package: Package, folder: Path, shelf: Shelf, target: Path) -> bool:
    shelf.unpack(package, target)
    return all((target / path).read_bytes() == (folder / path).read_bytes() for path in PATHS)


def test_a_package_arrives_as_it_was_and_only_what_is_new_is_sent_again(
    nodes: Nodes, folder: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        package = ada.add("data", folder, PATHS)
        assert not bob.has("data", package.name)
        came: dict[str, int] = {}

        def on_progress(num_bytes: int, node: str) -> None:
            came[node] = came.get(node, 0) + num_bytes

        await bob.fetch("data", package.name, on_progress=on_progress)
        assert came == {ADA: package.num_bytes}
        assert bob.has("data", package.name)
        assert same(package, folder, shelf_of(tmp_path, BOB), tmp_path / "out")
        assert os.access(tmp_path / "out" / "other", os.X_OK)
        (tmp_path / "out" / "other").write_text("a job may write to its copy")
        nodes.asked.clear()
        await bob.fetch("data", package.name)
        assert not nodes.asked, "all of it is here"
        (folder / "other").write_bytes(b"changed")
        second = ada.add("data", folder, PATHS)
        await bob.fetch("data", second.name)
        assert [each.count for each in nodes.parts(ADA)] == [len(b"changed")]
        assert same(second, folder, shelf_of(tmp_path, BOB), tmp_path / "second")

    play(story)


def test_what_one_fetching_node_has_it_sends_to_another(
    nodes: Nodes, folder: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        ada, bob, carl = (store_of(nodes, tmp_path, each) for each in (ADA, BOB, CARL))
        package = ada.add("data", folder, PATHS)
        fetches = (bob.fetch("data", package.name), bob.fetch("data", package.name))
        await asyncio.gather(*fetches, carl.fetch("data", package.name))
        for who in (BOB, CARL):
            assert same(package, folder, shelf_of(tmp_path, who), tmp_path / f"out-{who[:2]}")
        ada_sent = sum(each.count for each in nodes.parts(ADA))
        assert package.num_bytes <= ada_sent < 2 * package.num_bytes
        assert nodes.parts(BOB) or nodes.parts(CARL)
        del nodes.answers[ADA]
        await (dan := store_of(nodes, tmp_path, "d4" * 32)).fetch("data", package.name)
        assert dan.has("data", package.name), "from the two, without the first"

    play(story)


def flipped(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
    if isinstance(request, bulk.PartRequest) and isinstance(answer, bulk.Part):
        data = bytes([answer.data[0] ^ 1]) + answer.data[1:]
        return msgspec.structs.replace(answer, data=data)
    return answer


def poisoned(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
    """A list of chunks of its own making."""
    if isinstance(request, bulk.DescriptionRequest) and isinstance(answer, bulk.Part):
        return msgspec.structs.replace(answer, data=answer.data[:-32] + bytes(32))
    return answer


def endless(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
    if isinstance(answer, bulk.Part) and isinstance(request, bulk.DescriptionRequest):
        return msgspec.structs.replace(answer, size=1 << 40)
    return answer


def short(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
    if isinstance(answer, bulk.Part) and isinstance(request, bulk.PartRequest):
        return msgspec.structs.replace(answer, data=answer.data[:-1])
    return answer


def no_such_bitmap(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
    return bulk.Holding(b"\xff" * 9) if isinstance(answer, bulk.Holding) else answer


@pytest.mark.parametrize("lie", [flipped, poisoned, endless, short])
def test_a_node_that_lies_is_named_and_the_others_are_asked(
    nodes: Nodes, folder: Path, tmp_path: Path, lie: Any
) -> None:
    async def story() -> None:
        eve, ada, bob = (store_of(nodes, tmp_path, each) for each in (EVE, ADA, BOB))
        package = ada.add("data", folder, PATHS)
        await eve.fetch("data", package.name)
        nodes.change[EVE] = lie
        await bob.fetch("data", package.name, first=EVE)
        assert same(package, folder, shelf_of(tmp_path, BOB), tmp_path / "out")
        assert len(nodes.parts(EVE)) <= 40, "it is not asked again"
        if lie is not endless:  # it is a wrong answer, of which nothing was taken
            assert [note for note in nodes.notes if note.startswith(EVE)], nodes.notes

    play(story)


@pytest.mark.parametrize("lie", [flipped, poisoned, endless, short, no_such_bitmap])
def test_of_what_only_a_liar_has_nothing_is_kept(
    nodes: Nodes, folder: Path, tmp_path: Path, lie: Any
) -> None:
    nodes.patience_s = 0.5

    async def story() -> None:
        eve, bob = store_of(nodes, tmp_path, EVE), store_of(nodes, tmp_path, BOB)
        package = eve.add("data", folder, PATHS)
        nodes.change[EVE] = lie
        with pytest.raises(LinkError, match=r"no node sends|has this package"):
            await bob.fetch("data", package.name)
        assert not bob.has("data", package.name)
        assert not list((tmp_path / BOB[:2]).rglob("objects/*"))

    play(story)


def test_a_fetch_that_was_killed_goes_on_where_it_was(
    nodes: Nodes, folder: Path, tmp_path: Path
) -> None:
    """What the disk has is verified again: a chunk that was cut off by the kill is fetched."""

    async def story() -> None:
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        package = ada.add("data", folder, PATHS)
        came = asyncio.Event()
        fetching = asyncio.create_task(
            bob.fetch("data", package.name, on_progress=lambda count, node: came.set())
        )
        await came.wait()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        shelf = shelf_of(tmp_path, BOB)
        before = shelf.present(package)
        assert 0 < before.sum() < len(before)
        again, missing = store_of(nodes, tmp_path, BOB), []
        await again.fetch(
            "data", package.name, on_begin=lambda download, count: missing.append(count)
        )
        assert missing == [int(package.sizes[~before].sum())]
        assert same(package, folder, shelf, tmp_path / "out")
        [part] = (tmp_path / BOB[:2]).rglob(f"objects/*-{3 * CHUNK_BYTES + 10}")
        part.rename(part.parent.parent / "partial" / part.name)
        with (part.parent.parent / "partial" / part.name).open("r+b") as file:
            file.seek(CHUNK_BYTES + 7)
            file.write(b"cut off")
        last = store_of(nodes, tmp_path, BOB)
        await last.fetch(
            "data", package.name, on_begin=lambda download, count: missing.append(count)
        )
        assert missing[1] == CHUNK_BYTES
        assert same(package, folder, shelf, tmp_path / "last")

    play(story)


def test_a_hash_is_no_capability(nodes: Nodes, folder: Path, tmp_path: Path) -> None:
    """Who knows the name of a package gets it only if the terms say so, and is told the same of
    what it may not have and of what does not exist."""

    async def story() -> None:
        ada = store_of(nodes, tmp_path, ADA, Terms(lambda node, package: node == BOB))
        package = ada.add("data", folder, PATHS)
        ada.open("checkpoint", Terms())
        for who, namespace, name in (
            (EVE, "data", package.name),
            (EVE, "data", bytes(32)),
            (BOB, "checkpoint", package.name),
            (BOB, "wheel", package.name),
        ):
            with pytest.raises(ProtocolError, match=r"^this node has no such package$"):
                await ada.answer(who, bulk.DescriptionRequest(namespace, name))
            with pytest.raises(ProtocolError, match=r"^this node has no such package$"):
                await ada.answer(who, bulk.PartRequest(namespace, name, 0, 5))
            holding = await ada.answer(who, bulk.HoldingRequest(namespace, name))
            assert holding == bulk.Holding()
        part = await ada.answer(BOB, bulk.PartRequest("data", package.name, 0, 5))
        assert isinstance(part, bulk.Part)
        for begin, count in ((package.num_bytes - 1, 2), ((1 << 50) - 1, 1)):
            with pytest.raises(ProtocolError, match="does not have these chunks"):
                await ada.answer(BOB, bulk.PartRequest("data", package.name, begin, count))

    play(story)


def test_files_are_offered_where_they_are(nodes: Nodes, folder: Path, tmp_path: Path) -> None:

    async def story() -> None:
        ada, bob, eve = (store_of(nodes, tmp_path, each, Terms()) for each in (ADA, BOB, EVE))
        package = scanned(folder, PATHS)
        ada.offer("data", folder, package, to=BOB)
        await bob.fetch("data", package.name)
        assert same(package, folder, shelf_of(tmp_path, BOB), tmp_path / "out")
        assert not (tmp_path / ADA[:2]).exists(), "nothing was copied there"
        with pytest.raises(ProtocolError, match="no such package"):
            await ada.answer(EVE, bulk.DescriptionRequest("data", package.name))
        (folder / "other").write_bytes(b"longer than it was")
        with pytest.raises(ConfigurationError, match="was changed while it was being sent"):
            await ada.answer(BOB, bulk.PartRequest("data", package.name, package.num_bytes - 5, 5))
        ada.withdraw("data", package.name, to=BOB)
        with pytest.raises(ProtocolError, match="no such package"):
            await ada.answer(BOB, bulk.DescriptionRequest("data", package.name))
        del eve

    play(story)


def test_a_quota_makes_room_by_what_was_used_longest_ago_and_never_by_what_is_held(
    nodes: Nodes, tmp_path: Path
) -> None:
    async def story() -> None:
        ada = store_of(nodes, tmp_path, ADA)
        bob = store_of(nodes, tmp_path, BOB, Terms(quota=10_000))
        packages = []
        for number in range(4):
            (tmp_path / "f").write_bytes(bytes([number]) * 4096)
            packages.append(ada.add("data", tmp_path, ["f"]).name)
        for number, name in enumerate(packages[:2]):
            await bob.fetch("data", name)
            record = tmp_path / BOB[:2] / "data" / "packages" / name.hex()
            os.utime(record, (number, number))
        bob.hold("data", packages[0])
        assert [(kept.package, held) for kept, held in bob.usage()["data"]] == [
            (packages[1], False),
            (packages[0], True),
        ]
        await bob.fetch("data", packages[2])
        assert [bob.has("data", name) for name in packages] == [True, False, True, False]
        bob.hold("data", packages[2])
        nodes.asked.clear()
        with pytest.raises(ConfigurationError, match=r"4\.0 KiB more do not fit: data may take"):
            await bob.fetch("data", packages[3])
        assert not nodes.parts(ADA), "refused before it is fetched"
        assert not bob.has("data", packages[3])
        bob.release("data", packages[0])
        await bob.fetch("data", packages[3])
        assert [bob.has("data", name) for name in packages] == [False, False, True, True]
        assert bob.prune("data", 0) == [packages[3]]

    play(story)


def test_two_files_of_one_content_are_sent_and_kept_once(nodes: Nodes, tmp_path: Path) -> None:
    async def story() -> None:
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        root = tmp_path / "twice"
        root.mkdir()
        for name in ("one", "two"):
            (root / name).write_bytes(b"the same")
        package = ada.add("data", root, ["one", "two"])
        await bob.fetch("data", package.name)
        assert [each.count for each in nodes.parts(ADA)] == [len(b"the same")]
        shelf_of(tmp_path, BOB).unpack(package, tmp_path / "out")
        assert (tmp_path / "out" / "two").read_bytes() == b"the same"
        (root / "two").write_bytes(b"another one")
        second = ada.add("data", root, ["one", "two"])
        await bob.fetch("data", second.name)
        bob.delete("data", [package.name])
        assert bob.has("data", second.name), "of the deleted package it keeps what it needs"
        bob.delete("data", [second.name])
        assert not list((tmp_path / BOB[:2]).rglob("objects/*"))

    play(story)


def test_what_is_deleted_meanwhile_breaks_no_fetch_and_what_a_kill_left_goes(
    nodes: Nodes, folder: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        package = ada.add("data", folder, PATHS)
        partial, deleted = tmp_path / BOB[:2] / "data" / "partial", list[list[bytes]]()
        await bob.fetch(
            "data",
            package.name,
            on_progress=lambda count, node: deleted.append(bob.delete("data", [])),
        )
        assert same(package, folder, shelf_of(tmp_path, BOB), tmp_path / "out")
        for name in (".young", ".old"):
            (partial / name).touch()
        os.utime(partial / ".old", (1, 1))
        bob.delete("data", [package.name])
        assert [path.name for path in partial.iterdir()] == [".young"]
        assert not list((tmp_path / BOB[:2]).rglob("objects/*"))

    play(story)


def test_a_file_that_is_about_to_get_its_name_is_not_swept(
    nodes: Nodes, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fetch sweeps, beside the others of its machine."""

    async def story() -> None:
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        rename = Path.rename

        def sweep_and_rename(path: Path, target: Path) -> Path:
            for store in (ada, bob):
                store.delete("data", [])
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", sweep_and_rename)
        package = ada.add("data", folder, PATHS)
        await bob.fetch("data", package.name)
        assert same(package, folder, shelf_of(tmp_path, BOB), tmp_path / "out")

    play(story)


def test_only_the_files_that_are_wanted_are_fetched_and_others_on_demand(
    nodes: Nodes, folder: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        package = ada.add("data", folder, PATHS)
        contents = {file.path: file.content for file in package.manifest.files}
        await bob.fetch("data", package.name, wanted=lambda file: file.path == "other")
        shelf = shelf_of(tmp_path, BOB)
        assert [shelf.has(contents[path]) for path in PATHS] == [False, False, True, False]
        assert not bob.has("data", package.name)
        await bob.fetch(
            "data",
            package.name,
            wanted=lambda file: file.path == "empty",
            on_begin=lambda download, missing: download.prefer([contents["below/small"]]),
        )
        assert [shelf.has(contents[path]) for path in PATHS] == [False, True, True, True]

    play(story)


def test_of_many_nodes_that_fetch_at_once_all_have_it(nodes: Nodes, tmp_path: Path) -> None:
    """More than requests may be open at one time: nobody's place is taken by those with nothing."""

    async def story() -> None:
        others = [store_of(nodes, tmp_path, f"{number:02x}" * 32) for number in range(12)]
        ada = store_of(nodes, tmp_path, ADA)
        (tmp_path / "file").write_bytes(os.urandom(2 * CHUNK_BYTES))
        name = ada.add("data", tmp_path, ["file"]).name
        await asyncio.gather(*(each.fetch("data", name) for each in others))
        assert all(each.has("data", name) for each in others)

    play(story)


def test_a_second_copy_of_a_chunk_that_comes_late_changes_nothing(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eve's answer for a chunk comes once the file is whole by ada's: nothing is written by it, and
    no file of the fetch is made again."""
    monkeypatch.setattr("potluck._core.cluster.content.swarm.PATIENCE_S", 0.2)

    async def story() -> None:
        ada, eve, bob = (store_of(nodes, tmp_path, each) for each in (ADA, EVE, BOB))
        (tmp_path / "file").write_bytes(os.urandom(2 * CHUNK_BYTES))
        package = ada.add("data", tmp_path, ["file"])
        await eve.fetch("data", package.name)
        shelf, written = shelf_of(tmp_path, BOB), list[int]()
        write, finish, late = Shelf.write, Shelf.finish, asyncio.Event()

        async def slow(who: str, request: bulk.Request) -> bulk.Response:
            if isinstance(request, bulk.PartRequest):
                await late.wait()
            return await eve.answer(who, request)

        def counted(self: Shelf, content: Any, offset: int, data: Any) -> None:
            written.append(offset)
            write(self, content, offset, data)

        loop = asyncio.get_running_loop()

        def finished(self: Shelf, content: Any) -> None:
            """The second copies arrive while the file is given its name."""
            finish(self, content)
            loop.call_soon_threadsafe(late.set)
            asyncio.run_coroutine_threadsafe(arrivals(), loop).result(30)

        async def arrivals() -> None:
            for _ in range(5000):
                await asyncio.sleep(0)

        nodes.answers = {EVE: slow, ADA: ada.answer}  # eve is asked first
        monkeypatch.setattr(Shelf, "write", counted)
        monkeypatch.setattr(Shelf, "finish", finished)
        await bob.fetch("data", package.name)
        assert sorted(written) == [0, CHUNK_BYTES]
        assert not list((tmp_path / BOB[:2] / "data" / "partial").iterdir())
        content = package.contents[0]
        assert shelf.path_of(content).read_bytes() == (tmp_path / "file").read_bytes()

    play(story)


def test_members_that_send_next_to_nothing_keep_nobody_from_the_one_that_sends(
    nodes: Nodes, tmp_path: Path
) -> None:
    """They take all requests that may be open; none of them ever ends."""

    async def story() -> None:
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        (tmp_path / "file").write_bytes(os.urandom(20 * CHUNK_BYTES))
        package = ada.add("data", tmp_path, ["file"])

        async def drips(who: str, request: bulk.Request) -> bulk.Response:
            if isinstance(request, bulk.PartRequest):
                await asyncio.Event().wait()
            return await ada.answer(who, request)

        answers = dict(nodes.answers)
        nodes.answers.clear()
        nodes.answers.update({f"{number:02x}" * 32: drips for number in range(10)}, **answers)
        await bob.fetch("data", package.name)
        assert bob.has("data", package.name)

    play(story)


def test_of_fetches_at_one_time_those_begin_that_fit_into_the_quota_together(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Room is claimed before anything is fetched."""

    async def story() -> None:
        ada = store_of(nodes, tmp_path, ADA)
        bob = store_of(nodes, tmp_path, BOB, Terms(quota=10_000))
        names = []
        for number in range(3):
            (tmp_path / "f").write_bytes(bytes([number]) * 6000)
            names.append(ada.add("data", tmp_path, ["f"]).name)
        decided = asyncio.Event()

        async def late(who: str, request: bulk.Request) -> bulk.Response:
            if isinstance(request, bulk.PartRequest):
                await decided.wait()
            return await ada.answer(who, request)

        nodes.answers[ADA] = late
        fetches = [asyncio.create_task(bob.fetch("data", name)) for name in names]
        for _ in range(2):
            done, _ = await asyncio.wait(fetches, return_when=asyncio.FIRST_COMPLETED)
            fetches = [each for each in fetches if each not in done]
            for each in done:
                with pytest.raises(ConfigurationError, match="more do not fit"):
                    await each
            if len(fetches) == 1:
                break
        decided.set()
        [package] = await asyncio.gather(*fetches)
        assert bob.has("data", package.name)
        assert [kept.num_bytes for kept, _ in bob.usage()["data"]] == [6000]

    play(story)


@pytest.mark.parametrize("way", ["add", "fetch"])
def test_what_makes_room_takes_no_file_of_the_package_that_is_to_come(
    nodes: Nodes, tmp_path: Path, way: str
) -> None:
    """The oldest package goes, but not the file that the next one has, too."""

    async def story() -> None:
        ada = store_of(nodes, tmp_path, ADA)
        bob = store_of(nodes, tmp_path, BOB, Terms(quota=10_000))
        for number, name in enumerate(("a", "b", "c")):
            (tmp_path / name).write_bytes(bytes([number]) * 4096)
        first, second = (ada.add("data", tmp_path, ["a", last]) for last in ("b", "c"))
        await bob.fetch("data", first.name)
        if way == "fetch":
            await bob.fetch("data", second.name)
        else:
            bob.add("data", tmp_path, ["a", "c"])
        assert bob.has("data", second.name)
        assert not bob.has("data", first.name)
        shelf = shelf_of(tmp_path, BOB)
        assert all(shelf.path_of(content).is_file() for content in second.contents)

    play(story)


def test_a_package_that_is_held_while_others_are_pruned_stays(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held after the choice of what goes, and before that goes."""

    async def story() -> None:
        ada = store_of(nodes, tmp_path, ADA)
        (tmp_path / "f").write_bytes(b"needed")
        name = ada.add("data", tmp_path, ["f"]).name
        delete = ada.delete

        def held_meanwhile(*given: Any) -> list[bytes]:
            ada.hold("data", name)
            return delete(*given)

        monkeypatch.setattr(ada, "delete", held_meanwhile)
        ada.prune("data", 0)
        assert ada.has("data", name)

    play(story)


def test_what_is_kept_while_files_are_swept_waits_for_the_end(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So whoever keeps a package sees afterwards which of its files went."""

    async def story() -> None:
        ada = store_of(nodes, tmp_path, ADA)
        (tmp_path / "f").write_bytes(b"needed")
        package = ada.add("data", tmp_path, ["f"])
        shelf, packages = ada._shelves["data"], Shelf.packages
        again: list[Future[Package]] = []
        loop = asyncio.get_running_loop()

        def meanwhile(self: Shelf) -> Any:
            found = packages(self)
            if not again:
                adding = asyncio.to_thread(ada.add, "data", tmp_path, ["f"])
                again.append(asyncio.run_coroutine_threadsafe(adding, loop))
            return found

        monkeypatch.setattr(Shelf, "packages", meanwhile)
        shelf.forget(package.name)
        await asyncio.to_thread(shelf.sweep)
        await asyncio.wrap_future(again[0])
        assert ada.has("data", package.name)
        assert shelf.path_of(package.contents[0]).read_bytes() == b"needed"

    play(story)


def test_what_one_process_uses_another_one_does_not_delete(tmp_path: Path) -> None:
    mine, other = Shelf(tmp_path / "data"), Shelf(tmp_path / "data")
    with mine.locked(shared=True) as uses, other.locked(shared=False) as is_alone:
        assert uses
        assert not is_alone
    with other.locked(shared=False) as is_alone:
        assert is_alone


def test_a_fetch_that_is_cancelled_while_its_room_is_made_claims_nothing(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        (tmp_path / "f").write_bytes(b"needed")
        name = ada.add("data", tmp_path, ["f"]).name
        making, goes_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

        make_room, ended = bob._make_room, threading.Event()

        def late(*given: Any) -> None:
            loop.call_soon_threadsafe(making.set)
            assert goes_on.wait(30)
            make_room(*given)
            ended.set()

        monkeypatch.setattr(bob, "_make_room", late)
        fetching = asyncio.create_task(bob.fetch("data", name))
        await making.wait()
        fetching.cancel()
        loop.call_soon(goes_on.set)
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert await asyncio.to_thread(ended.wait, 30)
        assert not bob._claims

    play(story)
