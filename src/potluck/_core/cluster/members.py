"""The machines of the cluster, as a command of this machine asks them: by way of its agent, which
forwards requests; without an agent, only this machine is there to be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from potluck._core.background import stop
from potluck._core.cluster.code_store.job_folders import (
    JobFolders,
    ResultsClient,
    ResultsServer,
    jobs_in,
    keeping_of,
)
from potluck._core.cluster.content.store import ContentStore
from potluck._core.cluster.data_sets.sets import DataSets, quota_of
from potluck._core.cluster.home.node_state import AgentRecord, find_agent
from potluck._core.cluster.jobs.history import JobHistory
from potluck._core.cluster.links.local import call_agent
from potluck._core.cluster.links.peers import Requests, T
from potluck._core.cluster.trust.credentials import load_node_credentials
from potluck._core.settings import Settings
from potluck._core.transport import aio
from potluck._core.wire import bulk, jobs, local, peers
from potluck.errors import ConfigurationError, LinkError, PotluckError

_ANSWER_S = 10.0
_MAX_OPEN = 8
"""Requests for files that the agent forwards at one time, so that it does not hold many parts."""
R = TypeVar("R")


class AgentLink:
    """A command's connection to its agent, in use while ``listen`` runs. ``take`` gets the replies
    that belong to none of its questions."""

    def __init__(
        self,
        link: aio.MessageLink[local.Reply, local.Request],
        take: Callable[[local.Reply], None] = lambda reply: None,
    ) -> None:
        self.link = link
        self.listening: asyncio.Task[None] | None = None
        self._take = take
        self._requests = Requests()
        self._waiting: list[tuple[type, asyncio.Future[Any]]] = []

    async def ask_node(
        self, node: str, request: local.Forwarded, kind: type[T], *, timeout_s: float | None
    ) -> T:
        """The response of ``node``; errors as for ``Requests.ask``."""

        def send(number: int) -> bool:
            return self.link.send(local.ForwardedRequest(number, node, request))

        return await self._requests.ask(node, kind, send, timeout_s=timeout_s)

    async def ask(self, request: local.Request, kind: type[Any]) -> Any:
        """The agent's own reply, of type ``kind``. ConfigurationError with its reason if it
        refuses, LinkError if it does not answer for 10 s."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, future))
        try:
            self.link.send(request)
            async with asyncio.timeout(_ANSWER_S):
                reply = await future
        except TimeoutError:
            raise LinkError("this machine's agent did not answer") from None
        finally:
            self._waiting.remove((kind, future))
        if isinstance(reply, local.CommandResult) and not reply.ok:
            raise ConfigurationError(reply.text)
        return reply

    async def result(self, future: asyncio.Future[R]) -> R:
        """The result of ``future``, which a reply brings; LinkError if the agent ends before."""
        assert self.listening is not None
        ends: list[asyncio.Future[Any]] = [future, self.listening]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        raise LinkError("this machine's agent has ended")

    async def listen(self) -> None:
        """Take replies until the agent has ended; then nothing more is answered."""
        try:
            while True:
                self._received(await self.link.receive())
        except LinkError as error:
            text = f"this machine's agent has ended: {error}"
            self._requests.lost(text)
            for _, future in self._waiting:
                if not future.done():
                    future.set_exception(LinkError(text))

    def _received(self, reply: local.Reply) -> None:
        if isinstance(reply, local.ForwardedResponse):
            self._requests.answered(reply.node, reply.number, reply.content)
            return
        for kind, future in self._waiting:
            if isinstance(reply, kind | local.CommandResult) and not future.done():
                future.set_result(reply)
                return
        self._take(reply)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster, and what people call it."""

    node: str
    name: str


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of the cluster, this one first; how to ask them about results; the history and
    the data sets on this machine. ``agent`` is this machine's; None if none runs. ``leader`` leads
    their jobs."""

    all: tuple[Machine, ...]
    results: ResultsClient
    history: JobHistory
    data_sets: Callable[[], DataSets]
    agent: AgentLink | None = None
    leader: str = ""

    async def histories(
        self, request: jobs.HistoryRequest
    ) -> list[tuple[Machine, tuple[jobs.JobInfo, ...]]]:
        """What the history of each machine has that answers."""
        agent = self.agent
        if agent is None:
            return [(self.all[0], (await self.history.answer(request)).jobs)]

        answers = await self.each(
            lambda machine: agent.ask_node(machine.node, request, jobs.History, timeout_s=_ANSWER_S)
        )
        return [(machine, answer.jobs) for machine, answer in answers]

    async def each(self, ask: Callable[[Machine], Awaitable[R]]) -> list[tuple[Machine, R]]:
        """What ``ask`` returns for each machine, but for those where it fails."""

        async def answered(machine: Machine) -> list[tuple[Machine, R]]:
            try:
                return [(machine, await ask(machine))]
            except PotluckError:
                return []

        return [found for some in await asyncio.gather(*map(answered, self.all)) for found in some]

    async def held_data(self, machine: Machine, request: peers.DataRequest) -> peers.DataHeld:
        """The answer of ``machine``. LinkError if there is none, or it refuses."""
        if self.agent is None:
            return await self.data_sets().answer(machine.node, request)
        return await self.agent.ask_node(machine.node, request, peers.DataHeld, timeout_s=_ANSWER_S)

    async def data(self) -> list[tuple[str, peers.DataHeld]]:
        """What this machine's owner may know of the data sets of each machine that answers, by its
        name."""

        held = await self.each(lambda machine: self.held_data(machine, peers.DataRequest()))
        return [(machine.name, answer) for machine, answer in held]

    async def jobs(self, request: jobs.HistoryRequest) -> list[jobs.JobInfo]:
        """``histories`` of all machines together."""
        return [each for _, found in await self.histories(request) for each in found]


