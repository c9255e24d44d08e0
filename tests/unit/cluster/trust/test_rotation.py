"""Changing the secret: stories of who is told what, and then for real between three nodes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from potluck.cluster.discovery.advert import Hint
from potluck.cluster.links.peers import KIND, PeerLinks
from potluck.cluster.topology.versions import own_versions
from potluck.cluster.trust import keyring
from potluck.cluster.trust.credentials import load_credentials
from potluck.cluster.trust.rotation import (
    PENDING_S,
    STORE_S,
    Action,
    Drop,
    Rotation,
    Say,
    Store,
    Tell,
    Use,
)
from potluck.settings import Settings
from potluck.transport import aio
from potluck.transport.credentials import namespace_of
from potluck.wire import peers
from potluck.wire.greeting import Hello
from potluck.wire.peers import DropSecret, NewSecret, SecretStored, UseSecret

OLD, NEW = b"o" * 32, b"n" * 32


def ended(actions: list[Action]) -> bool | None:
    """How the change ended, by the last thing said about it."""
    said = [each.ok for each in actions if isinstance(each, Say)]
    return said[-1] if said else None


def test_who_has_its_secret_from_a_variable_says_so_and_nothing_is_changed() -> None:
    leader, follower = Rotation(), Rotation("it comes from POTLUCK_PSK")
    leader.order("r", NEW, ["ada"], 0.0)
    [tell] = follower.received("bob", NewSecret("r", NEW), 0.0)
    assert isinstance(tell, Tell)
    assert tell.node == "bob"
    actions = leader.received("ada", tell.message, 1.0)
    assert actions[0] == Drop()
    assert ended(actions) is False
    said = actions[-1]
    assert isinstance(said, Say)
    assert "refused the new secret: it comes from POTLUCK_PSK" in said.text
    assert ended(follower.order("r", NEW, ["bob"], 0.0)) is False


def test_nobody_shows_it_before_everybody_accepts_it() -> None:
    leader = Rotation()
    first = leader.order("r", NEW, ["bob", "ada"], 0.0)
    assert first == [Store(NEW), Tell("ada", NewSecret("r", NEW)), Tell("bob", NewSecret("r", NEW))]
    assert leader.received("ada", SecretStored("r"), 1.0) == []
    assert leader.received("ada", SecretStored("r"), 1.0) == [], "said twice"
    last = leader.received("bob", SecretStored("r"), 2.0)
    assert last[:3] == [Use(), Tell("ada", UseSecret("r")), Tell("bob", UseSecret("r"))]
    assert ended(last) is True
    assert leader.received("bob", SecretStored("r"), 3.0) == [], "nobody is waited for"


def test_a_node_that_follows_stores_answers_and_switches_when_told() -> None:
    follower = Rotation()
    actions = follower.received("ada", NewSecret("r", NEW), 0.0)
    assert actions[:2] == [Store(NEW), Tell("ada", SecretStored("r"))]
    assert follower.received("ada", UseSecret("other"), 1.0) == []
    assert follower.received("ada", UseSecret("r"), 1.0)[0] == Use()
    assert follower.received("ada", UseSecret("r"), 1.0) == []


def test_a_node_that_missed_the_order_switches_when_it_meets_one_that_has() -> None:
    follower = Rotation()
    follower.received("ada", NewSecret("r", NEW), 0.0)
    assert follower.linked("bob", namespace_of(OLD)) == []
    assert follower.linked("bob", namespace_of(NEW))[0] == Use()
    assert follower.linked("bob", namespace_of(NEW)) == []


def test_alone_it_is_done_at_once() -> None:
    actions = Rotation().order("r", NEW, [], 0.0)
    assert actions[:2] == [Store(NEW), Use()]
    assert ended(actions) is True


def test_a_node_that_dies_meanwhile_is_left_out_and_named() -> None:
    leader = Rotation()
    leader.order("r", NEW, ["ada", "bob"], 0.0)
    leader.received("ada", SecretStored("r"), 1.0)
    assert leader.lost("carl") == []
    actions = leader.lost("bob")
    assert "must join again" in str(actions[0])
    assert Tell("ada", UseSecret("r")) in actions
    assert ended(actions) is True


def test_a_node_that_is_silent_or_cannot_store_it_ends_the_change_everywhere() -> None:
    leader = Rotation()
    leader.order("r", NEW, ["ada", "bob"], 0.0)
    leader.received("ada", SecretStored("r"), 1.0)
    assert leader.next_wakeup() == STORE_S
    assert leader.tick(STORE_S - 0.1) == []
    actions = leader.tick(STORE_S)
    assert actions[:3] == [Drop(), Tell("ada", DropSecret("r")), Tell("bob", DropSecret("r"))]
    assert ended(actions) is False
    assert "bob" in str(actions[-1])
    leader.order("s", NEW, ["ada"], 20.0)
    actions = leader.received("ada", SecretStored("s", "disk full"), 21.0)
    assert Drop() in actions
    assert "disk full" in str(actions[-1])
    follower = Rotation()
    follower.received("ada", NewSecret("r", NEW), 0.0)
    assert follower.received("ada", DropSecret("x"), 1.0) == []
    assert follower.received("ada", DropSecret("r"), 1.0)[0] == Drop()


def test_two_changes_at_once_are_refused_and_a_forgotten_one_is_replaced() -> None:
    node = Rotation()
    node.received("ada", NewSecret("r", NEW), 0.0)
    [answer] = node.received("bob", NewSecret("s", OLD), 1.0)
    assert isinstance(answer, Tell)
    assert "unfinished" in str(answer.message)
    assert ended(node.order("t", OLD, [], 1.0)) is False
    assert node.received("bob", NewSecret("s", OLD), PENDING_S + 1)[0] == Store(OLD)


def test_no_action_shows_the_secret() -> None:
    assert "nnnn" not in repr(Rotation().order("r", NEW, ["ada"], 0.0))


def _fail(error: BaseException) -> None:
    raise error


class Node:
    """A node with real files and links that takes part in changes of the secret."""

    def __init__(self, home: Path) -> None:
        self.home = home
        keyring.replace_secret(home, OLD)
        self.credentials = load_credentials(Settings(home=home))
        self.rotation = Rotation()
        self.num_linked = asyncio.Semaphore(0)
        self.switched = asyncio.Event()

    async def open(self) -> None:
        me = peers.Introduction(1, self.home.name, 1, own_versions())
        self.links = PeerLinks(self.credentials, lambda: me, on_broken=_fail)
        self.links.on(peers.PeerMessage, self.received)
        self.links.on_linked.append(self.linked)
        self.links.on_ended.append(self.ended)
        self.server = aio.Server("127.0.0.1", 0, self.credentials, self.links.greeted)

    async def close(self) -> None:
        await self.links.close()
        await self.server.close()

    def linked(self, node: str, introduction: peers.Introduction, namespace: str) -> None:
        self.num_linked.release()
        self.act(self.rotation.linked(node, namespace))

    def received(self, node: str, message: peers.PeerMessage) -> None:
        self.act(self.rotation.received(node, message, 0.0))

    def ended(self, node: str, incarnation: int, reason: str) -> None:
        self.act(self.rotation.lost(node))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Tell(node, message):
                    self.links.send(node, message)
                case Store(psk):
                    keyring.store_next(self.home, psk)
                case Use():
                    assert keyring.use_next(self.home)
                    self.switched.set()
                case Drop():
                    keyring.drop_next(self.home)


def test_three_nodes_change_their_secret_and_every_new_connection_works_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Extra calls replace no link.
    monkeypatch.setattr("potluck.cluster.links.peers._YOUNG_S", 1000.0)
    monkeypatch.setattr("potluck.cluster.links.peers.IDLE_S", 1000.0)  # nobody sends heartbeats

    async def story() -> None:
        async with contextlib.AsyncExitStack() as stack:
            nodes = [Node(tmp_path / name) for name in ("ada", "bob", "carl")]
            for node in nodes:
                await node.open()
                stack.push_async_callback(node.close)
            for node in nodes:
                for other in nodes:
                    node.links.heard(Hint("127.0.0.1", other.server.port, "static"))
            for node in nodes:
                for _ in range(2):
                    await node.num_linked.acquire()
            ada = nodes[0]
            calls = 0

            async def call(near: Node, far: Node) -> None:
                hello = Hello(KIND, near.credentials.namespace)
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1",
                    far.server.port,
                    ssl=near.credentials.client_context,
                    server_hostname="",
                )
                await aio.write_greeting(writer, hello)
                answer = await aio.read_greeting(reader)
                assert getattr(answer, "code", "") == "duplicate", answer
                await aio.end(writer)

            changing = asyncio.gather(*(node.switched.wait() for node in nodes))
            ada.act(ada.rotation.order("r", NEW, ada.links.nodes, 0.0))
            while not changing.done() or calls < 12:
                for near in nodes:
                    for far in nodes:
                        if near is not far:
                            await call(near, far)
                            calls += 1
            await changing
            for node in nodes:
                assert node.credentials.namespace == namespace_of(NEW)
                assert set(node.links.nodes) == {n.credentials.node_id for n in nodes} - {
                    node.credentials.node_id
                }, "no link was lost"

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(bounded())
