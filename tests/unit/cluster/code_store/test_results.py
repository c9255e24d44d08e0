"""Results on their way from a node to the job's starter."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from potluck._core.cluster.code_store.job_folders import (
    JobFolders,
    Record,
    ResultsClient,
    ResultsServer,
    is_wanted,
)
from potluck._core.cluster.content.download import packed
from potluck._core.cluster.content.package import (
    Content,
    Package,
    PackageFile,
    PackageManifest,
    root_of,
)
from potluck._core.cluster.fetch import Found, Holding, check_results, fetch, placed
from potluck._core.cluster.jobs.history import JobHistory
from potluck._core.cluster.members import Machine, Machines
from potluck._core.wire import bulk, peers
from potluck._core.wire.peers import JobFiles, Results, ResultsRequest
from potluck.errors import ConfigurationError, LinkError, ProtocolError
from support.requests import Nodes, asking

ADA, BOB, EVE = "a1" * 32, "b2" * 32, "e5" * 32


class Wire:
    """A client of the node ``who``, and the server of bob that it asks."""

    def __init__(self, root: Path, who: str = ADA) -> None:
        self.folders = JobFolders(root / "jobs", on_note=lambda text: None)
        self.nodes = Nodes()
        self.content = self.nodes.store(root / "content", BOB)
        self.server = ResultsServer(BOB, self.folders, self.content)
        self.who = who

    @property
    def client(self) -> ResultsClient:
        return ResultsClient(asking(self._answer, self.who), self.nodes.seen_by(self.who))

    def _answer(self, node: str, request: Any) -> Any:
        return self.server.answer(self.who, request)

    async def content_of(self, package: Package) -> bytes:
        count = package.num_bytes
        request = bulk.PartRequest("result", package.name, 0, count)
        return (await self.client.members.ask(BOB, request, bulk.Part)).data

    def ran(self, job: str, *, keeps_files: bool = False, **files: str) -> None:
        record = Record(job, ADA, keeps_files=keeps_files)
        folder = self.folders.open(record, None)
        for name, text in files.items():
            (folder.output / name).write_text(text)
        self.folders.close(folder)


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def test_only_the_starter_and_the_machine_itself_are_told_of_results(tmp_path: Path) -> None:
    async def story() -> None:
        wire = Wire(tmp_path)
        wire.ran("sweep", model="weights")
        wire.ran("federated", keeps_files=True, log="a row of data")
        for who, jobs in ((ADA, ["sweep"]), (EVE, []), (BOB, ["federated", "sweep"])):
            wire.who = who
            told = await wire.client.ask(BOB, "list")
            assert sorted(each.job for each in told.jobs) == jobs
        wire.who = ADA
        with pytest.raises(LinkError, match="there are no files of job 'federated'"):
            await wire.client.ask(BOB, "package", "federated")
        name = (await wire.client.ask(BOB, "package", "sweep")).package
        package = await wire.client.package(BOB, name)
        wire.who = EVE  # who knows the name
        with pytest.raises(LinkError, match="no such package"):
            await wire.client.package(BOB, name)
        with pytest.raises(LinkError, match="no such package"):
            await wire.content_of(package)
        holding = await wire.client.members.ask(
            BOB, bulk.HoldingRequest("result", name), bulk.Holding
        )
        assert holding == bulk.Holding(), "as if there were none"
        await wire.client.ask(BOB, "remove", "sweep")
        wire.who = ADA
        assert await wire.content_of(package) == b"weights"
        await wire.client.ask(BOB, "remove", "sweep")
        assert (await wire.client.ask(BOB, "list")).jobs == ()

    play(story)


def test_the_files_of_a_job_that_runs_are_there_and_can_not_be_removed(tmp_path: Path) -> None:
    async def story() -> None:
        wire = Wire(tmp_path)
        folder = wire.folders.open(Record("job", ADA), None)
        (folder.output / "a").write_text("so far")
        [listed] = (await wire.client.ask(BOB, "list")).jobs
        assert listed.is_running
        assert listed.num_files == 1
        with pytest.raises(LinkError, match="the job runs"):
            await wire.client.ask(BOB, "remove", "job")
        (folder.output / "a").write_text("so long")
        machines, out = machines_of(wire.client, tmp_path), tmp_path / "out"
        found = Found("job", "", 0.0, [held(listed)])
        outcome = await fetch(machines, found, "", out)
        assert (out / "a").read_text() == "so long"
        assert not outcome.missing
        (folder.output / "a").write_text("longer")
        with pytest.raises(ConfigurationError, match="is there already, and is another file"):
            await fetch(machines, found, "", out)
        assert (out / "a").read_text() == "so long"
        wire.folders.close(folder)

    play(story)


def held(files: JobFiles) -> Holding:
    return Holding(BOB, "bob", files.num_files, files.num_bytes)


def machines_of(client: ResultsClient, root: Path) -> Machines:
    def no_data() -> NoReturn:
        pytest.fail("nothing here asks for data")

    return Machines((Machine(BOB, "bob"),), client, JobHistory(root / "home"), no_data)


class Hostile:
    """A machine that answers with this manifest, and with ``content`` for every file."""

    def __init__(self, files: tuple[PackageFile, ...], content: bytes) -> None:
        lists = {file.content: hashes_of(file.size) for file in files}
        self.package = Package(PackageManifest(files), lists)
        self.content = content
        nodes = Nodes()
        nodes.answers[BOB] = self.serve
        self.client = ResultsClient(asking(self.answer, ADA), nodes.seen_by(ADA))

    def answer(self, node: str, request: ResultsRequest) -> peers.ResponseContent:
        return Results(package=self.package.name)

    async def serve(self, node: str, request: bulk.Request) -> bulk.Response:
        if isinstance(request, bulk.HoldingRequest):
            return bulk.Holding(packed(np.ones(len(self.package.hashes), bool)))
        if isinstance(request, bulk.PartRequest):
            return bulk.Part(len(self.content), self.content)
        data = self.package.description
        return bulk.Part(len(data), data[request.offset : request.offset + bulk.MAX_PART])


def hashes_of(size: int) -> list[bytes]:
    return [digest(b"x")] * Content(b"", size).num_chunks


def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("output/../../.bashrc", "leaves the folder"),
        ("/etc/cron.d/job", "not relative"),
        ("output/.ssh/authorized_keys", "no result"),
        ("output/\x1b]0;title", "special"),
        ("file", "no result"),
        ("elsewhere/model.pt", "no result"),
    ],
)
def test_a_machine_can_not_choose_a_path_outside_or_a_hidden_one(
    tmp_path: Path, path: str, reason: str
) -> None:
    async def story() -> None:
        bob = Hostile((PackageFile(path, 1, digest(b"x")),), b"x")
        machines = machines_of(bob.client, tmp_path)
        files = JobFiles("job", ADA, "", 0.0, 1, 1)
        out = tmp_path / "out"
        outcome = await fetch(machines, Found("job", "", 0.0, [held(files)]), "", out)
        assert reason in outcome.missing[0]
        assert list(tmp_path.rglob("*")) == []

    play(story)


@pytest.mark.parametrize(
    ("size", "content", "reason"),
    [
        (4, b"evil", "changed while it was being sent"),
        (3, b"evil", "another part than was asked for"),
        (5, b"evil", "another part than was asked for"),
    ],
)
def test_a_file_that_is_not_what_was_announced_is_not_kept(
    tmp_path: Path, size: int, content: bytes, reason: str
) -> None:
    async def story() -> None:
        bob = Hostile((PackageFile("output/a", size, digest(b"good")),), content)
        machines = machines_of(bob.client, tmp_path)
        files = JobFiles("job", ADA, "", 0.0, 1, 1)
        found = Found("job", "", 0.0, [held(files)])
        outcome = await fetch(machines, found, "", tmp_path / "out")
        assert reason in outcome.missing[0]
        assert list(tmp_path.rglob("*")) == []

    play(story)


def test_what_can_not_fit_or_would_go_through_a_link_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "elsewhere").symlink_to(tmp_path)
        for path, size, reason in (
            ("output/elsewhere/a", 1, "is a link"),
            ("output/a", 1 << 39, "has room for"),
        ):
            root = root_of(size, hashes_of(size))
            bob = Hostile((PackageFile(path, size, root),), b"x")
            machines = machines_of(bob.client, tmp_path)
            files = JobFiles("job", ADA, "", 0.0, 1, size)
            found = Found("job", "", 0.0, [held(files)])
            with pytest.raises(ConfigurationError, match=reason):
                await fetch(machines, found, "", out)
        assert [each.name for each in tmp_path.iterdir()] == ["out"]
        assert [each.name for each in out.iterdir()] == ["elsewhere"]

    play(story)


def manifest(**files: bytes) -> PackageManifest:
    return PackageManifest(
        tuple(
            PackageFile(f"output/{name.replace('__', '/')}", len(data), digest(data))
            for name, data in files.items()
        )
    )


def test_a_path_that_machines_wrote_differently_gets_their_names() -> None:
    places = placed(
        [
            ("ada", manifest(model=b"1", log=b"same", own__a=b"x")),
            ("b/b", manifest(model=b"2", log=b"same", own__b=b"y")),
            ("b/b", manifest(model=b"3")),
            ("carl", manifest(model=b"1", own=b"a file where others have a folder")),
        ]
    )
    assert {(place.source, place.path) for place in places} == {
        (0, "model.ada"),
        (1, "model.b_b"),
        (2, "model.b_b.2"),
        (0, "log"),
        (0, "own/a"),
        (1, "own/b"),
        (3, "own.carl"),
    }
    [place] = placed([("ada", PackageManifest((PackageFile("code/m.pt", 1, digest(b"1")),)))])
    assert place.path == "m.pt"


def test_a_machine_with_many_files_of_one_name_costs_no_more_than_one_with_many_files() -> None:
    """4,000 folders of its own making, each with another file of the same name, took 137 s."""

    def hostile(root: str) -> PackageManifest:
        files = (PackageFile(f"{root}{n}/m.pt", 1, digest(b"%d" % n)) for n in range(20_000))
        return PackageManifest(tuple(files))

    with pytest.raises(ProtocolError, match="no result"):
        check_results(hostile("d"))
    check_results(hostile("output/d"))
    honest, start = hostile("output/d"), time.thread_time()
    placed([("bob", honest)])
    allowed, start = 20 * (time.thread_time() - start), time.thread_time()
    taken = tuple(PackageFile(f"output/m.bob.{n}.pt", 1, digest(b"x")) for n in range(19_998))
    twice = (PackageFile("code/m.pt", 1, digest(b"1")), PackageFile("output/m.pt", 1, digest(b"2")))
    check_results(PackageManifest((*twice, *taken)))
    placed([("bob", PackageManifest((*twice, *taken)))])
    assert time.thread_time() - start < allowed


def test_a_node_that_asks_without_end_is_refused_and_others_are_answered(tmp_path: Path) -> None:
    async def story() -> None:
        wire = Wire(tmp_path)
        wire.ran("sweep", model="weights")
        server, request = wire.server, ResultsRequest("list")
        asked = [server.answer(ADA, request) for _ in range(10_000)]
        *found, of_bob = await asyncio.gather(
            *asked, server.answer(BOB, request), return_exceptions=True
        )
        refused = [str(each) for each in found if isinstance(each, LinkError)]
        assert refused == ["it was asked too much at once"] * (10_000 - 64)
        answers = [each for each in (*found, of_bob) if isinstance(each, Results)]
        assert [len(each.jobs) for each in answers] == [1] * 65
        assert len((await server.answer(ADA, request)).jobs) == 1

    play(story)


@pytest.mark.parametrize(
    "visits",
    [
        ["ada", "ada bob", "bob", "ada", "ada bob carl"],
        ["ada bob carl", "bob", "carl", "ada bob carl"],
        ["bob carl", "ada bob", "ada bob carl", "carl"],  # ada's is carl's
        ["bob", "carl bob", "ada bob"],
    ],
)
def test_each_content_is_brought_once_whichever_machines_are_there_at_each_fetch(
    visits: list[str],
) -> None:
    """Seen: the second fetch left model.pt beside model.desk.pt, the same file."""
    wrote = {"ada": b"1", "bob": b"2", "carl": b"1"}
    folder: dict[str, bytes] = {}
    for visit in visits:
        there = visit.split()
        places = placed(
            [(name, manifest(model=wrote[name])) for name in there],
            lambda path, file: folder.get(path) == file.root,
            list(wrote),
        )
        for place in places:
            assert folder.setdefault(place.path, place.file.root) == place.file.root
            is_unnamed = place.path == "model" and len(places) > 1
            assert place.is_unnamed is is_unnamed
        assert {place.file.root for place in places} == {digest(wrote[name]) for name in there}
    assert len(folder) == 2, folder
    assert sorted(folder.values()) == sorted([digest(b"1"), digest(b"2")])


@pytest.mark.parametrize(
    ("pattern", "path", "is_it"),
    [
        ("", "a/b.pt", True),
        ("*.pt", "a/b.pt", True),
        ("*.pt", "a/b.txt", False),
        ("a", "a/b.pt", True),
        ("a/", "a/b.pt", True),
        ("a/b.pt", "a/b.pt", True),
        ("b.pt", "a/b.pt", True),
        ("b", "a/b.pt", False),
    ],
)
def test_patterns(pattern: str, path: str, is_it: bool) -> None:
    assert is_wanted(pattern, path) is is_it
