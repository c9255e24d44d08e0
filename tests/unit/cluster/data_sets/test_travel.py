"""Data that arrives shard by shard: what a script sees of it while it is on its way."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck._core.cluster.content.package import PackageFile, PackageManifest
from potluck._core.cluster.data_sets import outlines, travel
from potluck._core.cluster.data_sets.job_data import JobData
from potluck._core.wire import bulk
from potluck.data import NumpyFiles, ParquetFiles, WebDatasetFiles, shared
from potluck.errors import DataError, LinkError, ProtocolError
from support.data_sets import ADA, BOB, Machines, in_a_loop

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 1 << 20
NO_SHARDS = len("no array" + "small")
"""Bytes that come first."""


class Gate:
    """Keeps parts of shards of ``package`` back on their way from ada, until it is opened."""

    def __init__(self, machines: Machines, package: bytes) -> None:
        self.is_open = asyncio.Event()
        self.error = ""
        self._package, self._answer = package, machines.nodes.answers[ADA]
        machines.nodes.answers[ADA] = self._pass

    async def _pass(self, node: str, request: bulk.Request) -> bulk.Response:
        if isinstance(request, bulk.PartRequest) and (
            request.package == self._package and request.begin >= NO_SHARDS
        ):
            await self.is_open.wait()
            if self.error:
                raise LinkError(self.error)
        return await self._answer(node, request)


def fill(folder: Path) -> None:
    """Files that are no shards, first in the order of names; arrays of several chunks, tables, an
    archive."""
    for each in folder.iterdir():
        each.unlink()
    (folder / "a broken.npy").write_text("no array")
    (folder / "a readme").write_text("small")
    for number in range(2):
        np.save(folder / f"x-{number}.npy", np.arange(ROWS) + number)
        table = pa.table({"n": np.arange(number * 10, number * 10 + 10)})
        pq.write_table(table, folder / f"t-{number}.parquet", row_group_size=5)
    with tarfile.open(folder / "y.tar", "w") as archive:
        for key in range(5):
            member = tarfile.TarInfo(f"{key:06}.bin")
            member.size = 3000
            archive.addfile(member, io.BytesIO(os.urandom(3000)))


@dataclass(frozen=True)
class Journey:
    """Data of ada, on its way to a job on bob. ``waits`` are what bob's job was told of them."""

    gate: Gate
    bob: JobData
    waits: asyncio.Queue[tuple[str, str]]
    source: Path


@contextlib.asynccontextmanager
async def journey(root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Journey]:
    machines, waits = Machines(root), asyncio.Queue[tuple[str, str]]()
    fill(machines.pets)
    spec = await machines.spec()
    gate = Gate(machines, spec.data[0].package)

    def on_wait(worker: str, text: str) -> None:
        waits.put_nowait((worker, text))

    ada, bob = machines.job(ADA, spec), machines.job(BOB, spec, on_wait=on_wait)
    await ada.offer()
    await bob.bring(has_workers=True)
    for name, value in bob.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("POTLUCK_WORKER", "w1")
    try:
        yield Journey(gate, bob, waits, machines.pets)
    finally:
        gate.is_open.set()
        for data in (bob, ada):
            await data.close()


