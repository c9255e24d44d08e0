"""Bulk connections between agents on the loopback: made on demand by whichever side can, paced,
bounded, cut by a ban, given up when silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.links import bulk as bulks
from potluck._core.cluster.links.bulk import BulkLinks, Pace
from potluck._core.cluster.links.peers import KIND, PeerLinks
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials
from potluck._core.wire import bulk, peers
from potluck._core.wire.greeting import Hello, Refusal
from potluck.errors import ConfigurationError, LinkError, ProtocolError, Refused
from support.links import new_credentials

WAIT_S = 30.0
NAME = bytes(32)
PART = bulk.PartRequest("data", NAME, 0, 7)


class Agent:
    """An agent's links and bulk connections; ``port`` is what it tells others (None: its own)."""

    def __init__(self) -> None:
        self.out: dict[str, str] = {}
        own = new_credentials()
        self.credentials: Credentials = own
        own.objects_to = self.out.get
        self.links = PeerLinks(own, self._introduction, on_broken=lambda error: None)
        self.server = aio.Server("127.0.0.1", 0, own, self._greeted)
        self.bulk = BulkLinks(own, self.links)
        self.bulk.answer = self.answer
        self.bulk.told = lambda node, message: self.told.append((node, message))
        self.told: list[tuple[str, bulk.Announce]] = []
        self.answers: Callable[[str, bulk.Request], Awaitable[bulk.Response]] | None = None
        self.num_called = 0
        self.port: int | None = None

    @property
    def id(self) -> str:
        return self.credentials.node_id

    def _introduction(self) -> peers.Introduction:
        port = self.server.port if self.port is None else self.port
        key = self.credentials.public_key
        return peers.Introduction(1, "agent", key, port, own_versions())

    async def _greeted(self, reader: Any, writer: Any, hello: Hello, node: str) -> None:
        if hello.kind == KIND:
            await self.links.greeted(reader, writer, hello, node)
        elif hello.kind == bulks.KIND:
            self.num_called += 1
            await self.bulk.greeted(reader, writer, hello, node)
        else:
            await aio.write_greeting(writer, Refusal("kind", "not here"))

    async def answer(self, node: str, request: bulk.Request) -> bulk.Response:
        if self.answers is not None:
            return await self.answers(node, request)
        if isinstance(request, bulk.PartRequest):
            return bulk.Part(1 << 30, b"x" * request.count)
        raise ConfigurationError("this node has no such package")

    async def close(self) -> None:
        await self.bulk.close()
        await self.links.close()
        await self.server.close()


@asynccontextmanager
async def two(**port: int) -> AsyncIterator[tuple[Agent, Agent]]:
    """Ada and bob, who are linked; ``ada=`` and ``bob=``: the ports that they tell."""
    ada, bob = Agent(), Agent()
    ada.port, bob.port = port.get("ada"), port.get("bob")
    try:
        ada.links.heard(Hint("127.0.0.1", bob.server.port, "static"))
        await until(lambda: bob.id in ada.links.nodes and ada.id in bob.links.nodes)
        yield ada, bob
    finally:
        await ada.close()
        await bob.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def test_one_connection_made_on_demand_serves_both_directions() -> None:
    async def story() -> None:
        async with two() as (ada, bob):
            assert ada.num_called == bob.num_called == 0
            asked = [ada.bulk.ask(bob.id, PART, bulk.Part) for _ in range(20)]
            assert {part.data for part in await asyncio.gather(*asked)} == {b"x" * 7}
            assert (await bob.bulk.ask(ada.id, PART, bulk.Part)).data == b"x" * 7
            assert (ada.num_called, bob.num_called) == (0, 1)
            ada.bulk.tell(bob.id, bulk.Announce("data", NAME, got=((0, 3),)))
            await until(lambda: bool(bob.told))
            assert bob.told == [(ada.id, bulk.Announce("data", NAME, got=((0, 3),)))]
            assert (await ada.bulk.ask(ada.id, PART, bulk.Part)).data == b"x" * 7, "itself"
            for node in (bob.id, ada.id):
                with pytest.raises(LinkError, match="no such package"):
                    await ada.bulk.ask(node, bulk.DescriptionRequest("data", NAME), bulk.Part)
            with pytest.raises(ProtocolError, match="answered with Part"):
                await ada.bulk.ask(bob.id, PART, bulk.Holding)
            with pytest.raises(LinkError, match="no link to node eeee"):
                await ada.bulk.ask("e" * 64, PART, bulk.Part)

    play(story)


def test_a_node_that_can_not_be_called_calls_back() -> None:
    async def story() -> None:
        async with two(bob=9) as (ada, bob):  # nobody listens there
            assert (await ada.bulk.ask(bob.id, PART, bulk.Part)).data == b"x" * 7
            assert (ada.num_called, bob.num_called) == (1, 0)

    play(story)


def test_two_nodes_that_can_not_call_each_other_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulks, "_CALL_BACK_S", 0.5)

    async def story() -> None:
        async with two(ada=9, bob=9) as (ada, bob):
            with pytest.raises(LinkError, match="neither this node nor"):
                await ada.bulk.ask(bob.id, PART, bulk.Part)

    play(story)


