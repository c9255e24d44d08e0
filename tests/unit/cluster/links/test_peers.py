"""Links between agents on the loopback: one per pair, made again, bounded, deaf to strangers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import struct
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.links.peers import KIND, PeerLinks, _host_of
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.transport import aio, binding
from potluck._core.transport.credentials import Credentials
from potluck._core.wire import admissions, jobs, nodes, peers
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck._core.wire.jobs import JobRuns, JobRunsRequest
from potluck.errors import (
    ConfigurationError,
    LinkError,
    ProtocolError,
    Refused,
    WrongSecret,
)
from support.links import make_credentials, new_credentials, psk
from support.ports import reserved_ports

WAIT_S = 30.0
LARGE = peers.Response(1, peers.Results(left=("x" * 4096,) * 16))


class Agent:
    """The least an agent does with its links: write down what happens."""

    def __init__(self, incarnation: int = 1, credentials: Credentials | None = None) -> None:
        self.incarnation = incarnation
        self.credentials = credentials or new_credentials()
        self.events: list[tuple[Any, ...]] = []
        self._changed = asyncio.Event()
        self.links: PeerLinks
        self.server: aio.Server

    @property
    def id(self) -> str:
        return self.credentials.node_id

    async def open(self, port: int = 0, *, bind: str = "") -> Agent:
        self.links = PeerLinks(
            self.credentials,
            self._introduction,
            bind=bind,
            on_broken=lambda error: self._note("broke", error),
        )
        self.links.on(peers.PeerMessage, self.received)
        self.links.on_linked.append(self.linked)
        self.links.on_ended.append(self.ended)
        self.links.on_unreachable.append(self.nobody_listens)
        self.server = aio.Server("127.0.0.1", port, self.credentials, self._greeted)
        return self

    def _introduction(self) -> peers.Introduction:
        return peers.Introduction(
            self.incarnation,
            f"host-{self.incarnation}",
            self.credentials.public_key,
            self.server.port,
            own_versions(),
        )

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        if hello.kind != KIND:
            await aio.write_greeting(writer, Refusal("kind", "only nodes call here"))
            return
        await self.links.greeted(reader, writer, hello, node)

    def linked(self, node: str, introduction: peers.Introduction) -> None:
        self._note("linked", node, introduction.incarnation)

    def received(self, node: str, message: peers.PeerMessage) -> None:
        introduction = self.links.introduction(node)
        assert introduction is not None
        self._note("received", node, introduction.incarnation, message)

    def ended(self, node: str, incarnation: int, reason: str) -> None:
        self._note("ended", node, incarnation, reason)

    def nobody_listens(self, node: str, incarnation: int) -> None:
        self._note("nobody listens", node, incarnation)

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        self._changed.set()

    async def sees(self, *event: Any) -> tuple[Any, ...]:
        """Wait for an event that begins with these words."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for each in self.events:
                    if each[: len(event)] == event:
                        return each
                self._changed.clear()
                await self._changed.wait()

    def knows(self, other: Agent) -> None:
        self.links.heard(Hint("127.0.0.1", other.server.port, "static"))

    async def close(self) -> None:
        await self.links.close()
        await self.server.close()