@in_a_loop
async def test_readers_count_shards_that_are_not_here_and_wait_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with journey(tmp_path, monkeypatch) as trip:
        folder = shared("pets")
        here = {each.name for each in folder.folder.iterdir()}
        assert here == {"a broken.npy", "a readme"}
        assert (folder / "a readme").read_bytes() == b"small"
        arrays = NumpyFiles({"x": folder.shards("x-*.npy")})
        tables, archives = ParquetFiles(folder), WebDatasetFiles(folder)
        assert (len(arrays), tables.sizes, archives.sizes) == (2 * ROWS, (5, 5, 5, 5), (5,))
        reading = asyncio.create_task(asyncio.to_thread(arrays.load, len(arrays.sizes) - 1))
        worker, text = await trip.waits.get()
        assert worker == "w1"
        assert text == "waits for x-1.npy of pets (0 bytes of 8.0 MiB, from ada)"
        trip.gate.is_open.set()
        last: Any = (await reading).take(np.array([ROWS - 1]))
        assert last["x"].tolist() == [ROWS]
        rows: Any = (await asyncio.to_thread(tables.load, 3)).take(np.arange(5))
        assert rows["n"].tolist() == [15, 16, 17, 18, 19]
        samples = await asyncio.to_thread(archives.load, 0)
        taken: Any = samples.take(np.array([2]))
        with tarfile.open(trip.source / "y.tar") as archive:
            member = archive.extractfile("000002.bin")
            assert member is not None
            assert taken[0].read()["bin"] == member.read()
        whole = Path(await asyncio.to_thread(os.fspath, folder))
        assert {each.name for each in whole.iterdir()} == {
            each.name for each in trip.source.iterdir()
        }


@in_a_loop
async def test_a_plain_path_waits_for_all_and_a_file_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with journey(tmp_path, monkeypatch) as trip:
        one = asyncio.create_task(asyncio.to_thread(lambda: np.load(shared("pets") / "x-0.npy")))
        all_ = asyncio.create_task(asyncio.to_thread(lambda: f"{shared('pets')}"))
        await trip.waits.get()
        assert not one.done()
        assert not all_.done()
        trip.gate.is_open.set()
        assert (await one)[-1] == ROWS - 1
        assert len([*Path(await all_).iterdir()]) == 7


@in_a_loop
async def test_a_shard_that_can_not_come_any_more_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(travel, "_GIVE_UP_S", 0.0)
    async with journey(tmp_path, monkeypatch) as trip:
        reading = asyncio.create_task(asyncio.to_thread(shared("pets").open, "y.tar"))
        await trip.waits.get()
        trip.gate.error = "its disk is gone"
        trip.gate.is_open.set()
        with pytest.raises(
            DataError, match=r"y\.tar, of the data set pets, can't come.*disk is gone"
        ):
            await reading


def test_an_outline_of_other_files_is_refused(tmp_path: Path) -> None:
    manifest = PackageManifest((PackageFile("x.npy", 100, bytes(32)),))
    for path, at in (("y.npy", 0), ("../x.npy", 0), ("x.npy", 95)):
        data = outlines.encoded({path: ((at, b"0123456789"),)})
        with pytest.raises(ProtocolError, match="an outline is not of the files"):
            outlines.lay_out(data, manifest, tmp_path)
    with pytest.raises(ProtocolError, match="not an outline"):
        outlines.lay_out(b"something", manifest, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("cut", [0, 4, 11, 100, 700])
@pytest.mark.parametrize("name", ["x-0.npy", "t-0.parquet", "y.tar", "a readme"])
def test_what_is_cut_off_is_no_shard(tmp_path: Path, name: str, cut: int) -> None:
    fill(tmp_path)
    data = (tmp_path / name).read_bytes()[:cut]
    found = outlines.outline_of(name, io.BytesIO(data), len(data))
    assert not found or name == "x-0.npy"  # a header is whole: its reader says what is missing


@in_a_loop
async def test_a_second_run_asks_nobody_for_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Machines(tmp_path)
    fill(machines.pets)
    spec = await machines.spec()
    asked = []
    for _ in range(2):
        machines.nodes.asked.clear()
        ada, bob = machines.job(ADA, spec), machines.job(BOB, spec)
        await ada.offer()
        await bob.bring(has_workers=True)
        for name, value in bob.variables().items():
            monkeypatch.setenv(name, value)
        await asyncio.to_thread(os.fspath, shared("pets"))  # all of it
        asked.append(sum(each.count for each in machines.nodes.parts(ADA)))
        for data in (bob, ada):
            await data.close()
    assert asked[0] > 2 * 8 * ROWS
    assert asked[1] == 0
