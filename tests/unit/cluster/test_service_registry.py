"""What an agent knows of services, and whom it believes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from potluck._core.cluster import service_registry
from potluck._core.cluster.links.peers import Requests
from potluck._core.cluster.names import NodeNames
from potluck._core.cluster.service_registry import ServiceRegistry
from potluck._core.wire import local, peers
from potluck._core.wire.peers import (
    MAX_SERVICES,
    NodeServices,
    NodeServicesRequest,
    ServedService,
)

ME, ADA, EVE = (letter * 64 for letter in "abe")


def served(*names: str, port: int = 1, methods: tuple[str, ...] = ("m",)) -> tuple[Any, ...]:
    return tuple(ServedService(name, methods, port) for name in names)


class Program:
    """A program's connection to its agent."""

    is_behind = False

    def __init__(self, name: str = "") -> None:
        self.replies: list[Any] = []

    def take(self, message: local.Reply) -> None:
        local.REPLY.encode(message)
        self.replies.append(message)


class Links:
    """Links to ADA and EVE; what is sent is kept."""

    def __init__(self) -> None:
        self.nodes = (ADA, EVE)
        self.sent: list[tuple[str, Any]] = []
        self.heard = asyncio.Event()
        self.requests = Requests()
        self.answers: dict[type, Callable[..., Any]] = {}

    def on_request(self, kind: type, answer: Callable[..., Any]) -> None:
        self.answers[kind] = answer

    async def ask(self, node: str, request: Any, kind: Any, *, timeout_s: float) -> Any:
        def send(number: int) -> bool:
            message = peers.Request(number, request)
            peers.MESSAGE.encode(message)
            self.sent.append((node, message))
            self.heard.set()
            return True

        return await self.requests.ask(node, kind, send, timeout_s=timeout_s)

    def last_address(self, node: str) -> str:
        return f"host-of-{node[0]}"


class Agent:
    """The links and commands of an agent on ME."""

    def __init__(self) -> None:
        self.links = Links()
        self.on_gone: list[Callable[[Program], None]] = []
        self._takers: dict[type, Callable[..., Any]] = {}
        names = NodeNames(ME, "me")
        names.met(ADA, "ada")
        names.met(EVE, "eve")
        links: Any = self.links
        commands: Any = self
        ServiceRegistry(ME, names, links, commands)

    def on(self, kind: type, take: Callable[..., Any]) -> None:
        self._takers[kind] = take

    def asked(self, node: str, name: str = "") -> Any:
        """What ``node`` learns of the services here."""
        answer = self.links.answers[NodeServicesRequest](node, NodeServicesRequest(name))
        peers.MESSAGE.encode(peers.Response(1, answer))
        return answer.services

    async def ask(self, request: Any) -> Any:
        reply = await self._takers[type(request)](request, Program())
        local.REPLY.encode(reply)
        return reply

    async def register(self, program: Program, *services: ServedService) -> local.CommandResult:
        result = await self._takers[local.ServeRequest](local.ServeRequest(services), program)
        assert isinstance(result, local.CommandResult)
        return result

    async def answered(self, asking: Coroutine[Any, Any, Any], **answers: NodeServices) -> Any:
        """The reply to ``asking`` when nodes answer so, in this order."""
        task = asyncio.create_task(asking)
        await self.links.heard.wait()
        for name, answer in answers.items():
            self.says({"ada": ADA, "eve": EVE}[name], answer)
        return await task

    def says(self, node: str, answer: NodeServices) -> None:
        """``node`` answers the newest request to it, or else the newest to another node."""
        sent = [message for to, message in self.links.sent if to == node]
        newest = sent[-1] if sent else self.links.sent[-1][1]
        self.links.requests.answered(node, newest.number, answer)


def test_agents_are_asked_and_answer_for_their_own_machines() -> None:
    async def story() -> None:
        agent = Agent()
        await agent.register(Program(), *served("mine", port=7))
        reply = await agent.answered(
            agent.ask(local.ServicesRequest()),
            ada=NodeServices(served("images", port=8)),
            eve=NodeServices(),
        )
        assert agent.links.sent == [
            (ADA, peers.Request(1, NodeServicesRequest())),
            (EVE, peers.Request(2, NodeServicesRequest())),
        ]
        assert reply.services == (
            local.ServiceInfo(ADA, "ada", "host-of-b", *served("images", port=8)),
            local.ServiceInfo(ME, "me", "127.0.0.1", *served("mine", port=7)),
        )
        assert (reply.silent, reply.num_left_out) == ((), 0)
        assert agent.asked(EVE, "mine") == served("mine", port=7)
        assert agent.asked(EVE, "images") == ()

    asyncio.run(story())


