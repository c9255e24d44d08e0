"""The surveyor does the I/O of ``survey.py``: it sends this node's row to the others, measures
paths when they are due, and moves the link to a node to the best of that node's addresses.

Each node measures one path at a time, and none while a job has workers at either end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

import msgspec

from potluck._core.background import stop
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.cluster.membership.failure_detector import FailureDetector, Status
from potluck._core.cluster.topology.graph import Topology
from potluck._core.cluster.topology.measure import (
    PathReading,
    Stopped,
    StreamConnection,
    measure,
    serve,
)
from potluck._core.cluster.topology.survey import Survey, is_news, shares_interfaces
from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials
from potluck._core.types import MeasuredPath
from potluck._core.wire.facts import MAX_LINKS, Facts, LinkFacts, Measured, NodeFacts
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck._core.wire.peers import Introduction
from potluck.errors import PotluckError

_TICK_S = 0.25
_LOOK_S = 5.0
_TELL_S = 2.0
_GAIN = 1.25
"""How many times better a path must be than the present one before a link is moved to it."""

_log = logging.getLogger(__name__)


class Surveyor:
    """Runs in the agent's event loop from construction to ``close``. ``busy()`` are the nodes that
    have workers of a job, ``facts()`` the hardware that this machine gives to jobs. ``rate()`` is
    the samples per second of the workers here, 0 without any; the dispatcher of jobs sets it."""

    def __init__(
        self,
        credentials: Credentials,
        links: PeerLinks,
        detector: FailureDetector,
        busy: Callable[[], Collection[str]],
        facts: Callable[[], NodeFacts],
    ) -> None:
        self.survey = Survey(facts())
        self._own_facts = facts
        self._credentials = credentials
        self._links = links
        self._detector = detector
        self._busy = busy
        self.rate: Callable[[], float] = lambda: 0.0
        self._told: Facts | None = None
        self._is_measuring = False
        self._looked = asyncio.get_running_loop().time()
        self._told_at = 0.0
        self._task = asyncio.create_task(self._run())
        links.on(Facts | Measured, self._received)
        links.on_linked.append(self._linked)
        links.on_ended.append(self._lost)

    async def close(self) -> None:
        """Nothing is measured or sent any more."""
        await stop(self._task)

    # Messages and links.

    def _linked(self, node: str, introduction: Introduction) -> None:
        now = asyncio.get_running_loop().time()
        via = self._links.via(node)
        self.survey.linked(node, self._links.address(node), introduction.port, now, via)
        self._links.send(node, self.row())
        if via:
            self._told_at = float("-inf")  # the leader is to know it soon

    def _lost(self, node: str, incarnation: int, reason: str) -> None:
        if node not in self._links.nodes:
            self.survey.lost(node)

    def _received(self, node: str, message: Facts | Measured) -> None:
        if isinstance(message, Facts):
            self.survey.heard(node, message)
        else:
            now = asyncio.get_running_loop().time()
            self.survey.measured(node, message.from_you, message.to_you, now)

    async def greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        """``node`` called to measure the path to here."""
        if self._is_measuring or not self._may_go_on(node):
            text = "this node measures another path, or a job runs"
            await aio.write_greeting(writer, Refusal("busy", text))
            return
        self._is_measuring = True
        try:
            await aio.write_greeting(writer, Welcome())
            await serve(StreamConnection(reader, writer), lambda: self._may_go_on(node))
        finally:
            self._is_measuring = False

    # Results.

    def row(self) -> Facts:
        """The row that this node sends to the others."""
        latencies = {
            name: (peer.latency_s, peer.deviation_s) for name, peer in self._detector.peers.items()
        }
        local = {node: self._links.local(node) for node in self._links.nodes}
        return self.survey.row(latencies, local)

    def topology(self, nodes: Collection[str]) -> Topology:
        """The graph of ``nodes``."""
        return self.survey.topology(self.row(), nodes)

    def ring(self, nodes: Collection[str]) -> tuple[str, ...]:
        """``nodes`` in the order of the ring that avoids slow links; empty if no link between them
        was measured."""
        topology = self.topology(nodes)
        return topology.ring() if topology.slowest_first() else ()

    def relayed(self, nodes: Collection[str]) -> frozenset[tuple[str, str]]:
        """The pairs of ``nodes`` that talk by way of a third node, each in rising order."""
        return self.survey.relayed(self.row(), nodes)

    def paths(self, nodes: Collection[str]) -> tuple[MeasuredPath, ...]:
        """The measured paths between ``nodes``."""
        return self.topology(nodes).paths(nodes)

    def facts(self, node: str) -> NodeFacts | None:
        """The facts about ``node``; None while it has not sent its row."""
        if node == self._credentials.node_id:
            return self.survey.mine
        row = self.survey.rows.get(node)
        return None if row is None else row.node

    def links(self, nodes: Collection[str]) -> tuple[LinkFacts, ...]:
        """All links between ``nodes``, as their sources know them."""
        rows = {**self.survey.rows, self._credentials.node_id: self.row()}
        found = [
            link
            for node, row in sorted(rows.items())
            for link in row.links
            if node in nodes and link.target in nodes
        ]
        return tuple(found[:MAX_LINKS])

    # Inside.

    def _look(self) -> None:
        """Read the facts about this machine again: interfaces come and go."""
        rate = float(f"{self.rate():.2g}") or None
        facts = self._own_facts()
        self.survey.mine = msgspec.structs.replace(facts, samples_per_s=rate)
        peers = self._detector.peers
        self.survey.forget([node for node in peers if peers[node].status is not Status.DEAD])

    def _may_go_on(self, node: str) -> bool:
        busy = self._busy()
        return node not in busy and self._credentials.node_id not in busy

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self._turn(asyncio.get_running_loop().time())
            except Exception:  # the node works without measurements, too
                _log.exception("measuring paths failed; it is tried again")

    async def _turn(self, now: float) -> None:
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._look()
        self._tell(now)
        node = "" if self._is_measuring else self.survey.due(now, self._busy())
        if node:
            self._is_measuring = True
            try:
                await self._survey(node)
            finally:
                self._is_measuring = False

    def _tell(self, now: float) -> None:
        row = self.row()
        if now - self._told_at >= _TELL_S and is_news(row, self._told):
            self._told, self._told_at = row, now
            for node in self._links.nodes:
                self._links.send(node, row)

    async def _survey(self, node: str) -> None:
        """Measure the paths to ``node``, and move the link to the best of them."""
        loop = asyncio.get_running_loop()
        readings = await self._read(node)
        now = loop.time()
        if not readings:
            self.survey.failed(node, now)
            return
        present = self._links.address(node)
        best = min(readings, key=lambda each: each.cost_s)
        for each in readings:
            if each.host == present and each.cost_s <= _GAIN * best.cost_s:
                best = each
        if best.host != present and node in self._links.nodes:
            _log.info("the link to %s moves from %s to %s", node[:12], present, best.host)
            port = dict(self.survey.places(node)).get(best.host)
            if port is not None:
                self._links.move(node, best.host, port)
        self.survey.measured(node, best.outward, best.inward, now)
        self._links.send(node, Measured(from_you=best.inward, to_you=best.outward))

    async def _read(self, node: str) -> list[PathReading]:
        theirs = self.facts(node) or NodeFacts(node)
        seen: set[tuple[str, str]] = set()
        readings = []
        for host, port in self.survey.places(node):

            def is_new(local: str, host: str = host) -> bool:
                ends = shares_interfaces(host, local, seen, (self.survey.mine, theirs))
                if ends is not None:
                    seen.add(ends)
                return ends is not None

            try:
                reading = await measure(
                    host,
                    port,
                    node,
                    self._credentials,
                    bind=self._links.bind,
                    may_go_on=lambda: self._may_go_on(node),
                    wants_bandwidth=is_new,
                )
            except Stopped:
                return []
            except (PotluckError, TimeoutError, OSError) as error:
                _log.debug("the path to %s by %s: %s", node[:12], host, error)
                continue
            if reading.outward:
                readings.append(reading)
        return readings
