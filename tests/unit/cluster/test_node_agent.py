"""Agents of several nodes in one loop, over the loopback: a cluster comes about, loses, regains."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck._core.cluster import admission_exchange
from potluck._core.cluster.content.store import Terms
from potluck._core.cluster.discovery.configured import StaticPeers
from potluck._core.cluster.home import node_state
from potluck._core.cluster.home.node_state import AgentRecord, NodeState, find_agent
from potluck._core.cluster.links.local import ask_agent
from potluck._core.cluster.links.peers import KIND
from potluck._core.cluster.node_agent import NodeAgent
from potluck._core.cluster.trust import operator, secret
from potluck._core.cluster.trust.admission_file import AdmissionFile
from potluck._core.cluster.trust.admissions import sign
from potluck._core.cluster.trust.credentials import load_admissions, load_or_create_identity
from potluck._core.settings import Settings
from potluck._core.transport import aio
from potluck._core.transport.credentials import namespace_of
from potluck._core.wire import admissions, local
from potluck._core.wire.bulk import Holding, HoldingRequest
from potluck._core.wire.greeting import Hello
from potluck._core.wire.nodes import StableRecord
from potluck.errors import ConfigurationError, IdentityError, Refused
from support.clusters import admit, ban, found_cluster
from support.disk import changes_by_this_thread
from support.ways import watched

WAIT_S = 40.0
OLD, NEW = b"o" * 32, b"n" * 32


class Running:
    """An agent in a task, and what it said."""

    def __init__(
        self,
        home: Path,
        peers: list[tuple[str, int]],
        port: int = 0,
        settings: Settings | None = None,
    ) -> None:
        self.home = home
        self.notes: list[str] = []
        self._changed = asyncio.Event()
        self.agent = NodeAgent(
            settings or Settings(home=home),
            on_note=self._noted,
            finders=[StaticPeers(peers)],
            host="127.0.0.1",
            port=port,
        )
        self.task = asyncio.create_task(self.agent.run())

    def _noted(self, text: str) -> None:
        self.notes.append(text)
        self._changed.set()

    @property
    def id(self) -> str:
        return self.agent.credentials.node_id

    async def is_ready(self) -> None:
        ready = asyncio.create_task(self.agent.ready.wait())
        await asyncio.wait([ready, self.task], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self.task.done():
            self.task.result()

    async def has(self, condition: Callable[[NodeAgent], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at after each note, and every 50 ms."""
        async with asyncio.timeout(WAIT_S):
            while not condition(self.agent):
                self._changed.clear()
                waiting = asyncio.create_task(self._changed.wait())
                ends = [waiting, self.task]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
                waiting.cancel()
                if self.task.done():
                    self.task.result()

    async def says(self, text: str) -> None:
        """Wait for a line with ``text``."""
        await self.has(lambda agent: any(text in note for note in self.notes))

    async def sees(self, *nodes: Running) -> None:
        """Wait for a view of exactly these."""
        ids = {node.id for node in nodes}
        await self.has(
            lambda agent: agent.plane.protocol.view is not None and set(_nodes(agent)) == ids
        )

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def _nodes(agent: NodeAgent) -> tuple[str, ...]:
    view = agent.plane.protocol.view
    return () if view is None else view.nodes


