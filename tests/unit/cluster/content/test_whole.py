"""One file by the SHA-256 of its whole: from members, and from an index that each byte leaves once,
past liars of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from potluck._core.cluster.content.package import whole_file
from potluck._core.cluster.content.shelf import Shelf
from potluck._core.cluster.content.store import ContentStore, Terms
from potluck._core.cluster.content.swarm import OUTSIDE, RANGE_BYTES, TAKE_OVER_S, Swarm
from potluck._core.wire import bulk
from potluck._core.wire.bulk import CHUNK_BYTES
from potluck.errors import LinkError
from support.requests import Nodes

ADA, BOB, CARL, EVE = "a1" * 32, "b2" * 32, "c3" * 32, "e5" * 32
DATA = os.urandom(5 * CHUNK_BYTES + 12_345)
SHA256 = hashlib.sha256(DATA).digest()


class Index:
    """Serves ``data`` by ranges, and counts how often each byte was read."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.read = np.zeros(len(data), np.int8)
        self.is_down = False

    async def __call__(self, begin: int, count: int) -> AsyncIterator[bytes]:
        for at in range(begin, begin + count, 1 << 20):
            await asyncio.sleep(0)
            if self.is_down:
                raise LinkError("the index does not answer")
            end = min(at + (1 << 20), begin + count)
            self.read[at:end] += 1
            yield self.data[at:end]


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def store_of(nodes: Nodes, root: Path, me: str) -> ContentStore:
    store = nodes.store(root / me[:2], me)
    store.open("wheel", Terms(lambda node, package: True))
    return store


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


async def fetched(store: ContentStore, index: Index | None = None) -> bytes:
    path = await store.fetch_file("wheel", SHA256, len(DATA), outside=index)
    return path.read_bytes()


def test_however_many_machines_fetch_a_file_each_byte_leaves_the_index_once(
    nodes: Nodes, tmp_path: Path
) -> None:
    async def story() -> None:
        index = Index()
        stores = [store_of(nodes, tmp_path, each) for each in (ADA, BOB, CARL)]
        assert await asyncio.gather(*(fetched(each, index) for each in stores)) == [DATA] * 3
        assert index.read.min() == index.read.max() == 1
        last = store_of(nodes, tmp_path, EVE)  # without a way outside
        assert await fetched(last) == DATA
        assert await fetched(last) == DATA, "it is here"
        assert index.read.max() == 1

    play(story)


def test_a_machine_without_a_way_outside_takes_part_from_the_beginning(
    nodes: Nodes, tmp_path: Path
) -> None:
    async def story() -> None:
        index = Index()
        ada, bob = store_of(nodes, tmp_path, ADA), store_of(nodes, tmp_path, BOB)
        assert await asyncio.gather(fetched(ada, index), fetched(bob)) == [DATA] * 2
        assert index.read.max() == 1

    play(story)


def test_an_index_with_another_file_and_one_that_is_down_are_named(
    nodes: Nodes, tmp_path: Path
) -> None:
    nodes.patience_s = 0.3

    async def story() -> None:
        wrong, down = Index(DATA[:-1] + bytes([DATA[-1] ^ 1])), Index()
        down.is_down = True
        ada = store_of(nodes, tmp_path, ADA)
        with pytest.raises(LinkError, match=r"outside of the cluster has a file with another SHA"):
            await fetched(ada, wrong)
        with pytest.raises(LinkError, match="the index does not answer"):
            await fetched(ada, down)
        assert not list(tmp_path.rglob("objects/*"))
        assert await fetched(ada, Index()) == DATA

    play(story)


