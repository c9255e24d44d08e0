"""Links of two agents by way of a third, on the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.links import relay
from potluck._core.cluster.links.peers import KIND, PeerLinks
from potluck._core.cluster.links.relay import Relays, wanted_detours
from potluck._core.cluster.membership.failure_detector import (
    FailureDetector,
    PeerHealth,
    Status,
    Timing,
)
from potluck._core.cluster.topology.hardware import own_versions
from potluck._core.transport import aio
from potluck._core.transport.knock import CALL_BYTES
from potluck._core.types import Member
from potluck._core.wire import nodes, peers
from potluck._core.wire.greeting import Hello
from potluck._core.wire.nodes import Heartbeat, JobGroup, View, ViewMember
from potluck.errors import Refused
from support.links import new_credentials

WAIT_S = 30.0


def view_of(*names: str, groups: tuple[JobGroup, ...] = ()) -> View:
    members = tuple(ViewMember(name, 1, 1) for name in sorted(names))
    return View("history", 7, members, groups)


def group_of(*places: str, cut: tuple[tuple[str, str], ...] = ()) -> JobGroup:
    """A group with one worker on each of these nodes, in rank order."""
    members = tuple(Member(str(rank), node) for rank, node in enumerate(places))
    return JobGroup("job", 7, members, cut=cut)


def detector_of(**status: tuple[Status, tuple[str, ...]]) -> FailureDetector:
    """By peer: its status, and the peers that it lists as linked."""
    detector = FailureDetector(Timing())
    for node, (state, links) in status.items():
        last = Heartbeat(1, 0, 0.0, False, links)
        detector.peers[node] = PeerHealth(node, 1, state, last=last)
    return detector


UP, CUT, SILENT = Status.UP, Status.CUT, Status.SILENT
SEEN = {"a": (UP, ("b", "c")), "c": (CUT, ("a",)), "d": (UP, ("a", "b", "c"))}


def test_a_member_that_others_reach_is_called_by_way_of_them() -> None:
    detector = detector_of(**SEEN)
    assert wanted_detours("b", view_of(*"abcd"), detector) == {"c": ("a", "d")}
    assert wanted_detours("b", view_of(*"abc"), detector) == {"c": ("a",)}, "members only"
    assert wanted_detours("b", view_of(*"abd"), detector) == {}, "c is no member"
    assert wanted_detours("b", view_of(*"acd"), detector) == {}, "this node is no member"
    assert wanted_detours("b", view_of(*"abcd"), detector, {"c"}) == {}, "c is banned"


def test_of_two_nodes_the_one_with_the_lesser_id_calls() -> None:
    detector = detector_of(a=(UP, ("b", "c")), b=(CUT, ("a",)))
    assert wanted_detours("c", view_of(*"abc"), detector) == {}


@pytest.mark.parametrize("status", [Status.UP, Status.SUSPECT, Status.SILENT, Status.DEAD])
def test_what_is_not_known_to_be_reached_by_others_is_not_called(status: Status) -> None:
    detector = detector_of(a=(UP, ("b", "c")), c=(status, ("a",)))
    assert wanted_detours("b", view_of(*"abc"), detector) == {}


def test_a_job_that_needs_the_link_loses_one_of_the_two_nodes() -> None:
    detector = detector_of(**SEEN)

    def detours(*groups: JobGroup) -> dict[str, tuple[str, ...]]:
        return wanted_detours("b", view_of(*"abcd", groups=groups), detector)

    assert detours(group_of("b", "c")) == {}
    assert detours(group_of("b", "b", "c")) == {}
    assert detours(group_of("a", "b", "c"), group_of("b", "c")) == {}
    assert detours(group_of("a", "b", "c", cut=(("0", "1"),))) == {}, "b would have no link"
    rigid = view_of(*"abcd", groups=(group_of("a", "b", "c"),))
    assert wanted_detours("b", rigid, detector, (), lambda job: False) == {}, "it is not elastic"
    assert detours(group_of("a", "b"), group_of("c"), group_of("c", "d"))
    assert detours(group_of("a", "b", "b", "c", "c"))


def test_a_relayed_link_is_in_the_way_of_an_elastic_job_that_needs_one_of_its_own() -> None:
    def is_it(*groups: JobGroup, elastic: bool = True) -> bool:
        view = view_of(*"abcd", groups=groups)
        return relay.is_in_the_way(view, "b", "c", lambda job: elastic)

    assert is_it(group_of("b", "c"))
    assert is_it(group_of("a", "b", "c"), group_of("c", "b"))
    assert is_it(group_of("a", "b", "c", cut=(("0", "1"),)))
    assert not is_it(group_of("a", "b", "c"))
    assert not is_it(group_of("a", "b"), group_of("c"))
    assert not is_it()
    assert not is_it(group_of("b", "c"), elastic=False), "it would not go on without one of the two"


class Agent:
    """An agent's links and relays; what it knows of others is set by hand."""

    def __init__(self, changed: asyncio.Event) -> None:
        self.changed = changed
        self.credentials = new_credentials()
        self.detector = FailureDetector(Timing())
        self.view: View | None = None
        self.banned: set[str] = set()
        self.heard: list[tuple[str, peers.PeerMessage]] = []
        self.broken: list[BaseException] = []
        self.claimed_port = 0
        self.links: PeerLinks
        self.relays: Relays
        self.server: aio.Server

    @property
    def id(self) -> str:
        return self.credentials.node_id

    def open(self) -> None:
        self.links = PeerLinks(self.credentials, self._introduction, on_broken=lambda error: None)
        self.links.on(nodes.NodeMessage, self._hear)
        self.links.on_linked.append(lambda node, introduction: self.changed.set())
        self.links.on_ended.append(lambda node, incarnation, reason: self.changed.set())
        self.relays = Relays(
            self.credentials,
            self.links,
            self.detector,
            lambda: self.view,
            lambda: self.banned,
            lambda job: True,
            on_broken=self._note,
        )
        self.server = aio.Server("127.0.0.1", 0, self.credentials, self._greeted)

    def _note(self, error: BaseException) -> None:
        self.broken.append(error)
        self.changed.set()

    def _introduction(self) -> peers.Introduction:
        port, versions = self.claimed_port or self.server.port, own_versions()
        return peers.Introduction(1, "machine", self.credentials.public_key, port, versions)

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        serve = {KIND: self.links.greeted, relay.KIND: self.relays.greeted}[hello.kind]
        await serve(reader, writer, hello, node)

    def _hear(self, node: str, message: peers.PeerMessage) -> None:
        self.heard.append((node, message))
        self.changed.set()

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait for links or messages of any of the agents."""
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()

    def knows(self, other: Agent) -> None:
        self.links.heard(Hint("127.0.0.1", other.server.port, "static"))

    def misses(self, node: Agent, via: Agent) -> None:
        """Others reach ``node``, and this agent does not."""
        links = (node.id, self.id)
        self.detector.peers[via.id] = PeerHealth(
            via.id, 1, Status.UP, last=Heartbeat(1, 0, 0.0, False, links)
        )
        self.detector.peers[node.id] = PeerHealth(node.id, 1, Status.CUT)
        self.view = view_of(self.id, node.id, via.id)

    async def close(self) -> None:
        await self.relays.close()
        await self.links.close()
        await self.server.close()


@asynccontextmanager
async def three(claimed_port: int = 0) -> AsyncIterator[tuple[Agent, Agent, Agent]]:
    """``via``, and two agents with links to it, of which the first has the lesser id, and the other
    one may claim a port that is not its own."""
    changed = asyncio.Event()
    agents = [Agent(changed) for _ in range(3)]
    via, one, other = agents
    one, other = sorted((one, other), key=lambda agent: agent.id)
    other.claimed_port = claimed_port
    for each in agents:
        each.open()
    try:
        for each in (one, other):
            each.knows(via)
        await via.until(lambda: len(via.links.nodes) == 2 and one.links.nodes and other.links.nodes)
        yield via, one, other
    finally:
        for each in agents:
            await each.close()


def test_two_agents_talk_by_way_of_a_third_and_directly_once_they_can() -> None:
    async def story() -> None:
        async with three() as (via, one, other):
            one.misses(other, via)
            await via.until(lambda: other.id in one.links.nodes and one.id in other.links.nodes)
            assert one.links.via(other.id) == other.links.via(one.id) == via.id
            assert one.links.address(other.id) == other.links.address(one.id) == ""
            for sender, receiver in ((one, other), (other, one)):
                assert sender.links.send(receiver.id, nodes.Ping("x" * 256))
                said = (sender.id, nodes.Ping("x" * 256))
                await one.until(lambda heard=receiver.heard, said=said: said in heard)
            assert not via.heard, "what the two say is not for it"

            one.detector.peers[other.id].status = Status.UP
            one.knows(other)
            await via.until(lambda: is_direct(one, other) and is_direct(other, one))
            assert one.links.address(other.id) == "127.0.0.1"
            assert one.links.send(other.id, nodes.Ping("y"))
            await via.until(lambda: (one.id, nodes.Ping("y")) in other.heard)

    asyncio.run(story())


def is_direct(one: Agent, other: Agent) -> bool:
    return other.id in one.links.nodes and not one.links.via(other.id)


def test_the_link_ends_with_the_agent_that_relays_it() -> None:
    async def story() -> None:
        async with three() as (via, one, other):
            one.misses(other, via)
            await via.until(lambda: other.id in one.links.nodes and one.id in other.links.nodes)
            one.view = None
            await via.close()
            await via.until(lambda: not one.links.nodes and not other.links.nodes)

    asyncio.run(story())


def test_a_relayed_link_ends_when_a_job_has_begun_that_can_not_do_without_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "_IN_THE_WAY_S", 0.0)

    async def story() -> None:
        async with three() as (via, one, other):
            one.misses(other, via)
            await via.until(lambda: other.id in one.links.nodes and one.id in other.links.nodes)
            group = group_of(one.id, other.id)
            one.view = view_of(one.id, other.id, via.id, groups=(group,))
            await via.until(lambda: not (one.links.via(other.id) or other.links.via(one.id)))

    asyncio.run(story())


@pytest.mark.parametrize("who", ["the one that calls", "the other", "the relay"])
def test_a_ban_ends_relayed_links(who: str) -> None:
    async def story() -> None:
        async with three() as (via, one, other):
            one.misses(other, via)
            await via.until(lambda: other.id in one.links.nodes and one.id in other.links.nodes)
            one.view = None
            if who == "the relay":
                one.banned.add(via.id)
            else:
                via.banned.add(one.id if who == "the one that calls" else other.id)
            await via.until(lambda: other.id not in one.links.nodes)
            await via.until(lambda: one.id not in other.links.nodes)

    asyncio.run(story())


def test_an_agent_relays_between_nodes_with_links_of_its_own_only() -> None:
    async def story() -> None:
        async with three() as (via, one, other):
            stranger = Agent(asyncio.Event())
            with pytest.raises(Refused, match="no link of its own with node"):
                await asks(one, via, stranger.id)
            with pytest.raises(Refused, match="no link of its own with node"):
                await asks(stranger, via, other.id)
            one.misses(other, via)
            await via.until(lambda: other.id in one.links.nodes and one.id in other.links.nodes)
            with pytest.raises(Refused, match="no link of its own with node"):
                await asks(via, one, other.id)

    asyncio.run(story())


def test_an_agent_relays_a_link_between_two_nodes_once() -> None:
    """So that no node takes all that there are, or calls others in crowds from here."""

    async def story() -> None:
        async with three() as (via, one, other):
            one.misses(other, via)
            await via.until(lambda: other.id in one.links.nodes and one.id in other.links.nodes)
            with pytest.raises(Refused, match="once"):
                await asks(one, via, other.id)
            with pytest.raises(Refused, match="once"):
                await asks(other, via, other.id)
            with pytest.raises(Refused, match="no link of its own with node"):
                await asks(other, via, via.id)
            assert one.links.via(other.id) == via.id, "the link goes on"

    asyncio.run(story())


def test_an_agent_relays_a_bounded_number_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_RELAYED", 0)

    async def story() -> None:
        async with three() as (via, one, other):
            with pytest.raises(Refused, match="relays 0 links already"):
                await asks(one, via, other.id)

    asyncio.run(story())


@pytest.mark.parametrize("what", ["another program", "another node"])
def test_an_agent_relays_to_ports_where_the_node_has_proved_its_key_only(what: str) -> None:
    """Two members that work together reach no other port of a host from here."""

    async def story() -> None:
        heard = bytearray()

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.extend(await reader.read(1 << 16))
            writer.close()

        program = await asyncio.start_server(hear, "127.0.0.1", 0)
        stranger = Agent(asyncio.Event())
        stranger.open()
        port = program.sockets[0].getsockname()[1]
        port = port if what == "another program" else stranger.server.port
        async with three(port) as (via, one, other):
            reason = "without a word" if what == "another program" else "another node answers"
            with pytest.raises(Refused, match=reason):
                await asks(one, via, other.id)
            assert len(heard) <= CALL_BYTES, "nothing but a knock went there"
        await stranger.close()
        program.close()
        await program.wait_closed()

    asyncio.run(story())


def test_an_agent_ends_if_it_can_not_look_for_nodes_to_call_any_more() -> None:
    async def story() -> None:
        async with three() as (via, one, _):
            one.view = "no view"  # type: ignore[assignment]
            await via.until(lambda: one.broken)

    asyncio.run(story())


async def asks(agent: Agent, via: Agent, target: str) -> None:
    hello = Hello(relay.KIND, target=target)
    _, writer, _ = await aio.connect("127.0.0.1", via.server.port, hello, agent.credentials)
    await aio.end(writer)
