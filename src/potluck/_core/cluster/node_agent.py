"""The agent of one node: makes its parts, and gives each new connection to the part it is for.

The parts register for the messages that concern them: messages of other agents and the start and
end of links at ``links.peers``, requests of this machine's commands at ``links.local``, views at
``control_plane``. So none of these pass through here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from potluck._core.background import Tasks
from potluck._core.cluster.admission_exchange import AdmissionExchange
from potluck._core.cluster.code_store.job_folders import keeping_of
from potluck._core.cluster.code_store.store import CodeStore
from potluck._core.cluster.content.store import ContentStore
from potluck._core.cluster.control_plane import ControlPlane
from potluck._core.cluster.data_sets.sets import DataSets, quota_of
from potluck._core.cluster.discovery.advert import Hint, new_instance
from potluck._core.cluster.discovery.finder import Finder, Presence, running_finders
from potluck._core.cluster.environments.making import Environments
from potluck._core.cluster.home.node_state import NodeState, PrivateState
from potluck._core.cluster.jobs.agent_parts import AgentParts, OuterWorld
from potluck._core.cluster.jobs.dispatcher import JobDispatcher
from potluck._core.cluster.jobs.history import JobHistory
from potluck._core.cluster.jobs.ledger import JobLedger, Vouching
from potluck._core.cluster.jobs.log import JobLog
from potluck._core.cluster.jobs.process import build_prefix, launcher_of
from potluck._core.cluster.links import bulk, relay
from potluck._core.cluster.links.bulk import BulkLinks
from potluck._core.cluster.links.local import CLIENT, Client, Commands
from potluck._core.cluster.links.peers import KIND, PeerLinks
from potluck._core.cluster.links.relay import Relays
from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.protocol import MembershipProtocol
from potluck._core.cluster.names import NodeNames
from potluck._core.cluster.report import Report
from potluck._core.cluster.service_registry import ServiceRegistry
from potluck._core.cluster.sharing.broker import Broker
from potluck._core.cluster.sharing.confinement import Confinement, own_limits, own_sandbox
from potluck._core.cluster.sharing.limits import Limits
from potluck._core.cluster.sharing.offers import Offers, SharingStore
from potluck._core.cluster.topology import measure
from potluck._core.cluster.topology.hardware import (
    own_accelerators,
    own_facts,
    own_versions,
)
from potluck._core.cluster.topology.surveyor import Surveyor
from potluck._core.cluster.trust.credentials import (
    load_admissions,
    load_node_credentials,
    load_or_create_identity,
    signed,
)
from potluck._core.cluster.trust.known_nodes import KnownNodes
from potluck._core.cluster.trust.worker_home import WorkerHomes
from potluck._core.settings import Settings
from potluck._core.transport import aio
from potluck._core.transport.listener import is_port_taken
from potluck._core.wire import jobs as wire_jobs
from potluck._core.wire import local, peers
from potluck._core.wire.bulk import DescriptionRequest, Holding, HoldingRequest, Part, PartRequest
from potluck._core.wire.greeting import WORKER, Hello, Refusal
from potluck.errors import ConfigurationError, PotluckError

_MAX_EVENTS = 20
_OF_THIS_MACHINE = (CLIENT, WORKER)
"""Kinds of connections that only this node's own identity may make."""

_FORWARDED: dict[type, type] = {
    peers.ResultsRequest: peers.Results,
    DescriptionRequest: Part,
    HoldingRequest: Holding,
    PartRequest: Part,
    wire_jobs.HistoryRequest: wire_jobs.History,
    wire_jobs.LogRequest: wire_jobs.LogLines,
    wire_jobs.CancelJob: wire_jobs.Kept,
    wire_jobs.DebugRequest: wire_jobs.JobRuns,
    peers.DataRequest: peers.DataHeld,
}
"""The response to each request that a command may have forwarded."""

Close = Callable[[], Coroutine[Any, Any, None]]


class _Members:
    """The cluster's other nodes: ``links`` to them, the views that all agree on (``plane``, which
    runs ``protocol``), and the ``exchange`` of admitted keys."""

    def __init__(self, agent: NodeAgent) -> None:
        state, now = agent.state, asyncio.get_running_loop().time()
        self.links = PeerLinks(
            agent.credentials, agent.introduction, bind=agent.bind, on_broken=agent.fail
        )
        self.bulk = BulkLinks(agent.credentials, self.links)
        self.links.on_linked.append(agent.met)  # the parts after it use the new node's name
        self.protocol = MembershipProtocol(agent.me, state.incarnation, state.record, now)
        self.plane = ControlPlane(
            self.protocol, self.links, state, on_note=agent.note, on_broken=agent.fail
        )
        self.exchange = AdmissionExchange(
            agent.settings,
            agent.key,
            agent.admissions,
            agent.credentials,
            self.links,
            watched=self.plane.watched,
            on_barred=agent.barred,
            on_note=agent.note,
            on_broken=agent.fail,
        )

    async def close(self) -> None:
        await self.exchange.close()
        await self.plane.close()
        await self.bulk.close()
        await self.links.close()