class Cluster(contextlib.AsyncExitStack):
    """Three agents that know the address of the first, ``ada``, the founder of their cluster."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.first_port = 0

    async def node(self, name: str, port: int = 0) -> Running:
        peers = [("127.0.0.1", self.first_port)] if self.first_port else []
        home, first = self.root / name, self.root / "ada"
        if name == "ada" and not home.exists():
            found_cluster(home, psk=OLD)
        elif not home.exists():
            admit(first, home)
        node = Running(home, peers, port)
        self.push_async_callback(node.stop)
        await node.is_ready()
        self.first_port = self.first_port or node.agent.port
        return node

    async def three(self) -> list[Running]:
        nodes = [await self.node(name) for name in ("ada", "bob", "carl")]
        for node in nodes:  # each also hears of the others, as the network would tell
            for other in nodes:
                tells(node, other)
        for node in nodes:
            await node.sees(*nodes)
        return nodes


def tells(node: Running, other: Running) -> None:
    from potluck._core.cluster.discovery.advert import Hint

    node.agent.links.heard(Hint("127.0.0.1", other.agent.port, "static"))


def run(root: Path, story: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100), Cluster(root) as cluster:
            await story(cluster)

    asyncio.run(bounded())


def test_an_agent_that_calls_nobody_any_more_ends_instead_of_looking_alive(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, bob = await cluster.node("ada"), await cluster.node("bob")
        await ada.sees(ada, bob)

        def broken(now: float) -> None:
            raise MemoryError("no room")

        links = bob.agent.links
        links._book.due = broken  # type: ignore[method-assign, assignment]
        links._calls.wake()
        with pytest.raises(MemoryError):
            await asyncio.wait_for(asyncio.shield(bob.task), WAIT_S)

    run(tmp_path, story)


def test_an_agent_whose_heart_stops_ends_instead_of_looking_alive(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada = await cluster.node("ada")
        await ada.sees(ada)

        def broken() -> float:
            raise MemoryError("no room")

        ada.agent.plane.protocol.next_wakeup = broken  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            await asyncio.wait_for(asyncio.shield(ada.task), WAIT_S)

    run(tmp_path, story)


def test_three_agents_agree_lose_one_and_take_it_back(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()
        ada, bob, carl = await cluster.three()
        assert len({node.agent.plane.protocol.view for node in (ada, bob, carl)}) == 1
        epoch = ada.agent.report.status().epoch
        began = loop.time()
        await carl.stop()
        await ada.sees(ada, bob)
        print(f"a node whose agent ended was out of the view after {loop.time() - began:.2f} s")
        assert ada.agent.report.status().epoch > epoch
        again = await cluster.node("carl")
        assert again.id == carl.id
        for node in (ada, bob):
            tells(node, again)
        for node in (ada, bob, again):
            await node.sees(ada, bob, again)
        shown = again.agent.report.status()
        assert [each.role for each in shown.nodes].count("leader") == 1
        assert {each.link for each in shown.nodes} <= {"self", "up", "new"}
        assert all(each.python and each.potluck for each in shown.nodes)
        assert not any(node.id in line for node in (ada, bob) for line in again.notes), "by name"

    run(tmp_path, story)


def test_a_view_goes_the_way_of_its_page(tmp_path: Path) -> None:
    """Of two agents, which agree that the second one joins."""

    async def story(cluster: Cluster) -> None:
        ada, bob = await cluster.node("ada"), await cluster.node("bob")
        for node in (ada, bob):
            await node.sees(ada, bob)

    with watched() as trace, trace.recording():
        run(tmp_path, story)
    trace.check("view", within="_core/cluster/membership/")


def test_a_ban_takes_a_node_out_everywhere_with_its_links_and_the_secret(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, bob, carl = await cluster.three()
        ban(ada.home, carl.id, "sold", psk=NEW)
        await ada.sees(ada, bob)
        await bob.sees(ada, bob)
        for node in (ada, bob):
            await node.has(lambda agent: agent.credentials.namespace == namespace_of(NEW))
            assert carl.id not in node.agent.links.nodes
            assert node.agent.report.status().banned == (carl.id,)
        await carl.says("this node is banned from the cluster")
        assert carl.agent.credentials.namespace == namespace_of(OLD)
        with pytest.raises(Refused, match=r"out of its cluster: .* \(sold\)\. An admin"):
            await ask_agent(Settings(home=carl.home), local.NodesRequest(), timeout_s=WAIT_S)
        # It calls again and again: nobody talks to it, and it never hears of the new secret.
        tells(carl, ada)
        tells(carl, bob)
        hello = Hello(KIND)
        for node in (ada, bob):
            with pytest.raises(Refused, match="banned"):
                await aio.connect("127.0.0.1", node.agent.port, hello, carl.agent.credentials)
        assert carl.agent.links.nodes == ()
        assert carl.agent.credentials.namespace == namespace_of(OLD)

    run(tmp_path, story)


def test_a_machine_that_was_away_during_a_ban_and_a_change_comes_back(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, bob, carl = await cluster.three()
        await bob.stop()
        await ada.sees(ada, carl)
        ban(ada.home, carl.id, "sold", psk=NEW)
        await ada.sees(ada)
        bob = await cluster.node("bob")
        tells(ada, bob)
        await bob.sees(ada, bob)
        await bob.has(lambda agent: agent.credentials.namespace == namespace_of(NEW))
        assert bob.agent.report.status().banned == (carl.id,)
        tells(carl, bob)
        tells(bob, carl)
        assert carl.id not in bob.agent.links.nodes

    run(tmp_path, story)


def test_a_ban_is_taken_back(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, bob, carl = await cluster.three()
        bob.agent.content.open("data", Terms(lambda node, package: True))
        wanted = HoldingRequest("data", bytes(32))
        assert await carl.agent._bulk.ask(bob.id, wanted, Holding) == Holding()
        ban(ada.home, carl.id, psk=NEW)
        await bob.sees(ada, bob)
        await bob.has(lambda agent: not agent._bulk._all)
        await carl.says("this node is banned from the cluster")
        key = carl.agent.credentials.public_key
        operator.admit(AdmissionFile(ada.home), load_or_create_identity(ada.home), key)
        for node in (ada, bob, carl):
            tells(node, carl)
            tells(carl, node)
        for node in (ada, bob, carl):
            await node.sees(ada, bob, carl)
        await carl.has(lambda agent: agent.credentials.namespace == namespace_of(NEW))

    run(tmp_path, story)


def test_an_open_cluster_is_closed_and_the_list_reaches_all(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        homes = [tmp_path / name for name in ("eve", "fay")]
        settings = [Settings(home=home, psk=OLD.hex()) for home in homes]
        eve, fay = (Running(each.home, [], settings=each) for each in settings)
        for node in (eve, fay):
            cluster.push_async_callback(node.stop)
            await node.is_ready()
        assert eve.agent.report.status().is_open
        tells(eve, fay)
        for node in (eve, fay):
            await node.sees(eve, fay)
        file, key = load_admissions(settings[0]), load_or_create_identity(homes[0])
        operator.lock(file, key, [(fay.agent.credentials.public_key, "fay")])
        await fay.has(lambda agent: not agent.report.status().is_open)
        for node in (eve, fay):
            await node.sees(eve, fay)
        outside = Settings(home=tmp_path / "late", psk=OLD.hex())
        late = Running(outside.home, [], settings=outside)
        cluster.push_async_callback(late.stop)
        await late.is_ready()
        hello = Hello(KIND)
        for node in (eve, fay):
            with pytest.raises(Refused, match="never admitted"):
                await aio.connect("127.0.0.1", node.agent.port, hello, late.agent.credentials)

    run(tmp_path, story)


def test_an_admission_that_ended_is_over_everywhere(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada, bob, carl = await cluster.three()
        key, word = carl.agent.credentials.public_key, AdmissionFile(ada.home)
        me = load_or_create_identity(ada.home)
        operator.admit(word, me, key, days=1e-9)
        await ada.sees(ada, bob)
        await bob.sees(ada, bob)
        # An admin's agent says it by a record, so machines with a wrong clock know as well.
        await bob.has(lambda agent: agent.report.status().banned == (carl.id,))

    run(tmp_path, story)


@pytest.mark.parametrize("psk", [b"x" * 32, NEW], ids=["another", "the next"])
def test_a_secret_that_no_record_of_an_admin_names_is_not_taken(tmp_path: Path, psk: bytes) -> None:
    """``re-key`` of the security review: one link, and a message with a secret in it."""

    async def story(cluster: Cluster) -> None:
        ada, bob, carl = await cluster.three()
        for _ in range(3):
            carl.agent.links.send(ada.id, admissions.Secret(psk))
            carl.agent.links.send(bob.id, admissions.Secret(psk))
        forged = admissions.SecretChange(
            cluster=b"c" * 16,
            number=9,
            signer=carl.agent.credentials.public_key,
            at=0,
            namespace=namespace_of(psk),
        )
        mine = AdmissionFile(ada.home).load()
        assert mine is not None
        own = msgspec.structs.replace(forged, cluster=mine.founding.cluster)
        own = sign(own, load_or_create_identity(carl.home))
        carl.agent.links.send(ada.id, admissions.Records(mine.founding, (own,)))
        carl.agent.links.send(bob.id, admissions.Records(mine.founding, (forged,)))
        await bob.has(lambda agent: carl.id not in agent.links.nodes)  # it sent a forged record
        for node in (ada, bob):
            assert node.agent.credentials.namespace == namespace_of(OLD)
            assert AdmissionFile(node.home).roster.namespace == ""

    run(tmp_path, story)


def test_a_member_bans_nobody(tmp_path: Path) -> None:
    """``ban all`` of the security review: one message bans everybody, for good."""

    async def story(cluster: Cluster) -> None:
        ada, bob, carl = await cluster.three()
        key, mine = load_or_create_identity(carl.home), AdmissionFile(ada.home).load()
        assert mine is not None
        words = [
            sign(
                admissions.Admission(
                    cluster=mine.founding.cluster,
                    number=(1 << 53) - 1,
                    signer=carl.agent.credentials.public_key,
                    at=(1 << 40) - 1,
                    key=victim.agent.credentials.public_key,
                    verdict="revoked",
                ),
                key,
            )
            for victim in (ada, bob)
        ]
        said = admissions.Records(mine.founding, tuple(words))
        for node in (ada, bob):
            carl.agent.links.send(node.id, said)
        # Records are taken in the order in which they come: once this one is there, so were those.
        operator.admit(
            AdmissionFile(ada.home), load_or_create_identity(ada.home), bytes(31) + b"k", name="k"
        )
        for node in (ada, bob, carl):
            await node.has(lambda agent: len(agent.admissions.roster.entries) == 4)
        for node in (ada, bob):
            roster = AdmissionFile(node.home).roster
            assert [each.role for each in roster.entries.values()].count("revoked") == 0
            assert set(_nodes(node.agent)) == {ada.id, bob.id, carl.id}

    run(tmp_path, story)


def test_a_member_that_takes_no_part_in_a_change_of_the_secret_vetoes_nothing(
    tmp_path: Path,
) -> None:
    """``veto`` of the security review: it never answers, and the secret is not changed."""

    async def story(cluster: Cluster) -> None:
        ada, bob, carl = await cluster.three()
        carl.agent.links.on(admissions.AdmissionMessage, lambda node, message: None)
        operator.change_of_secret(AdmissionFile(ada.home), load_or_create_identity(ada.home), NEW)
        secret.change_secret(ada.home, NEW)
        for node in (ada, bob):
            await node.has(lambda agent: agent.credentials.namespace == namespace_of(NEW))
        assert carl.agent.credentials.namespace == namespace_of(OLD)
        assert set(_nodes(ada.agent)) == {ada.id, bob.id, carl.id}, "it is not cut off for that"
        # It changes its mind, and gets the secret, being admitted.
        carl.agent.links.on(admissions.AdmissionMessage, carl.agent.exchange._received)
        await carl.has(lambda agent: agent.credentials.namespace == namespace_of(NEW))

    run(tmp_path, story)


def test_the_secret_is_changed_on_all_nodes_while_they_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They tell each other at once that they have it, and not when the next digest is due."""

    async def story(cluster: Cluster) -> None:
        nodes = await cluster.three()
        monkeypatch.setattr(admission_exchange, "DIGEST_S", 1e6)
        epochs = [node.agent.report.status().epoch for node in nodes]
        ada = nodes[0].home
        operator.change_of_secret(AdmissionFile(ada), load_or_create_identity(ada), NEW)
        secret.change_secret(ada, NEW)
        for node in nodes:
            await node.has(lambda agent: agent.credentials.namespace == namespace_of(NEW))
        await nodes[0].has(
            lambda agent: (
                {each.secret for each in agent.report.status().nodes} == {namespace_of(NEW)}
            )
        )
        assert [node.agent.report.status().epoch for node in nodes] == epochs
        assert all(set(_nodes(node.agent)) == {n.id for n in nodes} for node in nodes)

    run(tmp_path, story)