def run(story: Callable[[contextlib.AsyncExitStack], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
            await story(stack)

    asyncio.run(bounded())


async def opened(stack: contextlib.AsyncExitStack, *agents: Agent) -> list[Agent]:
    for agent in agents:
        await agent.open()
        stack.push_async_callback(agent.close)
    return list(agents)


async def link_up(ada: Agent, bob: Agent) -> None:
    ada.knows(bob)
    await ada.sees("linked", bob.id)
    await bob.sees("linked", ada.id)


def test_an_agent_is_known_by_the_interface_that_it_calls_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second loopback address stands for the interface that ada has to be called back on."""
    monkeypatch.setattr(
        binding, "_interfaces", lambda: {"eth9": ("127.0.0.9",), "lo": ("127.0.0.1",)}
    )
    monkeypatch.setattr(binding, "_is_loopback", lambda address: False)

    async def story(stack: contextlib.AsyncExitStack) -> None:
        (bob,) = await opened(stack, Agent())
        ada = await Agent().open(bind="eth9")
        stack.push_async_callback(ada.close)
        await link_up(ada, bob)
        assert bob.links.last_address(ada.id) == "127.0.0.9"
        assert ada.links.local(bob.id) == "127.0.0.9"

    run(story)


def test_requests_are_answered_over_a_link_and_end_with_it() -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        ada, bob = await opened(stack, Agent(), Agent())
        await link_up(ada, bob)
        asked: list[str] = []
        never = asyncio.Event()

        async def slow(node: str, request: peers.ResultsRequest) -> peers.Results:
            asked.append(node)
            if request.job:
                raise ConfigurationError("this node has no such job")
            await never.wait()
            raise AssertionError

        def at_once(node: str, request: JobRunsRequest) -> JobRuns:
            return JobRuns(request.number == 7)

        bob.links.on_request(peers.ResultsRequest, slow)
        for agent in (ada, bob):
            agent.links.on_request(JobRunsRequest, at_once)
        for node in (bob.id, ada.id):  # also of itself
            for number in (7, 8):
                request = JobRunsRequest(number)
                answer = await ada.links.ask(node, request, JobRuns, timeout_s=WAIT_S)
                assert answer.runs is (number == 7)
        wanted = peers.ResultsRequest("list", "job")
        with pytest.raises(LinkError, match="has no such job"):
            await ada.links.ask(bob.id, wanted, peers.Results, timeout_s=WAIT_S)
        wanted = peers.ResultsRequest("list")
        asking = asyncio.create_task(ada.links.ask(bob.id, wanted, peers.Results, timeout_s=None))
        while asked != [ada.id, ada.id]:
            await asyncio.sleep(0)
        bob.links.drop(ada.id, "enough")
        with pytest.raises(LinkError, match=f"the link to node {bob.id[:12]} ended"):
            await asking
        with pytest.raises(LinkError, match="there is no link to node eeee"):
            await ada.links.ask("e" * 64, wanted, peers.Results, timeout_s=None)

    run(story)


def test_a_hint_becomes_a_link_on_which_both_know_each_other_and_talk() -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        ada, bob = await opened(stack, Agent(incarnation=3), Agent(incarnation=5))
        ada.knows(bob)
        assert await ada.sees("linked") == ("linked", bob.id, 5)
        assert await bob.sees("linked") == ("linked", ada.id, 3)
        assert ada.links.nodes == (bob.id,)
        assert ada.links.address(bob.id) == "127.0.0.1"
        assert ada.links.introduction(bob.id) == bob._introduction()
        beat = nodes.Heartbeat(7)
        assert ada.links.send(bob.id, beat)
        assert await bob.sees("received") == ("received", ada.id, 3, beat)
        assert bob.links.send(ada.id, nodes.Ping("x"))
        await ada.sees("received", bob.id, 5, nodes.Ping("x"))
        assert not ada.links.send("nobody", beat)

    run(story)


def test_both_call_at_once_again_and_again_and_there_is_one_link() -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        for _ in range(10):
            ada, bob = await opened(stack, Agent(), Agent())
            ada.knows(bob)
            bob.knows(ada)
            await ada.sees("linked", bob.id)
            await bob.sees("linked", ada.id)
            for number in range(3):
                assert ada.links.send(bob.id, nodes.Heartbeat(number))
                await bob.sees("received", ada.id, 1, nodes.Heartbeat(number))
                assert bob.links.send(ada.id, nodes.Heartbeat(number))
                await ada.sees("received", bob.id, 1, nodes.Heartbeat(number))
            for agent in (ada, bob):
                kinds = [event[0] for event in agent.events]
                assert kinds.count("linked") == 1 + kinds.count("ended")

    run(story)


def test_a_node_with_many_addresses_and_this_node_itself_make_no_more_links() -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        ada, bob = await opened(stack, Agent(), Agent())
        ada.knows(ada)
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            ada.links.heard(Hint(host, bob.server.port, "beacon", "ab" * 16))
        await ada.sees("linked", bob.id)
        ada.links.send(bob.id, nodes.Heartbeat(1))
        await bob.sees("received")
        assert [event[0] for event in ada.events] == ["linked"]
        assert [event[0] for event in bob.events] == ["linked", "received"]

    run(story)


def test_an_agent_that_ended_is_noticed_at_once_and_called_until_it_is_back() -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        [port] = stack.enter_context(reserved_ports(1))
        (ada,) = await opened(stack, Agent())
        bob = await Agent(incarnation=1).open(port)
        stack.push_async_callback(bob.close)
        await link_up(ada, bob)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await bob.close()
        await ada.sees("ended", bob.id, 1)
        await ada.sees("nobody listens", bob.id, 1)
        seconds = loop.time() - began
        print(f"a death was certain after {1000 * seconds:.0f} ms")
        assert seconds < WAIT_S
        again = await Agent(incarnation=2, credentials=bob.credentials).open(port)
        stack.push_async_callback(again.close)
        assert await ada.sees("linked", bob.id, 2)

    run(story)


def test_a_node_that_lost_its_link_silently_replaces_it_by_calling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machine was switched off and on: the old link looks alive from this side."""
    monkeypatch.setattr("potluck._core.cluster.links.peers._YOUNG_S", 0.0)

    async def story(stack: contextlib.AsyncExitStack) -> None:
        ada, bob = await opened(stack, Agent(), Agent(incarnation=1))
        await link_up(ada, bob)
        reborn = await Agent(incarnation=2, credentials=bob.credentials).open()
        stack.push_async_callback(reborn.close)
        reborn.knows(ada)
        await reborn.sees("linked", ada.id)
        await ada.sees("ended", bob.id, 1, "the peer made a new link")
        await ada.sees("linked", bob.id, 2)
        ada.links.send(bob.id, nodes.Heartbeat(9))
        await reborn.sees("received", ada.id, 1, nodes.Heartbeat(9))

    run(story)


def test_strangers_and_the_banned_never_get_a_link(caplog: pytest.LogCaptureFixture) -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        banned_ids: set[str] = set()

        def objects_to(node: str) -> str | None:
            return "it is banned from this cluster" if node in banned_ids else None

        wary = make_credentials(psk(), Ed25519PrivateKey.generate(), objects_to)
        stranger, banned, friend = (
            Agent(credentials=new_credentials("another")),
            Agent(),
            Agent(),
        )
        [ada] = await opened(stack, Agent(credentials=wary))
        banned_ids.add(banned.id)
        await opened(stack, stranger, banned, friend)
        for other in (stranger, banned):
            ada.knows(other)
            other.knows(ada)
        await link_up(ada, friend)
        for guest, error in ((stranger, WrongSecret), (banned, Refused)):
            hello = Hello(KIND)
            with pytest.raises(error):
                await aio.connect("127.0.0.1", ada.server.port, hello, guest.credentials)
        assert {event[1] for event in ada.events} == {friend.id}
        assert stranger.events == banned.events == []

    run(story)
    assert "banned from this cluster" in caplog.text


def test_a_ban_ends_a_living_link_when_the_agent_says_so() -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        banned_ids: set[str] = set()

        def objects_to(node: str) -> str | None:
            return "it is banned from this cluster" if node in banned_ids else None

        wary = make_credentials(psk(), Ed25519PrivateKey.generate(), objects_to)
        ada, bob = await opened(stack, Agent(credentials=wary), Agent())
        await link_up(ada, bob)
        banned_ids.add(bob.id)
        ada.links.drop(bob.id, "it was banned")
        await ada.sees("ended", bob.id, 1, "it was banned")
        await bob.sees("ended", ada.id, 1)
        hello = Hello(KIND)
        with pytest.raises(Refused, match="banned") as caught:
            await aio.connect("127.0.0.1", ada.server.port, hello, bob.credentials)
        assert caught.value.code == "banned"

    run(story)


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", peers.MAX_MESSAGE + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        peers.MESSAGE.encode(nodes.Heartbeat(1)),
    ],
    ids=["4 GiB", "too long", "junk", "no introduction"],
)
def test_a_member_that_talks_nonsense_is_cut_off_and_others_are_not(said: bytes) -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        ada, bob = await opened(stack, Agent(), Agent())
        eve = new_credentials()
        hello = Hello(KIND)
        reader, writer, welcome = await aio.connect("127.0.0.1", ada.server.port, hello, eve)
        assert isinstance(welcome, Welcome)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), WAIT_S)
        await aio.end(writer)
        await link_up(ada, bob)
        assert {event[1] for event in ada.events} == {bob.id}

    run(story)