def test_what_was_not_asked_is_not_believed() -> None:
    async def story() -> None:
        agent = Agent()
        request = local.ServicesRequest("images", ADA)
        reply = await agent.answered(
            agent.ask(request),
            eve=NodeServices(served("images", port=666)),
            ada=NodeServices(served("other", "images")),
        )
        assert [(each.node, each.service.name) for each in reply.services] == [(ADA, "images")]
        agent.says(ADA, NodeServices(served("late")))
        agent.links.requests.answered(ADA, 77, NodeServices(served("unasked")))

    asyncio.run(story())


def test_a_silent_node_is_named_and_one_whose_link_ended_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        agent = Agent()
        asking = asyncio.create_task(agent.ask(local.ServicesRequest("images")))
        await agent.links.heard.wait()
        agent.says(ADA, NodeServices(served("images")))
        agent.links.nodes = (ADA,)
        agent.links.requests.lost("gone", EVE)
        reply = await asking
        assert ([each.node for each in reply.services], reply.silent) == ([ADA], ())
        agent.links.nodes = (ADA, EVE)
        monkeypatch.setattr(service_registry, "ANSWER_S", 0.01)
        reply = await agent.ask(local.ServicesRequest("images"))
        assert (reply.services, set(reply.silent)) == ((), {ADA, EVE})

    asyncio.run(story())


def test_services_are_forgotten_with_the_program_and_names_are_free_again() -> None:
    async def story() -> None:
        agent, first, second = Agent(), Program(), Program()
        assert (await agent.register(first, *served("a", "b"))).ok
        refused = await agent.register(second, *served("b", "c"))
        assert (refused.ok, refused.text) == (
            False,
            "another program of this machine serves 'b' already",
        )
        assert agent.asked(ADA) == served("a", "b"), "all or nothing"
        for tell in agent.on_gone:
            tell(first)
            tell(first)
        assert (await agent.register(second, *served("b", "c"))).ok
        assert agent.asked(ADA) == served("b", "c")

    asyncio.run(story())


def test_services_and_questions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        agent = Agent()
        many = [f"s{number}" for number in range(MAX_SERVICES)]
        assert (await agent.register(Program(), *served(*many))).ok
        refused = await agent.register(Program(), *served("more"))
        assert (refused.ok, "at most 64 services" in refused.text) == (False, True)
        agent = Agent()
        wide = tuple(f"{number:02}" + "\U0001f372" * 62 for number in range(64))
        refused = await agent.register(Program(), *served(*many, methods=wide))
        assert (refused.ok, "at most 64 KiB" in refused.text) == (False, True)

        monkeypatch.setattr(service_registry, "MAX_QUESTIONS", 1)
        waiting = asyncio.create_task(agent.ask(local.ServicesRequest()))
        await agent.links.heard.wait()
        reply = await agent.ask(local.ServicesRequest())
        assert "1 questions for services are under way" in reply.refusal
        for node in (ADA, EVE):
            agent.says(node, NodeServices())
        await waiting
        waiting = asyncio.create_task(agent.ask(local.ServicesRequest()))
        await asyncio.wait([waiting], timeout=0)
        waiting.cancel()  # the program has left
        await asyncio.gather(waiting, return_exceptions=True)
        agent.links.nodes = ()
        assert (await agent.ask(local.ServicesRequest())).refusal == "", "it takes no room"

    asyncio.run(story())


def test_a_listing_that_does_not_fit_says_how_much_is_left_out() -> None:
    async def story() -> None:
        agent = Agent()
        agent.links.nodes = tuple(f"{number:064x}" for number in range(300))
        names = [f"{number:02}{'n' * 60}" for number in range(MAX_SERVICES)]
        asking = asyncio.create_task(agent.ask(local.ServicesRequest()))
        await agent.links.heard.wait()
        for node in agent.links.nodes:
            agent.says(node, NodeServices(served(*names)))
        reply = await asking
        assert reply.num_left_out > 0
        assert len(reply.services) + reply.num_left_out == 300 * MAX_SERVICES

    asyncio.run(story())