def flipped(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
    if isinstance(request, bulk.PartRequest) and isinstance(answer, bulk.Part):
        data = bytes([answer.data[0] ^ 1]) + answer.data[1:]
        return msgspec.structs.replace(answer, data=data)
    return answer


def forged(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
    """It declares hashes of a file of its own, and sends that."""
    forgery = bytearray(DATA)
    forgery[5] ^= 1
    if isinstance(answer, bulk.Holding) and answer.declares:
        wrong = hashlib.sha256(forgery[:CHUNK_BYTES]).digest()
        return msgspec.structs.replace(answer, declares=((0, wrong), *answer.declares[1:]))
    if isinstance(request, bulk.PartRequest) and request.begin < CHUNK_BYTES:
        data = bytes(forgery[request.begin : request.begin + request.count])
        return bulk.Part(len(DATA), data)
    return answer


@pytest.mark.parametrize("lie", [flipped, forged])
@pytest.mark.parametrize("rescue", ["the index", "another member"])
def test_a_member_that_sends_or_declares_what_is_wrong_is_named(
    nodes: Nodes, tmp_path: Path, lie: Any, rescue: str
) -> None:
    async def story() -> None:
        eve, bob = store_of(nodes, tmp_path, EVE), store_of(nodes, tmp_path, BOB)
        assert await fetched(eve, Index()) == DATA
        nodes.change[EVE] = lie
        index = Index() if rescue == "the index" else None
        if index is None:
            ada = store_of(nodes, tmp_path, ADA)
            nodes.change[EVE] = lambda who, request, answer: answer
            assert await fetched(ada) == DATA
            nodes.change[EVE] = lie
        assert await fetched(bob, index) == DATA
        named = [note for note in nodes.notes if note.startswith(EVE)]
        assert named, nodes.notes
        assert not [note for note in nodes.notes if not note.startswith(EVE)], "nobody else"

    play(story)


def test_a_small_file_is_what_was_asked_for_whatever_its_sender_declared(
    nodes: Nodes, tmp_path: Path
) -> None:
    """It is one chunk, so its hash is the one of the whole."""
    forgery, size = b"forged", len(b"forged")

    async def eve(who: str, request: bulk.Request) -> bulk.Response:
        if isinstance(request, bulk.PartRequest):
            return bulk.Part(size, forgery)
        return bulk.Holding(b"\x01", declares=((0, hashlib.sha256(forgery).digest()),))

    nodes.answers[EVE], nodes.patience_s = eve, 0.3

    async def story() -> None:
        ada = store_of(nodes, tmp_path, ADA)
        with pytest.raises(LinkError, match="sent other bytes than those of chunk 0"):
            await ada.fetch_file("wheel", hashlib.sha256(b"honest").digest(), size)
        assert not list(tmp_path.rglob("objects/*"))

    play(story)


def test_a_member_that_passed_on_what_a_third_one_declared_is_not_blamed(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Eve declares wrong hashes and has nothing. Bob has the right bytes, but has not verified the
    whole when he is asked first: nobody knows yet which of the two is wrong."""
    wrong = tuple((chunk, bytes(31) + b"w") for chunk in range(6))

    async def eve(who: str, request: bulk.Request) -> bulk.Response:
        return bulk.Holding(is_fetching=True, declares=wrong)

    async def story() -> None:
        bob, ada = store_of(nodes, tmp_path, BOB), store_of(nodes, tmp_path, ADA)
        assert await fetched(bob, Index()) == DATA
        answers = iter([()])

        def verifies_later(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
            if isinstance(answer, bulk.Holding):
                return msgspec.structs.replace(answer, declares=next(answers, answer.declares))
            return answer

        nodes.answers[EVE], nodes.change[BOB] = eve, verifies_later
        assert await fetched(ada) == DATA
        assert [note[:64] for note in nodes.notes] == [EVE], nodes.notes

    play(story)


def test_nobody_is_blamed_for_an_index_that_stops_amid_the_proof(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Carl declares a file that is none. The index, which would decide, sends nothing: whoever sent
    the last chunk has no part in that."""

    async def story() -> None:
        bob, carl = store_of(nodes, tmp_path, BOB), store_of(nodes, tmp_path, CARL)
        assert await fetched(bob, Index()) == await fetched(carl) == DATA
        nodes.change[CARL] = forged
        assert await fetched(store_of(nodes, tmp_path, ADA), Index(b"")) == DATA
        assert {note[:64] for note in nodes.notes} == {CARL}, nodes.notes
        assert not [note for note in nodes.notes if "outside" in note]

    play(story)


def test_each_byte_leaves_the_index_once_however_long_the_answers_take(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Nothing is read before the other one was heard."""

    async def story() -> None:
        index, heard, asked = Index(), asyncio.Event(), asyncio.Semaphore(0)
        stores = [store_of(nodes, tmp_path, each) for each in (ADA, BOB)]
        for store in stores:

            async def late(
                who: str, request: bulk.Request, answer: Any = store.answer
            ) -> bulk.Response:
                if isinstance(request, bulk.HoldingRequest):
                    asked.release()
                    await heard.wait()
                return await answer(who, request)

            nodes.answers[store.me] = late
        fetches = asyncio.gather(*(fetched(each, index) for each in stores))
        for _ in stores:
            await asyncio.wait_for(asked.acquire(), 30)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4):
                await asyncio.shield(fetches)
        assert not index.read.any()
        heard.set()
        assert await fetches == [DATA] * 2
        assert index.read.min() == index.read.max() == 1

    play(story)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_named_has_lied_in_every_order_of_events(
    nodes: Nodes, tmp_path: Path, seed: int
) -> None:
    """Five nodes, some of which forge some chunks and declare the hashes of the forgery, always or
    now and then, fetch one file from each other at one time, with and without an index; their
    messages take random times. A fetch may fail, but what it brings is right."""
    random = Random(seed)
    data = DATA[: 2 * CHUNK_BYTES + 100]
    sha256, index = hashlib.sha256(data).digest(), Index(data)
    everybody = [f"{number:02x}" * 32 for number in range(5)]
    liars = set(random.sample(everybody[1:], random.choice((0, 1, 2, 3))))
    sizes = (CHUNK_BYTES, CHUNK_BYTES, 100)

    def liar() -> Callable[[str, bulk.Request, bulk.Response], bulk.Response]:
        forges = random.sample(range(3), random.choice((1, 1, 2, 3)))
        share = random.choice((0.3, 1.0))

        def change(who: str, request: bulk.Request, answer: bulk.Response) -> bulk.Response:
            if random.random() > share:
                return answer
            match request, answer:
                case bulk.PartRequest(), bulk.Part():
                    if request.begin // CHUNK_BYTES in forges:
                        return msgspec.structs.replace(answer, data=bytes(len(answer.data)))
                case _, bulk.Holding():
                    forged = {each: hashlib.sha256(bytes(sizes[each])).digest() for each in forges}
                    declared = tuple((dict(answer.declares) | forged).items())
                    return msgspec.structs.replace(answer, declares=declared)
            return answer

        return change

    def late(answer: Any) -> Any:
        async def answered(who: str, request: bulk.Request) -> bulk.Response:
            for _ in range(random.choice((0, 0, 3, 30))):
                await asyncio.sleep(0)
            found: bulk.Response = await answer(who, request)
            for _ in range(random.choice((0, 0, 3, 30))):
                await asyncio.sleep(0)
            return found

        return answered

    async def story() -> None:
        stores = {each: store_of(nodes, tmp_path, each) for each in everybody}
        with_index = [each for each in everybody if random.random() < 0.5] or everybody[:1]
        assert await stores[everybody[0]].fetch_file("wheel", sha256, len(data), outside=index)
        for each in everybody:
            nodes.answers[each] = late(nodes.answers[each])
        for each in liars:
            nodes.change[each] = liar()
        fetches = (
            store.fetch_file(
                "wheel", sha256, len(data), outside=index if each in with_index else None
            )
            for each, store in stores.items()
        )
        found = await asyncio.gather(*fetches, return_exceptions=True)
        failed = [each for each in found if not isinstance(each, Path)]
        assert {each.read_bytes() == data for each in found if isinstance(each, Path)} <= {True}
        assert liars or not failed, failed
        assert all(isinstance(each, LinkError) for each in failed), failed
        assert {note[:64] for note in nodes.notes} <= liars, (liars, nodes.notes)

    play(story)


def test_a_fetch_that_was_killed_goes_on_where_it_was(nodes: Nodes, tmp_path: Path) -> None:
    index = Index()

    async def begun() -> None:
        came = asyncio.Event()
        task = asyncio.create_task(
            store_of(nodes, tmp_path, ADA).fetch_file(
                "wheel",
                SHA256,
                len(DATA),
                outside=index,
                on_progress=lambda count, node: came.set(),
            )
        )
        await came.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def again() -> None:
        assert await fetched(store_of(nodes, tmp_path, ADA), index) == DATA

    play(begun)
    shelf = Shelf(tmp_path / ADA[:2] / "wheel")
    known = shelf.package(whole_file(SHA256, len(DATA)).name)
    assert known is not None
    before = shelf.present(known)
    assert 0 < before.sum() < len(before)
    index.read[:] = 0
    play(again)
    assert index.read.sum() == known.sizes[~before].sum()


def swarm_of(me: str, *others: str) -> Swarm:
    count = 4 * RANGE_BYTES // CHUNK_BYTES
    none = np.zeros(count, bool)
    swarm = Swarm(np.full(count, CHUNK_BYTES, np.int64), none, me=me)
    swarm.known[:] = False
    swarm.joined(OUTSIDE, ~none, none, is_fetching=False)
    for node in others:
        swarm.joined(node, none, none, is_fetching=True, reaches=True)
    return swarm


def taken(swarm: Swarm, now: float) -> set[int]:
    """The chunks that it would get from outside."""
    found = set()
    while (run := swarm.next(OUTSIDE, now)) is not None:
        found |= set(run.chunks)
        swarm.arrived(run, now)
    return found


def test_each_range_has_one_node_that_fetches_it_and_another_if_it_makes_no_progress() -> None:
    nodes = ("a", "b", "c")
    shares = [taken(swarm_of(me, *(n for n in nodes if n != me)), 1.0) for me in nodes]
    assert sum(map(len, shares)) == len(set().union(*shares)) == 16
    left = swarm_of("a", "b", "c")
    for node in "bc":
        left.heard(node, now=9.0 if node == "c" else 0.0)
    with_c = swarm_of("a", "c")
    with_c.heard("c", now=9.0)
    assert taken(left, TAKE_OVER_S + 1) == taken(with_c, TAKE_OVER_S + 1), "b is passed over"
    late = swarm_of("a", "b", "c")  # all of them waited so long for the answer of a fourth one
    none = np.zeros(16, bool)
    late.joined(OUTSIDE, ~none, none, is_fetching=False, now=TAKE_OVER_S)
    assert taken(late, TAKE_OVER_S + 1) == shares[0], "nobody is passed over"
    awaited = swarm_of("a")
    awaited.joined("b", none, none, is_fetching=True)  # which can't reach it
    assert taken(awaited, 1.0) == set(range(16))