def test_a_peer_that_does_not_read_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck._core.cluster.links.peers._MAX_UNSENT", 1 << 20)

    async def story(stack: contextlib.AsyncExitStack) -> None:
        [ada] = await opened(stack, Agent())
        eve = new_credentials()
        reader, writer, _ = await aio.connect("127.0.0.1", ada.server.port, Hello(KIND), eve)
        writer.write(
            peers.MESSAGE.encode(peers.Introduction(1, "eve", eve.public_key, 1, own_versions()))
        )
        await ada.sees("linked", eve.node_id)
        for _ in range(1600):
            if not ada.links.send(eve.node_id, LARGE):
                break
            await asyncio.sleep(0)
        reason = (await ada.sees("ended", eve.node_id))[3]
        assert reason == "it does not read what it is sent"
        await aio.end(writer)
        del reader

    run(story)


def test_a_silent_link_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck._core.cluster.links.peers.IDLE_S", 0.1)

    async def story(stack: contextlib.AsyncExitStack) -> None:
        ada, bob = await opened(stack, Agent(), Agent())
        await link_up(ada, bob)
        await ada.sees("ended", bob.id, 1)

    run(story)


def test_crowds_scans_and_junk_leave_a_link_alone_and_cost_little(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 idle connections, HTTP, a 4 GiB length, connect scans: all at the agent's port."""
    monkeypatch.setattr(
        "potluck._core.cluster.links.peers.IDLE_S", 1000.0
    )  # nobody sends heartbeats

    async def story(stack: contextlib.AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        ada, bob, carl = await opened(stack, Agent(), Agent(), Agent())
        await link_up(ada, bob)
        where = ("127.0.0.1", ada.server.port)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = loop.time()
        caplog.clear()
        crowd = []
        for _ in range(500):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, where)
            crowd.append(sock)
        for junk in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\xff" * 70_000, b"\xff\xff\xff\xff"):
            for _ in range(10):
                reader, writer = await asyncio.open_connection(*where)
                with contextlib.suppress(ConnectionError):
                    writer.write(junk)
                    writer.write_eof()
                await aio.end(writer)
                del reader
        ada.links.send(bob.id, nodes.Heartbeat(1))
        await bob.sees("received", ada.id, 1, nodes.Heartbeat(1))
        found = loop.time()
        await link_up(ada, carl)
        found = loop.time() - found
        seconds = loop.time() - began
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        for sock in crowd:
            sock.close()
        lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
        print(
            f"a real peer was linked after {1000 * found:.0f} ms; {grown / 1024:.1f} MiB more; "
            f"{len(lines)} lines in {seconds:.1f} s"
        )
        assert "ended" not in {event[0] for event in ada.events}
        assert found < WAIT_S
        assert grown < 64 * 1024
        assert len(lines) <= 2 + seconds  # two loggers, one line a second each

    run(story)


def test_a_peer_of_another_protocol_version_is_refused_in_clear_words() -> None:
    async def story(stack: contextlib.AsyncExitStack) -> None:
        [ada] = await opened(stack, Agent())
        eve = new_credentials()
        hello = Hello(KIND, version=7)
        with pytest.raises(
            Refused, match=r"the machine that was called is too old .* pip install --upgrade"
        ) as caught:
            await aio.connect("127.0.0.1", ada.server.port, hello, eve)
        assert caught.value.code == "version"

    run(story)


def test_messages_are_bounded_both_ways() -> None:
    data = peers.MESSAGE.encode(LARGE)
    assert peers.MESSAGE.length(data[:4]) == len(data) - 4
    assert peers.MESSAGE.decode(data[4:]) == LARGE
    with pytest.raises(ProtocolError, match="at most"):
        peers.MESSAGE.encode(peers.Response(1, peers.Failure("x" * 2 * peers.MAX_MESSAGE)))
    with pytest.raises(ProtocolError, match="not a message"):
        peers.MESSAGE.decode(b"\x81\xa4type\xa5Virus")
    oversized = msgspec.msgpack.encode(peers.Response(1, peers.Failure("x" * 4097)))
    with pytest.raises(ProtocolError, match="not a message"):
        peers.MESSAGE.decode(oversized)
    secret = admissions.Secret(b"k" * 32)
    assert "kkkk" not in repr(secret)


def test_a_link_local_address_is_called_by_its_interface() -> None:
    loopback = socket.if_nametoindex("lo")
    assert _host_of(("fe80::1", 7, 0, loopback)) == "fe80::1%lo"
    assert _host_of(("fd88::1", 7, 0, 0)) == "fd88::1"
    assert _host_of(("::ffff:10.0.0.7", 7, 0, 0)) == _host_of(("10.0.0.7", 7)) == "10.0.0.7"


def test_a_link_is_made_anew_by_order_and_nobody_is_without_one_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("potluck._core.cluster.links.peers._YOUNG_S", 0.0)

    async def story(stack: contextlib.AsyncExitStack) -> None:
        one, other = await opened(stack, Agent(), Agent())
        one.knows(other)
        await one.sees("linked", other.id)
        await other.sees("linked", one.id)
        before = len(other.events)
        one.links.move(other.id, "127.0.0.1", other.server.port)
        await one.sees("ended", other.id, 1, "the peer made a new link")
        async with asyncio.timeout(WAIT_S):
            while ("linked", one.id, 1) not in other.events[before:]:
                other._changed.clear()
                await other._changed.wait()
        assert one.links.address(other.id) == "127.0.0.1"
        assert one.links.local(other.id).startswith("127.")
        assert other.links.nodes == (one.id,)
        one.links.move(other.id, "127.0.0.1", 9)  # nobody there: all stays as it is
        assert one.links.send(other.id, nodes.IndirectProbe("x"))
        await other.sees("received", one.id, 1, nodes.IndirectProbe("x"))

    run(story)


def test_a_link_local_end_without_a_scope_gets_the_interface_that_has_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As seen where a link was made while the interface's global address was still tentative."""
    address = SimpleNamespace(family=socket.AF_INET6, address="fe80::7%eth3")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth3": [address]})
    assert _host_of(("fe80::7", 7, 0, 0)) == "fe80::7%eth3"
    assert _host_of(("fe80::8", 7, 0, 0)) == "fe80::8"


def test_messages_of_another_release_cut_no_link_and_older_peers_get_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A peer of the first version of the protocol, which asks what is not known any more."""

    async def story(stack: contextlib.AsyncExitStack) -> None:
        [ada] = await opened(stack, Agent())
        eve = Agent(2)
        reader, writer, _ = await aio.connect(
            "127.0.0.1", ada.server.port, Hello(KIND, newest=1), eve.credentials
        )
        stack.push_async_callback(aio.end, writer)
        old = msgspec.structs.replace(own_versions(), protocol=1, potluck="0.0.9", executable="py")
        me = peers.Introduction(2, "eve", eve.credentials.public_key, 7, old)
        writer.write(peers.MESSAGE.encode(me))
        await ada.sees("linked", eve.id)
        for body in (
            {"type": "Levitate"},
            {"type": "Levitate"},
            {"type": "Request", "number": 5, "content": {"type": "PartRequest"}},
        ):
            data = msgspec.msgpack.encode(body)
            writer.write(len(data).to_bytes(4, "little") + data)
        assert not ada.links.send(eve.id, peers.BulkCall())
        with pytest.raises(LinkError, match=r"eve has potluck 0.0.9.* py -m pip install --upgrade"):
            await ada.links.ask(eve.id, jobs.HistoryRequest(), jobs.History, timeout_s=None)
        assert ada.links.send(eve.id, peers.Offer("none"))
        writer.write(peers.MESSAGE.encode(peers.Offer("all")))
        assert isinstance(await aio.receive(reader, peers.MESSAGE), peers.Introduction)
        heard = [await aio.receive(reader, peers.MESSAGE) for _ in range(2)]
        assert peers.Offer("none") in heard
        [answer] = [each for each in heard if isinstance(each, peers.Response)]
        assert answer.number == 5
        assert isinstance(answer.content, peers.Failure)
        assert "PartRequest" in answer.content.reason
        await ada.sees("received", eve.id, 2, peers.Offer("all"))
        told = [each.message for each in caplog.records if "another release" in each.message]
        assert sum("Levitate" in each for each in told) == 1
        assert len(told) == 2

    run(story)
