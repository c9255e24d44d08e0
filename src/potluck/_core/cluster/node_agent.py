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
from potluck._core.cluster.control_plane import ControlPlane
from potluck._core.cluster.discovery.advert import new_instance
from potluck._core.cluster.discovery.finder import Finder, running_finders
from potluck._core.cluster.discovery.presence import Presence
from potluck._core.cluster.home.node_state import NodeState
from potluck._core.cluster.home.private_state import PrivateState
from potluck._core.cluster.jobs.agent_parts import AgentParts, OuterWorld
from potluck._core.cluster.jobs.dispatcher import JobDispatcher
from potluck._core.cluster.jobs.ledger import JobLedger
from potluck._core.cluster.jobs.log import JobLog
from potluck._core.cluster.jobs.process import launcher_of
from potluck._core.cluster.jobs.vouching import Vouching
from potluck._core.cluster.links import relay
from potluck._core.cluster.links.local import CLIENT, Client, Commands
from potluck._core.cluster.links.peers import KIND, PeerLinks
from potluck._core.cluster.links.relay import Relays
from potluck._core.cluster.membership import events
from potluck._core.cluster.membership.protocol import MembershipProtocol
from potluck._core.cluster.names import NodeNames
from potluck._core.cluster.report import Report
from potluck._core.cluster.result_relay import ResultRelay
from potluck._core.cluster.service_registry import ServiceRegistry
from potluck._core.cluster.sharing.broker import Broker
from potluck._core.cluster.sharing.confinement import Confinement, own_limits, own_sandbox
from potluck._core.cluster.sharing.limits import Limits
from potluck._core.cluster.sharing.offers import Offers
from potluck._core.cluster.sharing.store import SharingStore
from potluck._core.cluster.topology import measure
from potluck._core.cluster.topology.hardware import own_facts
from potluck._core.cluster.topology.surveyor import Surveyor
from potluck._core.cluster.topology.versions import own_versions
from potluck._core.cluster.trust.credentials import load_admissions, load_node_credentials
from potluck._core.cluster.trust.identity import load_or_create_identity
from potluck._core.cluster.trust.known_nodes import KnownNodes
from potluck._core.cluster.trust.signed_jobs import signed
from potluck._core.cluster.trust.worker_home import WorkerHomes
from potluck._core.settings import Settings
from potluck._core.transport import aio
from potluck._core.transport.acceptor import is_port_taken
from potluck._core.wire import local, peers
from potluck._core.wire.greeting import WORKER, Hello, Refusal
from potluck.errors import ConfigurationError, PotluckError

_MAX_EVENTS = 20
_OF_THIS_MACHINE = (CLIENT, WORKER)
"""Kinds of connections that only this node's own identity may make."""

Close = Callable[[], Coroutine[Any, Any, None]]