def test_a_ban_cuts_the_connection_and_lets_none_be_made() -> None:
    async def story() -> None:
        async with two() as (ada, bob):
            held = asyncio.Event()

            async def never(node: str, request: bulk.Request) -> bulk.Response:
                held.set()
                return await asyncio.Future()

            bob.answers = never
            asking = asyncio.create_task(ada.bulk.ask(bob.id, PART, bulk.Part))
            await held.wait()
            bob.out[ada.id] = "it was banned"
            bob.bulk.drop([ada.id], "it was banned")
            with pytest.raises(LinkError, match=f"the connection to node {bob.id[:12]} ended"):
                await asking
            with pytest.raises(Refused, match="it was banned"):
                await ada.bulk.ask(bob.id, PART, bulk.Part)

    play(story)


def test_a_node_that_answers_nothing_is_given_up_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulks, "SILENT_S", 0.5)

    async def story() -> None:
        async with two() as (ada, bob):

            async def slow(node: str, request: bulk.Request) -> bulk.Response:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await asyncio.Event().wait()
                return bulk.Part(1, b"x")

            bob.answers = slow  # slower than the limit, all together
            asked = [ada.bulk.ask(bob.id, PART, bulk.Part) for _ in range(6)]
            assert len(await asyncio.gather(*asked)) == 6, "1.2 s, but always something"

            async def silent(node: str, request: bulk.Request) -> bulk.Response:
                return await asyncio.Future()

            bob.answers = silent
            with pytest.raises(LinkError, match=r"answered nothing for 0\.5 s"):
                await ada.bulk.ask(bob.id, PART, bulk.Part)

    play(story)


def test_a_node_that_asks_without_end_is_cut_off() -> None:
    async def story() -> None:
        async with two() as (ada, bob):

            async def never(node: str, request: bulk.Request) -> bulk.Response:
                return await asyncio.Future()

            bob.answers = never
            request = bulk.DescriptionRequest("data", NAME)
            asked = [ada.bulk.ask(bob.id, request, bulk.Part) for _ in range(300)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, LinkError) for each in found)
            assert {str(each)[:19] for each in found} == {"the connection to n"}

    play(story)


@pytest.mark.parametrize("of", ["one", "all"])
def test_requests_that_fill_the_memory_are_cut_off_before_they_do(
    monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """256 requests may wait, but not 256 of half a MiB, which take five times that as objects."""
    monkeypatch.setattr(bulks, f"_MAX_WAITING{'_OF_ALL' * (of == 'all')}", 6 << 20)

    async def story() -> None:
        async with two() as (ada, bob):

            async def never(node: str, request: bulk.Request) -> bulk.Response:
                return await asyncio.Future()

            bob.answers = never
            declares = tuple((chunk, bytes(32)) for chunk in range(1 << 13))
            request = bulk.HoldingRequest("data", NAME, declares=declares)
            asked = [ada.bulk.ask(bob.id, request, bulk.Holding) for _ in range(2)]
            waiting = asyncio.gather(*asked)
            await until(lambda: any(link.waiting > 4 << 20 for link in bob.bulk._all))
            assert not waiting.done(), "two are no offence"
            with pytest.raises(LinkError, match="the connection to node"):
                await ada.bulk.ask(bob.id, request, bulk.Holding)
            with pytest.raises(LinkError, match="the connection to node"):
                await waiting

    play(story)


def test_a_node_that_does_not_read_its_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulks, "_UNREAD_S", 0.3)
    monkeypatch.setattr(bulks, "_IDLE_S", 1000.0)
    monkeypatch.setattr(bulks, "SILENT_S", 1000.0)

    async def story() -> None:
        async with two() as (ada, bob):
            await ada.bulk.ask(bob.id, PART, bulk.Part)
            [link] = ada.bulk._all
            link.writer.transport.pause_reading()  # type: ignore[attr-defined]
            request = bulk.PartRequest("data", NAME, 0, bulk.MAX_PART)
            for number in range(200):
                link.send(bulk.Asked(number + 100, request))
            await until(lambda: not bob.bulk._all)

    play(story)


def test_a_connection_that_is_idle_ends_and_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulks, "_IDLE_S", 0.2)

    async def story() -> None:
        async with two() as (ada, bob):
            for count in (1, 2):
                await ada.bulk.ask(bob.id, PART, bulk.Part)
                assert bob.num_called == count
                await until(lambda: not ada.bulk._all and not bob.bulk._all)

    play(story)


@pytest.mark.parametrize(
    ("rate", "window"), [(1.25e6, 312_500), (25e6, 6_250_000), (1e9, 8 << 20), (1e4, 64 << 10)]
)
def test_the_pace_settles_at_a_quarter_of_a_second_of_the_way(rate: float, window: int) -> None:
    """The way takes ``rate`` bytes a second and 20 ms; what is asked for waits in front of it."""
    pace, part, now, free, coming = Pace(), 16 << 10, 0.0, 0.0, list[float]()
    while now < 60:
        while pace.may_ask(part) and len(coming) < 2000:
            pace.asked(part, now)
            free = max(free, now) + part / rate
            coming.append(free + 0.02)
        now = coming.pop(0)
        pace.answered(part, now)
    assert pace.window == pytest.approx(window, rel=0.15)
    assert (free - now) * rate <= max(0.3 * rate, 80 << 10)