@asynccontextmanager
async def reached(settings: Settings, agent: AgentRecord | None = None) -> AsyncIterator[Machines]:
    """The machines of this machine's cluster. LinkError if its agent does not answer."""
    history = JobHistory(settings.home)
    agent = agent or find_agent(settings.home)
    if agent is None:
        me = load_node_credentials(settings).node_id
        folders = JobFolders(
            jobs_in(settings.home),
            keeping=keeping_of(settings),
            on_note=lambda text: None,
        )
        machine = Machine(me, settings.machine_name)
        results = results_here(settings.home, folders, me)
        yield Machines((machine,), results, history, partial(_data_sets, settings, me))
        return
    async with connected(settings, agent) as link:
        yield await machines_of(settings, link)


async def machines_of(settings: Settings, link: AgentLink) -> Machines:
    """The machines that the agent at ``link`` knows; LinkError if it does not answer."""
    reply = await link.ask(local.NodesRequest(), local.NodesReply)
    results = ResultsClient(link.ask_node, AskedByName(link.ask_node))
    leader = next((each.node for each in reply.nodes if each.role == "leader"), "")
    sets = partial(_data_sets, settings, reply.node)
    return Machines(_machines(reply), results, JobHistory(settings.home), sets, link, leader)


@asynccontextmanager
async def connected(
    settings: Settings,
    agent: AgentRecord,
    take: Callable[[local.Reply], None] = lambda reply: None,
) -> AsyncIterator[AgentLink]:
    """A connection to ``agent`` that listens; see ``AgentLink``. Errors as for ``call_agent``."""
    link = await call_agent(settings, agent)
    made = AgentLink(link, take)
    made.listening = asyncio.create_task(made.listen())
    try:
        yield made
    finally:
        await stop(made.listening)
        await link.close()


def _data_sets(settings: Settings, me: str) -> DataSets:
    async def ask(node: str, request: Any, kind: type[T], *, timeout_s: float | None) -> T:
        raise LinkError("no agent runs here")

    members = AskedByName(ask)
    content = ContentStore(settings.home / "content", me, members, on_note=lambda text: None)
    return DataSets(settings.home, me, content, quota_of(settings.data))


def results_here(home: Path, folders: JobFolders, me: str) -> ResultsClient:
    """Asks about ``folders`` in this process, in the name of node ``me``."""

    async def ask(node: str, request: Any, kind: type[T], *, timeout_s: float | None) -> T:
        answer = server.answer if isinstance(request, peers.ResultsRequest) else content.answer
        try:
            found: Any = await answer(me, request)
        except (PotluckError, OSError) as error:
            raise LinkError(str(error)) from error
        assert isinstance(found, kind)
        return found

    members = AskedByName(ask)
    content = ContentStore(home / "content", me, members, on_note=lambda text: None)
    server = ResultsServer(me, folders, content)
    return ResultsClient(ask, members)


class AskedByName:
    """Machines as ``Members`` of a fetch that names those to ask, by ``ask``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self.nodes = ()
        self._ask = ask
        self._room = asyncio.Semaphore(_MAX_OPEN)

    async def ask(self, node: str, request: bulk.Request, kind: type[T]) -> T:
        """The response of ``node``; errors as for ``ask``."""
        async with self._room:
            found: T = await self._ask(node, request, kind, timeout_s=None)
            return found

    def part_bytes(self, node: str) -> int:
        """The agent sees to the pace."""
        return bulk.MAX_PART

    def tell(self, node: str, message: bulk.Announce) -> None:
        """No machine fetches what this process has."""


def _machines(reply: local.NodesReply) -> tuple[Machine, ...]:
    names = [each.name for each in reply.nodes]
    made = [
        Machine(each.node, each.name if names.count(each.name) == 1 else _longer(each))
        for each in sorted(reply.nodes, key=lambda each: (each.node != reply.node, each.name))
    ]
    return tuple(made)


def _longer(info: local.NodeInfo) -> str:
    return f"{info.name}-{info.node[:4]}"
