"""``ServiceRegistry``: where the services of programs outside of jobs are.

A program of this machine registers its services over its connection to the agent, and they are
forgotten with that connection. A program that looks for a service asks its own agent, which asks
the agents of all linked nodes, and those answer for their own machines only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Iterable

import msgspec

from potluck._core.cluster.links.local import Client, Commands
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.cluster.names import NodeNames
from potluck._core.wire import local
from potluck._core.wire.peers import (
    MAX_SERVED_BYTES,
    MAX_SERVICES,
    NodeServices,
    NodeServicesRequest,
    ServedService,
)
from potluck.errors import PotluckError

ANSWER_S = 2.0
"""How long the other agents may take to answer."""
MAX_QUESTIONS = 256
"""Of the programs of this machine, at one time."""

_MAX_REPLY_BYTES = local.MAX_MESSAGE - (256 << 10)
"""The rest is for the ids of silent nodes."""


class ServiceRegistry:
    """The services of this machine's programs, and questions for services of others."""

    def __init__(self, me: str, names: NodeNames, links: PeerLinks, commands: Commands) -> None:
        self._me = me
        self._names = names
        self._links = links
        self._mine: dict[Client, tuple[ServedService, ...]] = {}
        self._num_questions = 0
        commands.on(local.ServeRequest, self._register)
        commands.on(local.ServicesRequest, self._asked)
        commands.on_gone.append(self._gone)
        links.on_request(NodeServicesRequest, self._requested)

    # Services of this machine.

    async def _register(self, request: local.ServeRequest, client: Client) -> local.CommandResult:
        others = [each for other, its in self._mine.items() if other is not client for each in its]
        refusal = _objection(others, request.services)
        if refusal:
            return local.CommandResult(False, refusal)
        self._mine[client] = request.services
        return local.CommandResult(True, "registered")

    def _gone(self, client: Client) -> None:
        self._mine.pop(client, None)

    def _here(self, name: str) -> tuple[ServedService, ...]:
        return _named(name, itertools.chain.from_iterable(self._mine.values()))

    def _requested(self, node: str, request: NodeServicesRequest) -> NodeServices:
        return NodeServices(self._here(request.name))

    # Services of other machines.

    async def _asked(self, request: local.ServicesRequest, client: Client) -> local.ServicesReply:
        if self._num_questions >= MAX_QUESTIONS:
            text = f"{MAX_QUESTIONS} questions for services are under way on this machine"
            return local.ServicesReply(refusal=text)
        nodes = [each for each in self._links.nodes if request.node in ("", each)]
        found: dict[str, tuple[ServedService, ...]] = {}
        silent = []
        self._num_questions += 1
        try:
            asking = (self._services_of(each, request.name) for each in nodes)
            for node, services in zip(nodes, await asyncio.gather(*asking), strict=True):
                if services is not None:
                    found[node] = services
                elif node in self._links.nodes:
                    silent.append(node)
        finally:
            self._num_questions -= 1
        if request.node in ("", self._me):
            found[self._me] = self._here(request.name)
        return self._reply(found, silent)

    async def _services_of(self, node: str, name: str) -> tuple[ServedService, ...] | None:
        """The services of another machine; None if it does not answer in time, or its link ends."""
        request = NodeServicesRequest(name)
        try:
            answer = await self._links.ask(node, request, NodeServices, timeout_s=ANSWER_S)
        except PotluckError:
            return None
        return _named(name, answer.services)

    def _reply(
        self, found: dict[str, tuple[ServedService, ...]], silent: Iterable[str]
    ) -> local.ServicesReply:
        infos = [
            local.ServiceInfo(node, self._names.name(node), self._host(node), service)
            for node, services in found.items()
            for service in services
        ]
        infos.sort(key=lambda each: (each.service.name, each.machine, each.node))
        sizes = itertools.accumulate(len(msgspec.msgpack.encode(each)) for each in infos)
        fitting = sum(size <= _MAX_REPLY_BYTES for size in sizes)
        return local.ServicesReply(tuple(infos[:fitting]), len(infos) - fitting, tuple(silent))

    def _host(self, node: str) -> str:
        return "127.0.0.1" if node == self._me else self._links.last_address(node)


def _named(name: str, services: Iterable[ServedService]) -> tuple[ServedService, ...]:
    """Those called ``name``; all if that is empty."""
    return tuple(each for each in services if name in ("", each.name))


def _objection(others: Collection[ServedService], new: Collection[ServedService]) -> str:
    """Why ``new`` services can't be registered beside services of other programs; empty if they
    can."""
    taken = {each.name for each in others}
    for each in new:
        if each.name in taken:
            return f"another program of this machine serves {each.name!r} already"
    together = (*others, *new)
    if len(together) > MAX_SERVICES:
        return f"the programs of one machine serve at most {MAX_SERVICES} services"
    if len(msgspec.msgpack.encode(together)) > MAX_SERVED_BYTES:
        return (
            "the names of the services and methods of one machine's programs take at most "
            f"{MAX_SERVED_BYTES >> 10} KiB"
        )
    return ""
