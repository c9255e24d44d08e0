"""Relayed links: two agents that can't reach each other talk by way of a third that reaches both.

The agent with the lesser id calls the third one, which calls the other and from then on copies
bytes between the two connections. Knock, TLS and greeting run through it from end to end, so it
learns and changes nothing; it can only end the link. Heartbeats, views and jobs travel as
over every other link, files over a second connection by the same way (``bulk.py``). An agent relays
between nodes with which it has links of its own only, and
only to a port where the other one has proved its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import product

from potluck._core.background import OnBroken, Tasks, start_task, stop
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.cluster.membership.failure_detector import FailureDetector, Status
from potluck._core.cluster.membership.view import spared
from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck._core.wire.nodes import JobGroup, View
from potluck.errors import LinkError, PotluckError, SecurityError

KIND = "relay"
"""The ``kind`` in the greeting of an agent that wants to reach ``target`` by way of this one."""

MAX_RELAYED = 64
_CALL_S = 3.0
_LOOK_S = 0.25
_IN_THE_WAY_S = 10.0
"""A job that needs a link is given so long: a worker that connects the two may be starting."""
_PIECE_BYTES = 1 << 16


def wanted_detours(
    me: str,
    view: View,
    detector: FailureDetector,
    banned: Collection[str] = (),
    is_elastic: Callable[[str], bool] = lambda job: True,
) -> dict[str, tuple[str, ...]]:
    """By member of ``view`` to be called by way of another: the members that reach it. Pure.

    These are the members with a greater id than ``me`` that others reach, and this node does not.
    Not those without whose link the workers of some job would no longer be connected, or a job that
    is not elastic would have to do: one of the two nodes leaves the view then, and the job goes on
    without it.
    """
    found: dict[str, tuple[str, ...]] = {}
    for node in view.nodes if me in view.nodes else ():
        if node > me and node not in banned and detector.status(node) is Status.CUT:
            ways = (peer for peer in detector.peers.values() if peer.status is Status.UP)
            reach = (p.node for p in ways if p.last is not None and node in p.last.links)
            by = tuple(sorted(way for way in reach if way in view.nodes))
            if by and all(_goes_on(group, me, node, is_elastic) for group in view.groups):
                found[node] = by
    return found


def is_in_the_way(view: View, a: str, b: str, is_elastic: Callable[[str], bool]) -> bool:
    """Whether an elastic job would go on if one of two nodes left the view, and can't while the two
    are members that do not reach each other. Pure."""
    return any(
        is_elastic(group.job) and not _goes_on(group, a, b, is_elastic) for group in view.groups
    )


def _goes_on(group: JobGroup, a: str, b: str, is_elastic: Callable[[str], bool]) -> bool:
    """Whether a group can go on without the links between two nodes."""
    here, there = ([m.worker for m in group.members if m.node == node] for node in (a, b))
    cut = {*group.cut, *((min(pair), max(pair)) for pair in product(here, there))}
    if not (here and there):
        return True
    return is_elastic(group.job) and bool(spared(cut, [m.worker for m in group.members]))


@dataclass(eq=False, repr=False)
class Relays:
    """Calls nodes by way of others, and copies bytes for others, from construction to ``close``, in
    the agent's event loop. ``view()`` is the view in use, ``banned()`` are nodes that may not take
    part; ``is_elastic(job)``: whether the workers of a job go on in another group;
    ``on_broken(error)``: the task that looks for nodes to call broke."""

    credentials: Credentials
    links: PeerLinks
    detector: FailureDetector
    view: Callable[[], View | None]
    banned: Callable[[], Collection[str]]
    is_elastic: Callable[[str], bool]
    on_broken: OnBroken

    def __post_init__(self) -> None:
        self._tasks = Tasks()
        self._relayed: list[tuple[str, str, bool, asyncio.StreamWriter]] = []
        self._num_calls: dict[str, int] = {}
        self._calling: set[str] = set()
        self._in_the_way: dict[str, float] = {}  # by node: since when its link is, to a job
        self._looking = start_task(self._run, name="relaying links", on_broken=self.on_broken)

    async def close(self) -> None:
        """End all relayed connections."""
        await stop(self._looking)
        await self._tasks.close()

    # For this agent.

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            view, me, banned = self.view(), self.credentials.node_id, self.banned()
            self._end_those_of(banned)
            if view is None:
                continue
            self._end_those_in_the_way(view)
            detours = wanted_detours(me, view, self.detector, banned, self.is_elastic)
            for node, ways in detours.items():
                if node not in self._calling:
                    number = self._num_calls[node] = self._num_calls.get(node, -1) + 1
                    self._calling.add(node)
                    self._tasks.start(self._call(node, ways[number % len(ways)]))

    def _end_those_of(self, banned: Collection[str]) -> None:
        for node, target, _, writer in self._relayed:
            if node in banned or target in banned:
                writer.transport.abort()
        for node in self.links.nodes:
            if self.links.via(node) in banned:
                self.links.drop(node, "the node that relays it is banned")

    def _end_those_in_the_way(self, view: View) -> None:
        """End relayed links of nodes on which a job has begun that needs a link between the two: as
        when the network is cut while it runs, one of them leaves the view, and the job goes on."""
        me, now, known = self.credentials.node_id, time.monotonic(), self._in_the_way
        self._in_the_way = {
            node: known.get(node, now)
            for node in self.links.nodes
            if self.links.via(node) and is_in_the_way(view, me, node, self.is_elastic)
        }
        for node, since in self._in_the_way.items():
            if now - since > _IN_THE_WAY_S:
                self.links.drop(node, "a job needs a link between the workers of the two nodes")

    async def _call(self, node: str, via: str) -> None:
        """Make the link to ``node`` by way of ``via``, and carry it to its end."""
        try:
            await self.links.call_by(via, node, await self.reach(node, via))
        except (PotluckError, aio.Unwanted, TimeoutError, OSError):
            pass  # tried again as long as it is wanted, by way of the next one
        finally:
            self._calling.discard(node)

    async def reach(self, node: str, via: str, *, for_files: bool = False) -> socket.socket:
        """A socket whose bytes ``via`` passes on to ``node`` and back, until it is closed;
        ``for_files``: for a bulk connection. Errors as for ``aio.connect``."""
        introduction = self.links.introduction(via)
        if introduction is None or self.links.via(via):
            raise LinkError(f"there is no link of its own to node {via[:12]}")
        reader, writer, _ = await aio.connect(
            self.links.address(via),
            introduction.port,
            Hello(KIND, target=node, for_files=for_files),
            self.credentials,
            timeout_s=_CALL_S,
            bind=self.links.bind,
            wanted=lambda found: found == via,
        )
        near, far = socket.socketpair()
        near.setblocking(False)
        self._tasks.start(_copy(reader, writer, far))
        return near

    # For others.

    async def greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        """``node`` wants to reach ``hello.target``: call that, and copy bytes until one ends."""
        target, links = hello.target, self.links
        introduction = links.introduction(target)
        if not {node, target} <= set(links.nodes) or introduction is None or links.via(target):
            text = f"this node has no link of its own with node {target[:12]!r}"
            await aio.write_greeting(writer, Refusal("way", text))
            return
        pair = (node, target, bool(hello.for_files))
        if node == target or any(pair == each[:3] for each in self._relayed):
            text = f"this node relays a link between two nodes once, and does with {target[:12]!r}"
            await aio.write_greeting(writer, Refusal("duplicate", text))
            return
        if len(self._relayed) >= MAX_RELAYED:
            text = f"this node relays {MAX_RELAYED} links already"
            await aio.write_greeting(writer, Refusal("full", text))
            return
        relayed = (*pair, writer)
        self._relayed.append(relayed)
        try:
            async with asyncio.timeout(_CALL_S):
                await self._check(target, introduction.port)
                sock = await aio.dial(links.address(target), introduction.port, links.bind)
        except (OSError, TimeoutError, PotluckError) as error:
            await aio.write_greeting(writer, Refusal("way", f"node {target[:12]}: {error}"))
            return
        else:
            with contextlib.closing(sock):
                await aio.write_greeting(writer, Welcome())
                await _copy(reader, writer, sock)
        finally:
            self._relayed.remove(relayed)

    async def _check(self, target: str, port: int) -> None:
        """PotluckError if not ``target`` answers there: nodes name their ports themselves, and two
        that work together could reach any port of a host by way of this one."""
        found: list[str] = []
        host, bind = self.links.address(target), self.links.bind

        def note(node: str) -> bool:
            found.append(node)
            return False

        with contextlib.suppress(aio.Unwanted):
            await aio.connect(
                host,
                port,
                Hello(KIND),
                self.credentials,
                bind=bind,
                timeout_s=_CALL_S,
                wanted=note,
            )
        if found != [target]:
            raise SecurityError(f"at port {port} of its host another node answers")


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sock: socket.socket
) -> None:
    """Copy bytes in both directions between a connection and ``sock``, until one of the two ends;
    then both are ended."""
    sock.setblocking(False)
    inner_reader, inner_writer = await asyncio.open_connection(sock=sock)
    ways = [
        asyncio.create_task(_copy_one(reader, inner_writer)),
        asyncio.create_task(_copy_one(inner_reader, writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (inner_writer, writer):
            each.transport.abort()
        await stop(*ways)
        await aio.end(inner_writer)


async def _copy_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while some := await reader.read(_PIECE_BYTES):
            writer.write(some)
            await writer.drain()