def test_the_command_line_asks_the_agent_of_its_own_machine(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        ada = await cluster.node("ada")
        await ada.sees(ada)
        settings = Settings(home=ada.home)
        reply = await ask_agent(settings, local.NodesRequest(), timeout_s=WAIT_S)
        assert isinstance(reply, local.NodesReply)
        assert (reply.node, reply.port) == (ada.id, ada.agent.port)
        assert [each.role for each in reply.nodes] == ["leader"]
        assert reply.epoch == ada.agent.report.status().epoch > 0
        second = Running(ada.home, [])
        with pytest.raises(ConfigurationError, match="runs on this machine already"):
            await second.is_ready()
        await ada.stop()
        with pytest.raises(ConfigurationError, match="potluck up"):
            await ask_agent(settings, local.NodesRequest(), timeout_s=WAIT_S)

    run(tmp_path, story)


def test_a_command_gives_no_word_to_another_nodes_agent_at_its_agents_port(tmp_path: Path) -> None:
    """Another member that took the port while this machine's agent was down, say."""

    async def story(cluster: Cluster) -> None:
        ada, bob = await cluster.node("ada"), await cluster.node("bob")
        taken = AgentRecord(os.getpid(), bob.agent.port)
        with pytest.raises(ConfigurationError, match="another node's agent"):
            await ask_agent(
                Settings(home=ada.home), local.NodesRequest(), timeout_s=WAIT_S, agent=taken
            )

    run(tmp_path, story)


def test_a_node_never_lives_the_same_life_twice_and_keeps_its_record(tmp_path: Path) -> None:
    incarnations = []
    for installed in (5, 7):
        state = NodeState(tmp_path)
        incarnations.append(state.incarnation)
        state.write(StableRecord(installed=installed))
        assert find_agent(tmp_path) is None, "it does not listen yet"
        state.listening(4711)
        found = find_agent(tmp_path)
        assert found is not None
        assert found.port == 4711
        state.close()
        state.close()
        assert find_agent(tmp_path) is None
    last = NodeState(tmp_path)
    assert (incarnations, last.incarnation, last.record.installed) == ([1, 2], 3, 7)
    last.close()
    (tmp_path / "node_state").write_bytes(b"\xc1")
    with pytest.raises(IdentityError, match="damaged"):
        NodeState(tmp_path)
    assert (tmp_path / "node_state").stat().st_mode & 0o777 == 0o600


def test_commands_that_look_for_an_agent_are_none_and_keep_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_state, "_LOOKING_S", WAIT_S)
    first = NodeState(tmp_path)
    first.listening(4711)
    first.close()
    (tmp_path / "node_agent.json").write_text('{"pid": 1, "port": 4711}')  # as SIGKILL leaves it
    (tmp_path / "node_agent.json").chmod(0o600)
    with (tmp_path / ".node_agent.lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert find_agent(tmp_path) is None
        soon = threading.Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN))
        soon.start()
        state = NodeState(tmp_path)
        state.close()
        soon.join()


def test_an_agent_at_work_changes_nothing_on_disk_in_its_event_loop(tmp_path: Path) -> None:
    """A slow disk would hold its heartbeats, and the others would take it for dead."""

    async def story(cluster: Cluster) -> None:
        ada, bob, carl = await cluster.three()
        with changes_by_this_thread(tmp_path) as changes:
            await bob.agent.offers.pause(True)
            await ada.agent.offers.decide(carl.id, is_allowed=False)
            ada.agent.jobs._agent.log.add("job", "0", "stdout", "0 ada", "a worker's line")
            await ada.agent.jobs._agent.log.written()
            await asyncio.to_thread(ban, ada.home, carl.id, "sold", psk=NEW)
            for node in (ada, bob):
                await node.sees(ada, bob)
                await node.has(lambda agent: agent.credentials.namespace == namespace_of(NEW))
        assert changes == []

    run(tmp_path, story)