class _Machine:
    """This machine as jobs use it: whose jobs it runs (``offers``), the part of it that workers get
    (``confinement``), its measured links (``surveyor``), and the folders, environments
    and credentials of jobs (``code_store``, ``environments``, ``worker_homes``)."""

    def __init__(self, agent: NodeAgent, members: _Members, commands: Commands) -> None:
        settings, links = agent.settings, members.links
        limits = Limits() if agent.is_private else own_limits(settings)
        sandbox = None if agent.is_private else own_sandbox(settings, limits)
        self.confinement = confinement = Confinement(
            limits, sandbox, lambda: len(own_accelerators())
        )
        self.surveyor = Surveyor(
            agent.credentials,
            links,
            members.protocol.detector,
            members.plane.busy,
            lambda: confinement.facts(own_facts(agent.me, settings.site)),
        )
        self.offers = Offers(
            agent.me,
            agent.names,
            links,
            commands,
            store=None if agent.is_private else SharingStore(settings.home),
            objects_to=agent.admissions.objects_to,
            on_note=agent.note,
        )
        self.content = ContentStore(
            settings.home / "content", agent.me, members.bulk, on_note=agent.note
        )
        members.bulk.answer, members.bulk.told = self.content.answer, self.content.told
        self.code_store = CodeStore(
            settings.home, agent.me, self.content, keeping=keeping_of(settings), on_note=agent.note
        )
        links.on_request(peers.ResultsRequest, self.code_store.answer)
        self.environments = Environments(
            settings,
            self.content,
            agent.names.called,
            partial(build_prefix, settings.home, confinement),
        )
        self.environments.remove_incomplete()
        self.data = DataSets(settings.home, agent.me, self.content, quota_of(settings.data))
        if not agent.is_private:
            self.data.forget_jobs()
        links.on_request(peers.DataRequest, self.data.answer)
        self.worker_homes = WorkerHomes(
            settings.home,
            agent.key,
            agent.credentials,
            agent.admissions,
            on_note=agent.note,
            on_broken=agent.fail,
        )

    async def close(self) -> None:
        await self.worker_homes.close()
        await self.confinement.close()
        await self.surveyor.close()


class _Jobs:
    """The jobs of this node (``dispatcher``), the ``parts`` that they use, their record, and the
    ``relays`` that a job may need for its links."""

    def __init__(
        self, agent: NodeAgent, members: _Members, machine: _Machine, commands: Commands
    ) -> None:
        settings, credentials = agent.settings, agent.credentials
        ledger = JobLedger(agent.me, None if agent.is_private else settings.home)
        self._vouching = Vouching(agent.me, members.links, ledger, agent.cluster, agent.note)
        self._history = JobHistory(None if agent.is_private else settings.home, agent.note)
        self._log = JobLog(self._history.root, agent.note)
        self.parts = AgentParts(
            me=agent.me,
            port=agent.port,
            bind=agent.bind,
            names=agent.names,
            sign=partial(signed, key=agent.key),
            worker_homes=machine.worker_homes,
            broker=partial(
                Broker, eras=lambda: credentials.eras, bind=agent.bind, on_broken=agent.fail
            ),
            launcher=partial(launcher_of, settings, is_own=agent.is_launched),
            confinement=machine.confinement,
            environments=machine.environments,
            data=machine.data,
            links=members.links,
            plane=members.plane,
            surveyor=machine.surveyor,
            offers=machine.offers,
            vouching=self._vouching,
            commands=commands,
            log=self._log,
            history=self._history,
            note=agent.note,
            is_admin=lambda node: agent.admissions.roster.is_admin(node),
            outer_world=agent.outer_world,
        )
        self.dispatcher = JobDispatcher(self.parts, machine.code_store)
        self.relays = Relays(
            credentials,
            members.links,
            members.protocol.detector,
            lambda: members.plane.view,
            lambda: members.protocol.banned,
            self.dispatcher.is_elastic,
            on_broken=agent.fail,
        )
        members.bulk.reach = partial(self.relays.reach, for_files=True)

    async def close(self) -> None:
        await self.dispatcher.close()
        await self._vouching.close()
        await self._log.close()
        await self._history.close()
        await self.relays.close()


