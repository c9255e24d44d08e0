"""The agent of one node: finds the others, keeps links to them, and agrees with them who is in.

One asyncio loop that does the I/O which ``MembershipProtocol`` (``membership``) and ``Rotation``
(``trust``) decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from potluck.cluster.bundles.depot import BundleDepot
from potluck.cluster.discovery.advert import Presence, new_instance
from potluck.cluster.discovery.finder import Finder
from potluck.cluster.home.node_state import NodeState
from potluck.cluster.jobs.dispatcher import JobDispatcher
from potluck.cluster.jobs.host import Runtime
from potluck.cluster.jobs.log import JobLog
from potluck.cluster.links.local import CLIENT, Waiting, read_request
from potluck.cluster.links.peers import KIND, ControlLinks
from potluck.cluster.membership import events
from potluck.cluster.membership.failure_detector import Status
from potluck.cluster.membership.protocol import MembershipProtocol
from potluck.cluster.names import NodeNames, is_node_id
from potluck.cluster.report import Report
from potluck.cluster.topology import measure
from potluck.cluster.topology.stragglers import stragglers
from potluck.cluster.topology.surveyor import Surveyor
from potluck.cluster.topology.versions import own_versions
from potluck.cluster.trust import keyring, rotation
from potluck.cluster.trust.credentials import load_credentials
from potluck.cluster.trust.store import TrustStore
from potluck.errors import ConfigurationError, PotluckError, ProtocolError
from potluck.service import start_task
from potluck.settings import Settings
from potluck.system import SIGHUP
from potluck.transport import aio
from potluck.types import MeasuredPath
from potluck.wire import local, peers
from potluck.wire.facts import Facts, Measured
from potluck.wire.jobs import JobMessage, ToLeader
from potluck.wire.messages import Hello, Refusal, Welcome
from potluck.wire.names import Versions
from potluck.wire.nodes import Bans, NodeMessage, View

_TRUST_S = 0.5
_MAX_EVENTS = 20
_GIVEN = "its secret comes from POTLUCK_PSK or POTLUCK_PASSPHRASE: change it there, on all nodes"

_log = logging.getLogger(__name__)


class NodeAgent:
    """One node's agent: ``run`` until cancelled. ``on_note`` gets a line for people at a time."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_note: Callable[[str], None],
        finders: Sequence[Finder] = (),
        host: str = "",
        port: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """``runtime`` starts the workers of jobs; without one this agent takes part in none."""
        self.port = 0
        self.bind = host
        self.view: View | None = None
        self.credentials = load_credentials(settings)
        self._settings = settings
        self._on_note = on_note
        self._finders = finders
        self._host = host
        self._name = (settings.name or socket.gethostname())[:256]
        self.names = NodeNames(self.me, self._name)
        self._runtime = runtime
        self._jobs: JobDispatcher | None = None
        self._addresses: dict[str, str] = {}
        self._log = JobLog(settings.home)
        self._wanted_port = settings.discovery_port if port is None else port
        self._trust = TrustStore(settings.home)
        is_given = settings.psk is not None or settings.passphrase is not None
        self._rotation = rotation.Rotation(_GIVEN if is_given else "")
        self._rotated: asyncio.Future[local.Outcome] | None = None
        self._notes: deque[str] = deque(maxlen=_MAX_EVENTS)
        self._saves: asyncio.Queue[events.Save] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._crash: asyncio.Future[None] | None = None
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Take part in the cluster until cancelled. Leaves nothing behind.

        ConfigurationError if the port can't be had or another agent runs with this home.
        """
        loop = asyncio.get_running_loop()
        self._state = NodeState(self._settings.home)
        server = links = surveyor = None
        tasks: list[asyncio.Task[None]] = []
        try:
            now = loop.time()
            self.membership = MembershipProtocol(
                self.credentials.node_id, self._state.incarnation, self._state.record, now
            )
            self._crash = loop.create_future()
            server = await self._serve()
            self.port = server.port
            self._links = links = ControlLinks(
                self.credentials, self._introduction, self, on_broken=self._fail
            )
            self._surveyor = surveyor = Surveyor(
                self.credentials, links, self.membership.detector, self._busy, self._rate
            )
            self._report = Report(
                self.me,
                self.names,
                links,
                self.membership.detector,
                surveyor,
                self._introduction_of,
            )
            if self._runtime is not None:
                # To whoever has a link: who is let in asks before all others know that it is in.
                self._depot = BundleDepot(self._settings.home / "bundles", links.send)
                self._jobs = JobDispatcher(self, self._depot)
            self._state.listening(self.port)
            tasks += [
                start_task(self._save, name="keeping the view", on_broken=self._fail),
                start_task(self._watch_trust, name="watching the bans", on_broken=self._fail),
            ]
            presence = Presence(lambda: self.credentials.advert_keys, self.port, new_instance())
            for finder in self._finders:
                await finder.start(presence, links.heard)
            self._tick()
            self.ready.set()
            await self._crash
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for finder in self._finders:
                await finder.close()
            if self._jobs is not None:
                await self._jobs.close()
            if surveyor is not None:
                await surveyor.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if links is not None:
                await links.close()
            if server is not None:
                await server.close()
            self._state.close()

    async def _serve(self) -> aio.Server:
        try:
            return await self._serve_at(self._wanted_port)
        except ConfigurationError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
            self._note(
                f"TCP port {self._wanted_port} is in use by another program; another port is used, "
                "which nodes that only have this one written down in POTLUCK_PEERS can't know"
            )
            return await self._serve_at(0)

    async def _serve_at(self, port: int) -> aio.Server:
        return await aio.serve(
            self._host, port, self.credentials, self._greeted, on_broken=self._fail
        )

    def ban(self, node: str) -> None:
        """Have ``node`` banned, here and on all nodes that can be reached."""
        self._trust.ban(node)
        self._handle(events.Ban(node))
        self._links.drop(node, "it was banned")

    # What happens on the links (links.peers.Owner).

    def linked(self, node: str, introduction: peers.Introduction, namespace: str) -> None:
        self.names.met(node, introduction.name)
        self._addresses[node] = self._links.address(node)
        self._trust.meet(node, introduction.name)
        self._handle(events.Linked(node, introduction.incarnation))
        self._rotate(self._rotation.linked(node, namespace))
        self._surveyor.linked(node, introduction.port)
        if self._jobs is not None:
            self._jobs.linked(node)

    def received(self, node: str, incarnation: int, message: peers.PeerMessage) -> None:
        if isinstance(message, Bans) and not all(map(is_node_id, message.nodes)):
            raise ProtocolError("it bans what is no node id")
        if isinstance(message, NodeMessage):
            self._handle(events.Received(node, incarnation, message))
        elif isinstance(message, JobMessage):
            if self._jobs is not None:
                self._jobs.received(node, message)
        elif isinstance(message, peers.BundleMessage):
            if self._jobs is not None:
                self._depot.received(node, message)
        elif isinstance(message, Facts | Measured):
            self._surveyor.received(node, message)
        else:
            now = asyncio.get_running_loop().time()
            self._rotate(self._rotation.received(node, message, now))

    def ended(self, node: str, incarnation: int, reason: str) -> None:
        _log.info("the link to %s ended: %s", self.names.called(node), reason)
        self._rotate(self._rotation.lost(node))
        self._surveyor.lost(node)
        if self._jobs is not None:
            self._depot.lost(node)

    def nobody_listens(self, node: str, incarnation: int) -> None:
        self._handle(events.Refused(node, incarnation))

    def _introduction(self) -> peers.Introduction:
        return peers.Introduction(self._state.incarnation, self._name, self.port, own_versions())

    def _introduction_of(self, node: str) -> peers.Introduction | None:
        return self._introduction() if node == self.me else self._links.introduction(node)

    # Time, disk, and the list of bans.

    def _tick(self) -> None:
        self._handle(events.Tick())
        loop = asyncio.get_running_loop()
        try:
            self._timer = loop.call_at(self.membership.next_wakeup(), self._tick)
            rotation_at = self._rotation.next_wakeup()
            if rotation_at is not None and rotation_at <= loop.time():
                self._rotate(self._rotation.tick(loop.time()))
        except Exception as error:  # no tick, no heartbeat
            self._fail(error)

    async def _save(self) -> None:
        while True:
            save = await self._saves.get()
            await asyncio.to_thread(self._state.write, save.record)
            for node in set(save.record.banned) - self._trust.banned():
                self._trust.ban(node, "told by another node")
                self._links.drop(node, "it was banned")
            self._handle(events.Saved(save.number))

    async def _watch_trust(self) -> None:
        """A ban ordered by ``potluck ban`` arrives by the file."""
        known: frozenset[str] = frozenset()
        while True:
            with contextlib.suppress(PotluckError):  # a damaged list refuses everybody by itself
                banned = self._trust.banned()
                for node in sorted(banned - known - set(self.membership.record.banned)):
                    self._handle(events.Ban(node))
                    self._links.drop(node, "it was banned")
                known = banned
            await asyncio.sleep(_TRUST_S)

    # Deciding, and doing it.

    def _handle(self, event: events.Event) -> None:
        try:
            for action in self.membership.handle(event, asyncio.get_running_loop().time()):
                self._act(action)
        except Exception as error:
            self._fail(error)

    def _act(self, action: events.Action) -> None:
        match action:
            case events.Send(node, message):
                self._links.send(node, message)
            case events.Save():
                self._saves.put_nowait(action)
            case events.Install(view, reason):
                self._note(reason)
                self.view = view
            case events.Leave():
                self._note(action.reason)
                self.view = None
            case events.Pause(reason) | events.Resume(reason) | events.Note(reason):
                self._note(reason)
            case events.GroupRefused(job, _, reason):
                self._note(f"job {job}: {reason}")
        if self._jobs is not None:
            self._jobs.act(action)

    def _rotate(self, actions: Sequence[rotation.Action]) -> None:
        try:
            for action in actions:
                self._act_on_secret(action)
        except Exception as error:
            self._fail(error)

    def _act_on_secret(self, action: rotation.Action) -> None:
        home = self._settings.home
        match action:
            case rotation.Tell(node, message):
                self._links.send(node, message)
            case rotation.Store(psk):
                keyring.store_next(home, psk)
            case rotation.Use():
                keyring.use_next(home)
            case rotation.Drop():
                keyring.drop_next(home)
            case rotation.Say(text, ok):
                self._note(text)
                if ok is not None and self._rotated is not None and not self._rotated.done():
                    self._rotated.set_result(local.Outcome(ok, text))

    def _fail(self, error: BaseException) -> None:
        """End: the others go on without this node, which is better than one that looks alive."""
        if self._crash is not None and not self._crash.done():
            self._crash.set_exception(error)

    def _note(self, text: str) -> None:
        line = self.names.readable(text)[:4096]
        self._notes.append(line)
        self._on_note(line)

    # Who calls.

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        if hello.kind == KIND:
            await self._links.greeted(reader, writer, hello, node)
        elif hello.kind == measure.KIND:
            await self._surveyor.greeted(reader, writer, node)
        elif hello.kind == CLIENT and node == self.credentials.node_id:
            await aio.write_greeting(writer, Welcome())
            await self._serve_client(reader, writer)
        elif hello.kind == "control" and node == self.credentials.node_id and self._jobs:
            await self._jobs.runner.greeted(reader, writer, hello)
        else:
            text = "this is a node's agent: it takes other agents, and commands of its own machine"
            await aio.write_greeting(writer, Refusal("kind", text))

    async def _serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        client, job = Waiting(writer), ""
        asked = asyncio.ensure_future(read_request(reader))
        try:
            while (request := await asked) is not None:
                asked = asyncio.ensure_future(read_request(reader))
                match request:
                    case local.NodesRequest():
                        client.send(self.status())
                    case local.RotateRequest():
                        client.send(await self._order_rotation())
                    case local.ContinueRequest():
                        self._handle(events.ContinueAlone())
                        text = "this node goes on alone, if it was paused"
                        client.send(local.Outcome(True, text))
                    case local.JobsRequest():
                        known = () if self._jobs is None else self._jobs.status()
                        client.send(local.JobsReply(known))
                    case local.InterruptRequest(number):
                        if self._jobs is not None:
                            self._jobs.interrupt(job, number)
                    case local.RunRequest() if self._jobs is not None:
                        job = await self._submit(self._jobs, request, client, asked)
                    case local.RunRequest():
                        client.send(local.Outcome(False, "this agent takes part in no jobs"))
        finally:
            asked.cancel()
            if self._jobs is not None:
                self._jobs.abandon(job, SIGHUP)

    async def _submit(
        self,
        dispatcher: JobDispatcher,
        request: local.RunRequest,
        client: Waiting,
        asked: asyncio.Future[local.Request | None],
    ) -> str:
        """Have a job begin, unless the command asks for something else, or leaves, first: its name,
        empty if it does not begin."""
        submitting = asyncio.ensure_future(dispatcher.submit(request, client))
        try:
            both: set[asyncio.Future[Any]] = {submitting, asked}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if submitting.done():
                return submitting.result()
            client.send(local.Outcome(False, "interrupted before it began"))
        except (PotluckError, OSError) as error:
            client.send(local.Outcome(False, str(error)[:4000]))
        finally:
            submitting.cancel()
        return ""

    async def _order_rotation(self) -> local.Outcome:
        if self._rotated is not None and not self._rotated.done():
            return local.Outcome(False, "the secret is being changed already")
        loop = asyncio.get_running_loop()
        self._rotated = loop.create_future()
        psk, name = secrets.token_bytes(32), secrets.token_hex(8)
        self._rotate(self._rotation.order(name, psk, self._links.nodes, loop.time()))
        return await self._rotated

    # What its jobs need of it (JobHost).

    @property
    def me(self) -> str:
        return self.credentials.node_id

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

    @property
    def stands_still(self) -> str:
        return self.membership.paused or ("in no cluster's view" if self.view is None else "")

    @property
    def is_banned(self) -> bool:
        return self.me in self.membership.banned

    def send(self, node: str, message: JobMessage) -> bool:
        if node != self.me:
            return self._links.send(node, message)
        if self._jobs is not None:
            asyncio.get_running_loop().call_soon(self._jobs.received, node, message)
        return True

    def to_leader(self, message: ToLeader) -> bool:
        return self.view is not None and self.send(self.view.leader, message)

    def unsent(self, node: str) -> int:
        return self._links.unsent(node)

    def handle(self, event: events.Event) -> None:
        self._handle(event)

    def address(self, node: str) -> str:
        return self._links.address(node) or self._addresses.get(node, "")

    def ring(self) -> tuple[str, ...]:
        nodes = () if self.view is None else self.view.nodes
        topology = self._surveyor.topology(nodes)
        return topology.ring() if topology.slowest_first() else ()

    def paths(self, nodes: Collection[str]) -> tuple[MeasuredPath, ...]:
        return self._surveyor.topology(nodes).paths(nodes)

    def _busy(self) -> set[str]:
        groups = () if self.view is None else self.view.groups
        return {member.node for group in groups for member in group.members}

    def _rate(self) -> float:
        """Samples per second of the workers here."""
        name = self.names.label(self.me)
        jobs = () if self._jobs is None else self._jobs.status()
        workers = [each for job in jobs for each in job.workers if each.node == name]
        return sum(each.samples_per_s or 0.0 for each in workers if each.rank >= 0)

    def versions(self, node: str) -> Versions | None:
        said = self._introduction_of(node)
        return None if said is None else said.versions

    def is_dead(self, node: str) -> bool:
        peer = self.membership.detector.peers.get(node)
        return peer is not None and peer.status is Status.DEAD

    def log(self, job: str, line: str) -> None:
        self._log.write(job, line)

    def note(self, text: str) -> None:
        self._note(text)

    def status(self) -> local.NodesReply:
        """The cluster as it is seen here now."""
        view = self.membership.view
        nodes = self._report.nodes(view)
        links = self._surveyor.links({each.node for each in nodes})
        return local.NodesReply(
            node=self.me,
            pid=os.getpid(),
            port=self.port,
            namespace=self.credentials.namespace,
            epoch=0 if view is None else view.epoch,
            paused=self.membership.paused,
            nodes=nodes,
            links=links,
            stragglers=stragglers(links, self.names.label),
            banned=tuple(sorted(self._trust.banned())),
            events=tuple(self._notes),
        )