class NodeAgent:
    """One node's agent; ``run`` it until cancelled. ``on_note`` is called with lines for people.

    A private agent belongs to one ``potluck run`` on a machine without ``potluck up``. It has no
    finders, listens on the loopback only, refuses other agents, and keeps nothing on disk but its
    port for ``potluck status``.
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
        outer_world: OuterWorld | None = None,
    ) -> None:
        """``outer_world``: see ``AgentParts``."""
        self._outer_world = outer_world
        self.port = 0
        self.credentials = load_node_credentials(settings)
        self.ready = asyncio.Event()
        self._settings = settings
        self._on_note = on_note
        self._finders = finders
        self._is_private = is_private
        self._bind = "127.0.0.1" if is_private else host or settings.bind
        self._name = settings.machine_name
        self.names = NodeNames(self.credentials.node_id, self._name)
        self._wanted_port = settings.discovery_port if port is None else port
        self._admissions = load_admissions(settings)
        self._known = KnownNodes(settings.home)
        self._tasks = Tasks()
        self._notes: deque[str] = deque(maxlen=_MAX_EVENTS)
        self._callers: dict[str, aio.Greeted] = {}
        self._crash: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Take part in the cluster until cancelled. Leaves nothing behind.

        ConfigurationError if the port can't be had or another agent runs with this home.
        """
        loop = asyncio.get_running_loop()
        self._crash = loop.create_future()
        home = self._settings.home
        state = PrivateState(home) if self._is_private else NodeState(home)
        server = None
        closing: list[Close] = []
        try:
            server = self._serve()
            self.port = server.port
            closing = self._connect(state)
            state.listening(self.port)
            presence = Presence(lambda: self.credentials.advert_keys, self.port, new_instance())
            async with running_finders(self._finders, presence, self.links.heard):
                self.exchange.start()
                self.plane.start()
                if self._is_private:
                    self.plane.handle(events.FoundHistory())
                self.ready.set()
                await self._crash
        finally:
            for close in closing:
                await close()
            if server is not None:
                await server.close()
            state.close()

    def _connect(self, state: NodeState | PrivateState) -> list[Close]:
        """Make the parts, each of which registers for what concerns it; what ends them, in this
        order."""
        settings, credentials, names = self._settings, self.credentials, self.names
        me = credentials.node_id
        key = load_or_create_identity(settings.home)

        def introduction() -> peers.Introduction:
            return peers.Introduction(
                state.incarnation, self._name, credentials.public_key, self.port, own_versions()
            )

        self.links = links = PeerLinks(
            credentials, introduction, bind=self._bind, on_broken=self._fail
        )
        links.on_linked.append(self._met)
        now = asyncio.get_running_loop().time()
        protocol = MembershipProtocol(me, state.incarnation, state.record, now)
        self.plane = plane = ControlPlane(
            protocol, links, state, on_note=self._note, on_broken=self._fail
        )
        commands = Commands()
        commands.on(local.ContinueRequest, self._continue_alone)
        self.exchange = exchange = AdmissionExchange(
            settings,
            key,
            self._admissions,
            credentials,
            links,
            watched=plane.watched,
            on_barred=self._barred,
            on_note=self._note,
            on_broken=self._fail,
        )
        relays = Relays(
            credentials,
            links,
            protocol.detector,
            lambda: plane.view,
            lambda: protocol.banned,
            lambda job: dispatcher.is_elastic(job),
            on_broken=self._fail,
        )
        limits = Limits() if self._is_private else own_limits(settings)
        sandbox = None if self._is_private else own_sandbox(settings, limits)
        confinement = Confinement(limits, sandbox)
        surveyor = Surveyor(
            credentials,
            links,
            protocol.detector,
            plane.busy,
            lambda: dispatcher.rate(),
            lambda: confinement.facts(own_facts(me, settings.site)),
        )
        self.offers = offers = Offers(
            me,
            names,
            links,
            commands,
            store=None if self._is_private else SharingStore(settings.home),
            objects_to=self._admissions.objects_to,
            on_note=self._note,
        )
        self.report = Report(
            credentials,
            names,
            links,
            plane,
            surveyor,
            self._admissions,
            exchange,
            offers,
            commands,
            port=self.port,
            notes=lambda: self._notes,
        )
        ServiceRegistry(me, names, links, commands)
        # Served to every linked node: a new member may ask before this node knows that it is one.
        self._code_store = code_store = CodeStore(
            settings.home, me, links.send, keeping=keeping_of(settings), on_note=self._note
        )
        ResultRelay(links, commands, code_store)
        worker_homes = WorkerHomes(
            settings.home,
            key,
            credentials,
            self._admissions,
            on_note=self._note,
            on_broken=self._fail,
        )
        ledger = JobLedger(me, None if self._is_private else settings.home)
        vouching = Vouching(me, links, ledger, self._cluster, self._note)
        log = JobLog(settings.home, on_note=self._note)
        parts = AgentParts(
            me=me,
            port=self.port,
            bind=self._bind,
            wire=settings.wire,
            names=names,
            sign=partial(signed, key=key),
            worker_homes=worker_homes,
            broker=partial(
                Broker, eras=lambda: credentials.eras, bind=self._bind, on_broken=self._fail
            ),
            launcher=partial(launcher_of, settings, confinement),
            confinement=confinement,
            links=links,
            plane=plane,
            surveyor=surveyor,
            offers=offers,
            vouching=vouching,
            commands=commands,
            log=log,
            note=self._note,
            outer_world=self._outer_world,
        )
        self.jobs = dispatcher = JobDispatcher(parts, code_store)
        self._callers = {
            CLIENT: commands.greeted,
            WORKER: dispatcher.greeted,
        }
        if not self._is_private:
            self._callers |= {
                KIND: links.greeted,
                measure.KIND: surveyor.greeted,
                relay.KIND: relays.greeted,
            }
        return [
            dispatcher.close,
            vouching.close,
            code_store.results.close,
            log.close,
            worker_homes.close,
            confinement.close,
            surveyor.close,
            relays.close,
            exchange.close,
            plane.close,
            links.close,
            self._tasks.close,
        ]

    def _serve(self) -> aio.Server:
        try:
            return self._serve_at(self._wanted_port)
        except ConfigurationError as error:
            if not is_port_taken(error):
                raise
            self._note(
                f"TCP port {self._wanted_port} is in use by another program; another port is used, "
                "which nodes that only have this one written down in POTLUCK_PEERS can't know"
            )
            return self._serve_at(0)

    def _serve_at(self, port: int) -> aio.Server:
        return aio.Server(self._bind, port, self.credentials, self._greeted, on_broken=self._fail)

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
        if self._is_private:
            text = "this is the agent of one `potluck run`: it takes only that job's workers"
        await aio.write_greeting(writer, Refusal("kind", text))

    def _barred(self, nodes: frozenset[str], new: frozenset[str]) -> None:
        """``nodes`` are out of the cluster, those in ``new`` since now."""
        self.plane.bar(nodes)
        self.jobs.barred(nodes)
        self._tasks.start(
            self.offers.barred([node for node in new if self._admissions.entry(node) is not None])
        )
        for node in new:
            entry = self._admissions.entry(node)
            if entry is not None and entry.word is not None and entry.word.delete_code:
                self._tasks.start(self._delete_code(node))

    async def _delete_code(self, node: str) -> None:
        count = await self._code_store.delete_from(node)
        if count:
            self._note(f"{count} code packages of {node} were deleted")

    def _cluster(self) -> bytes:
        """The id of the cluster; empty while it is open."""
        admissions = self._admissions.load()
        return b"" if admissions is None else admissions.founding.cluster

    def _met(self, node: str, introduction: peers.Introduction) -> None:
        self.names.met(node, introduction.name)
        self._tasks.start(self._remember(node, introduction))

    async def _remember(self, node: str, said: peers.Introduction) -> None:
        try:
            await asyncio.to_thread(self._known.meet, node, said.name, said.key)
        except PotluckError as error:
            self._note(str(error))

    async def _continue_alone(self, request: local.ContinueRequest, client: Client) -> None:
        self.plane.handle(events.ContinueAlone())
        client.take(local.CommandResult(True, "this node goes on alone, if it was paused"))

    def _fail(self, error: BaseException) -> None:
        """End: the others go on without this node, which is better than one that looks alive."""
        if self._crash is not None and not self._crash.done():
            self._crash.set_exception(error)

    def _note(self, text: str) -> None:
        line = self.names.readable(text)[:4096]
        self._notes.append(line)
        self._on_note(line)