class NodeAgent:
    """One node's agent; ``run`` it until cancelled. ``on_note`` is called with lines for people.

    A private agent belongs to one ``potluck run`` on a machine without ``potluck up``. It has no
    finders, listens on the loopback only, refuses other agents, has no rules of an owner and no
    limits, and keeps nothing on disk but its port for ``potluck status``.

    The parts (``_Members``, ``_Machine``, ``_Jobs``) take from it what they need of their node.
    ``note(text)`` shows a line to people at this machine; ``fail(error)`` ends the agent.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_note: Callable[[str], None],
        finders: Sequence[Finder] = (),
        host: str = "",
        port: int | None = None,
        is_private: bool = False,
        is_launched: bool = False,
        outer_world: OuterWorld | None = None,
    ) -> None:
        """``is_launched``: in an allocation (``launching.py``), where all machines and jobs are one
        person's. ``outer_world``: see ``AgentParts``."""
        self.state: NodeState | PrivateState
        self.outer_world = outer_world
        self.port = 0
        self.credentials = load_node_credentials(settings)
        self.key = load_or_create_identity(settings.home)
        self.ready = asyncio.Event()
        self.settings = settings
        self._on_note = on_note
        self._finders = finders
        self.is_private = is_private
        self.is_launched = is_launched
        self.bind = "127.0.0.1" if is_private else host or settings.bind
        self.names = NodeNames(self.me, settings.machine_name)
        self._wanted_port = settings.discovery_port if port is None else port
        self.admissions = load_admissions(settings)
        self._known = KnownNodes(settings.home)
        self._tasks = Tasks()
        self._notes: deque[str] = deque(maxlen=_MAX_EVENTS)
        self._callers: dict[str, aio.Greeted] = {}
        self._crash: asyncio.Future[None] | None = None

    @property
    def me(self) -> str:
        """The id of this node."""
        return self.credentials.node_id

    def introduction(self) -> peers.Introduction:
        """What other agents get first."""
        name, key = self.settings.machine_name, self.credentials.public_key
        return peers.Introduction(self.state.incarnation, name, key, self.port, own_versions())

    def cluster(self) -> bytes:
        """The id of the cluster; empty while it is open."""
        admissions = self.admissions.load()
        return b"" if admissions is None else admissions.founding.cluster

    async def run(self) -> None:
        """Take part in the cluster until cancelled. Leaves nothing behind.

        ConfigurationError if the port can't be had or another agent runs with this home.
        """
        loop = asyncio.get_running_loop()
        self._crash = loop.create_future()
        home = self.settings.home
        state = self.state = PrivateState(home) if self.is_private else NodeState(home)
        server = None
        closing: list[Close] = []
        try:
            server = self._serve()
            self.port = server.port
            closing = self._connect()
            state.listening(self.port)
            presence = Presence(lambda: self.credentials.advert_keys, self.port, new_instance())
            async with running_finders(self._finders, presence, self.links.heard):
                self.exchange.start()
                self.plane.start()
                if self.is_private:
                    self.plane.handle(events.FoundHistory())
                self.ready.set()
                await self._crash
        finally:
            for close in closing:
                await close()
            if server is not None:
                await server.close()
            state.close()

    def _connect(self) -> list[Close]:
        """Make the parts, each of parts made before it; each registers for the messages that
        concern it. Returns what ends them, in this order."""
        commands = Commands()
        commands.on(local.ContinueRequest, self._continue_alone)
        commands.on(local.ForwardedRequest, self._forward)
        members = _Members(self)
        machine = _Machine(self, members, commands)
        jobs = _Jobs(self, members, machine, commands)
        self.links, self.plane, self.exchange = members.links, members.plane, members.exchange
        self._bulk = members.bulk
        self.offers, self.content = machine.offers, machine.content
        self._code_store, self._data = machine.code_store, machine.data
        self.jobs = jobs.dispatcher
        if self.is_launched:
            self.links.on(peers.Places, self._told)
        self.report = Report(
            jobs.parts, self.credentials, self.admissions, self.exchange, lambda: self._notes
        )
        ServiceRegistry(self.me, self.names, self.links, commands)
        self._callers = {CLIENT: commands.greeted, WORKER: self.jobs.greeted}
        if not self.is_private:
            self._callers |= {
                KIND: self.links.greeted,
                bulk.KIND: members.bulk.greeted,
                measure.KIND: machine.surveyor.greeted,
                relay.KIND: jobs.relays.greeted,
            }
        return [jobs.close, machine.close, members.close, self._tasks.close]

    def _serve(self) -> aio.Server:
        try:
            return self._serve_at(self._wanted_port)
        except ConfigurationError as error:
            if not is_port_taken(error):
                raise
            self.note(
                f"TCP port {self._wanted_port} is in use by another program; another port is used, "
                "which nodes that only have this one written down in POTLUCK_PEERS can't know"
            )
            return self._serve_at(0)

    def _serve_at(self, port: int) -> aio.Server:
        return aio.Server(self.bind, port, self.credentials, self._greeted, on_broken=self.fail)

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        """A connection of an authenticated node: give it to the part that takes its kind."""
        serve = self._callers.get(hello.kind)
        is_mine = node == self.credentials.node_id
        if serve is not None and (is_mine or hello.kind not in _OF_THIS_MACHINE):
            await serve(reader, writer, hello, node)
            return
        text = "this is a node's agent: it takes other agents, and commands of its own machine"
        if self.is_private:
            text = "this is the agent of one `potluck run`: it takes only that job's workers"
        await aio.write_greeting(writer, Refusal("kind", text))

    def barred(self, nodes: frozenset[str], new: frozenset[str]) -> None:
        """``nodes`` are out of the cluster, those in ``new`` since now."""
        self.plane.bar(nodes)
        self._bulk.drop(nodes, "it is out of the cluster")
        self.jobs.barred(nodes)
        self._tasks.start(
            self.offers.barred([node for node in new if self.admissions.entry(node) is not None])
        )
        for node in new:
            entry = self.admissions.entry(node)
            if entry is not None and entry.word is not None and entry.word.delete_code:
                self._tasks.start(self._delete_code(node))

    async def _delete_code(self, node: str) -> None:
        count = await self._code_store.delete_from(node)
        if count:
            self.note(f"{count} code packages of {node} were deleted")
        if count := await asyncio.to_thread(self._data.delete_from, node):
            self.note(f"{count} data sets of {node} were deleted")

    def met(self, node: str, introduction: peers.Introduction) -> None:
        """There is a link to ``node``."""
        self.names.met(node, introduction.name)
        self._tasks.start(self._remember(node, introduction))
        if self.is_launched and not self._finders:
            self._acquaint(node)

    def _acquaint(self, node: str) -> None:
        """Tell ``node``, a new member of this launcher's allocation, and the others where they
        listen: they know only the launcher's address."""
        links, places = self.links, {}
        for each in links.nodes:
            introduction = links.introduction(each)
            if introduction is not None and links.address(each):
                places[each] = (links.address(each), introduction.port)
        others = [place for each, place in places.items() if each != node]
        links.send(node, peers.Places(tuple(others[-peers.MAX_LISTED :])))
        for each in places.keys() - {node}:
            links.send(each, peers.Places((places[node],)))

    def _told(self, node: str, message: peers.Places) -> None:
        for host, port in message.places:
            self.links.heard(Hint(host, port, "told"))

    async def _remember(self, node: str, introduction: peers.Introduction) -> None:
        try:
            await asyncio.to_thread(self._known.meet, node, introduction.name, introduction.key)
        except PotluckError as error:
            self.note(str(error))

    async def _continue_alone(
        self, request: local.ContinueRequest, client: Client
    ) -> local.CommandResult:
        self.plane.handle(events.ContinueAlone())
        return local.CommandResult(True, "this node goes on alone, if it was paused")

    async def _forward(
        self, request: local.ForwardedRequest, client: Client
    ) -> local.ForwardedResponse:
        """Ask another node for a command, for as long as the command waits."""
        node, content = request.node, request.content
        response: Any
        try:
            kind = _FORWARDED[type(content)]
            if isinstance(content, DescriptionRequest | HoldingRequest | PartRequest):
                response = await self._bulk.ask(node, content, kind)
            else:
                response = await self.links.ask(node, content, kind, timeout_s=None)
        except PotluckError as error:
            response = peers.Failure(str(error)[:4096])
        return local.ForwardedResponse(request.number, node, response)

    def fail(self, error: BaseException) -> None:
        """End: the others go on without this node, which is better than one that looks alive."""
        if self._crash is not None and not self._crash.done():
            self._crash.set_exception(error)

    def note(self, text: str) -> None:
        """Show a line to people at this machine, and keep it for ``potluck status``."""
        line = self.names.readable(text)[:4096]
        self._notes.append(line)
        self._on_note(line)
