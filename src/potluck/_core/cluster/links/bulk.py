"""Bulk connections: on them the content of files passes between agents, never on the links with
heartbeats.

A connection is made when it is first needed, with knock, TLS and list of keys as every other, and
ended when it is idle or its node is banned. One serves both directions, so it does not matter
which side can call the other: a node that can't, asks the other one over their link to call, and
two nodes that only reach each other by way of a third use that way here, too.

Heartbeats come first: of the bytes that a node asks for, only about a quarter of a second's worth
is on the way from each other node at a time (``Pace``), and packets are marked as of low priority.
A receiver thus keeps the queues short in front of a slow uplink, whoever shares it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from potluck._core.background import Tasks, stop
from potluck._core.cluster.links.peers import PeerLinks, Requests
from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials
from potluck._core.wire import bulk, peers
from potluck._core.wire.greeting import Hello, Refusal, Welcome
from potluck.errors import LinkError, PotluckError, Refused

KIND = "bulk"
"""The ``kind`` in the greeting of a bulk connection."""
SILENT_S = 10.0
"""A node that answers nothing for so long is given up."""

_IDLE_S = 30.0
_CALL_S = 3.0
_CALL_BACK_S = 5.0
_MAX_OF_ONE = 4
_MAX_ASKED = 256
"""Requests of one connection that wait for their answers."""
_MAX_WAITING = 8 << 20
"""Memory, in bytes, that the requests of one node may take until they are answered."""
_MAX_WAITING_OF_ALL = 64 << 20
_MAX_UNSENT = 2 << 20
_UNREAD_S = 60.0
"""A node that does not read an answer, of at most 1 MiB, for so long is given up."""
_BUFFER = 128 << 10
_LEAST_PART = 32 << 10
_LOW_PRIORITY = 8 << 2
"""DSCP CS1, which routers that look at it send last."""

T = TypeVar("T")
Answer = Callable[[str, bulk.Request], Awaitable[bulk.Response]]
"""``answer(node, request)``: the response. The text of a PotluckError or OSError becomes a
Failure."""


class Pace:
    """How many bytes may be on their way from one node: those of ``AHEAD_S`` at the measured rate.
    As long as they are more than the network holds, the rate does not grow with them; so they
    settle at the rate of the way, and ``AHEAD_S`` is the longest queue. Pure."""

    AHEAD_S = 0.25
    LEAST, MOST = 64 << 10, 8 << 20

    def __init__(self) -> None:
        self.window = 512 << 10
        self.open = 0
        self._since = 0.0
        self._count = 0

    def may_ask(self, count: int) -> bool:
        """Whether ``count`` bytes more may be asked for."""
        return not self.open or self.open + count <= self.window

    def asked(self, count: int, now: float) -> None:
        """They were."""
        if not self.open:
            self._since, self._count = now, 0
        self.open += count

    def answered(self, count: int, now: float) -> None:
        """They arrived, or never will."""
        self.open -= count
        self._count += count
        if now - self._since >= self.AHEAD_S:
            rate = self._count / (now - self._since)
            self.window = int(min(max(rate * self.AHEAD_S, self.LEAST), self.MOST))
            self._since, self._count = now, 0


class _Connection(aio.MessageLink[bulk.BulkMessage, bulk.BulkMessage]):
    def __init__(
        self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(
            reader, writer, received=bulk.MESSAGE, sent=bulk.MESSAGE, max_unsent=_MAX_UNSENT
        )
        writer.transport.set_write_buffer_limits(high=_BUFFER)
        self.node = node
        self.requests = Requests()
        self.asked: asyncio.Queue[bulk.Asked] = asyncio.Queue(_MAX_ASKED)
        self.waiting = 0
        """Bytes of memory that requests without answers take."""
        self.pace = Pace()
        self.turn = asyncio.Lock()
        self.room = asyncio.Event()
        self.used = self.heard = _now()
        """When any message passed last, and when the last answer came."""
        _lower_priority(writer.get_extra_info("socket"))

    @property
    def is_over(self) -> bool:
        return self.writer.transport.is_closing()


class BulkLinks:
    """The bulk connections of one agent, to nodes with which it has links (``peers``). ``answer``
    and ``told`` take what other nodes request and announce; ``reach(node, via)`` opens a way to
    ``node`` by way of another one."""

    def __init__(self, credentials: Credentials, links: PeerLinks) -> None:
        self.answer: Answer = _nothing_here
        self.told: Callable[[str, bulk.Announce], None] = lambda node, message: None
        self.reach: Callable[[str, str], Awaitable[socket.socket]] | None = None
        self._credentials = credentials
        self._peers = links
        self._newest: dict[str, _Connection] = {}
        self._all: set[_Connection] = set()
        self._opening: dict[str, asyncio.Task[_Connection]] = {}
        self._called: dict[str, asyncio.Event] = {}
        self._tasks = Tasks()
        links.on(peers.BulkCall, self._call_back)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that can be asked."""
        return self._peers.nodes

    async def ask(self, node: str, request: bulk.Request, kind: type[T]) -> T:
        """The response of ``node``, maybe this one, of type ``kind``.

        LinkError if there is no way to the node, if it has none, with its reason, or answers
        nothing at all for ``SILENT_S``; ProtocolError if the response is of another type. It may
        take long, as long as there are other responses.
        """
        if node == self._credentials.node_id:
            content = await self._made(node, request)
            if isinstance(content, peers.Failure):
                raise LinkError(content.reason)
            assert isinstance(content, kind)
            return content
        link = await self._to(node)
        count = request.count if isinstance(request, bulk.PartRequest) else 0
        async with link.turn:  # in the order of the calls: one chunk after the other is whole
            while count and not link.pace.may_ask(count):
                link.room.clear()
                await link.room.wait()
                if link.is_over:
                    raise LinkError(link.reason or f"node {node[:12]} ended the connection")
            link.pace.asked(count, _now())
        try:
            return await self._answered(link, request, kind)
        finally:
            link.pace.answered(count, _now())
            link.room.set()

    async def _answered(self, link: _Connection, request: bulk.Request, kind: type[T]) -> T:
        def send(number: int) -> bool:
            link.used = _now()
            return link.send(bulk.Asked(number, request))

        began = _now()
        asking = asyncio.ensure_future(link.requests.ask(link.node, kind, send, timeout_s=None))
        try:
            while True:
                left = max(began, link.heard) + SILENT_S - _now()
                if left <= 0:
                    link.abort(f"node {link.node[:12]} answered nothing for {SILENT_S:g} s")
                    raise LinkError(link.reason)
                await asyncio.wait({asking}, timeout=left)
                if asking.done():
                    return asking.result()
        finally:
            await stop(asking)

    def part_bytes(self, node: str) -> int:
        """How many bytes to ask of ``node`` by one request."""
        link = self._newest.get(node)
        window = Pace().window if link is None else link.pace.window
        return min(max(window // 4, _LEAST_PART), bulk.MAX_PART)

    def tell(self, node: str, message: bulk.Announce) -> None:
        """Send ``message`` if there is a connection to ``node``."""
        link = self._newest.get(node)
        if link is not None:
            link.used = _now()
            link.send(message)

    def drop(self, nodes: Collection[str], reason: str) -> None:
        """End the connections of ``nodes``."""
        for link in self._all:
            if link.node in nodes:
                link.abort(reason)

    async def close(self) -> None:
        """End all connections."""
        await stop(*self._opening.values())
        await self._tasks.close()

    # Connections, from their start to their end.

    async def greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        """A node called (``hello.kind`` is ``KIND``): serve its connection to the end."""
        if sum(link.node == node for link in self._all) >= _MAX_OF_ONE:
            text = f"there are {_MAX_OF_ONE} connections for files between these nodes already"
            await aio.write_greeting(writer, Refusal("full", text))
            return
        await aio.write_greeting(writer, Welcome())
        await self._serve(self._take(node, reader, writer))

    async def _to(self, node: str) -> _Connection:
        link = self._newest.get(node)
        if link is not None and not link.is_over:
            return link
        opening = self._opening.get(node)
        if opening is None:
            opening = self._opening[node] = asyncio.create_task(self._open(node))

            def ended(task: asyncio.Task[_Connection]) -> None:
                del self._opening[node]
                if not task.cancelled():
                    task.exception()  # whoever waited for it has it, or has gone

            opening.add_done_callback(ended)
        return await asyncio.shield(opening)

    async def _open(self, node: str) -> _Connection:
        introduction = self._peers.introduction(node)
        if introduction is None:
            raise LinkError(f"there is no link to node {node[:12]}")
        via = self._peers.via(node)
        try:
            opened = await self.reach(node, via) if via and self.reach is not None else None
            reader, writer, _ = await aio.connect(
                f"node {node[:12]} by way of {via[:12]}" if via else self._peers.address(node),
                0 if via else introduction.port,
                Hello(KIND),
                self._credentials,
                timeout_s=_CALL_S,
                bind=self._peers.bind,
                wanted=lambda found: found == node,
                opened=opened,
            )
        except Refused:
            raise
        except (PotluckError, aio.Unwanted, TimeoutError, OSError) as error:
            return await self._called_back(node, error)
        link = self._take(node, reader, writer)
        self._tasks.start(self._serve(link))
        return link

    async def _called_back(self, node: str, error: BaseException) -> _Connection:
        """The connection that ``node`` makes because this node can't: ``error`` is why."""
        called = self._called[node] = asyncio.Event()
        try:
            if self._peers.send(node, peers.BulkCall()):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CALL_BACK_S):
                        await called.wait()
        finally:
            del self._called[node]
        link = self._newest.get(node)
        if link is None or link.is_over:
            raise LinkError(
                f"neither this node nor {node[:12]} can make a connection for files to the other: "
                f"{error}"
            ) from error
        return link

    def _call_back(self, node: str, message: peers.BulkCall) -> None:
        async def call() -> None:
            with contextlib.suppress(PotluckError):
                await self._to(node)

        if node not in self._opening and node not in self._called:
            self._tasks.start(call())

    def _take(
        self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Connection:
        link = _Connection(node, reader, writer)
        self._all.add(link)
        self._newest[node] = link
        if (called := self._called.get(node)) is not None:
            called.set()
        if reason := self._credentials.objects_to(node):  # since a moment ago
            link.abort(reason)
        return link

    async def _serve(self, link: _Connection) -> None:
        serving = [
            asyncio.create_task(self._answer_all(link)),
            asyncio.create_task(_end_when_idle(link)),
        ]
        try:
            while True:
                message = await link.receive()
                link.used = _now()
                match message:
                    case bulk.Answered(number, content):
                        link.heard = link.used
                        link.requests.answered(link.node, number, content)
                    case bulk.Asked():
                        link.asked.put_nowait(message)
                        link.waiting += _memory_of(message.content)
                        self._bound()
                    case bulk.Announce():
                        self.told(link.node, message)
        except asyncio.QueueFull:
            link.reason = "it asks for too much at once"
        except PotluckError as error:
            link.reason = link.reason or str(error)
        finally:
            self._all.discard(link)
            if self._newest.get(link.node) is link:
                del self._newest[link.node]
            await stop(*serving)
            link.requests.lost(f"the connection to node {link.node[:12]} ended: {link.reason}")
            await link.close()
            link.room.set()

    def _bound(self) -> None:
        """Cut off the node whose requests take the most memory, if they take too much."""
        taken = Counter[str]()
        for link in self._all:
            taken[link.node] += link.waiting
        [(node, most)] = taken.most_common(1)
        if most > _MAX_WAITING or taken.total() > _MAX_WAITING_OF_ALL:
            self.drop([node], "it asks for too much at once")

    async def _answer_all(self, link: _Connection) -> None:
        """One after the other, so that no more is read from the disk than the network takes."""
        while True:
            asked = await link.asked.get()
            content = await self._made(link.node, asked.content)
            link.send(bulk.Answered(asked.number, content))
            link.waiting -= _memory_of(asked.content)
            try:
                async with asyncio.timeout(_UNREAD_S):
                    await link.writer.drain()
            except OSError:  # ``_serve`` sees it, too
                link.abort(link.reason or "it does not read what it asked for")
                return

    async def _made(self, node: str, request: bulk.Request) -> bulk.Response:
        try:
            return await self.answer(node, request)
        except (PotluckError, OSError) as error:
            return peers.Failure(str(error)[:4096])


def _memory_of(request: bulk.Request) -> int:
    """About how many bytes ``request`` takes when it is decoded."""
    if isinstance(request, bulk.HoldingRequest):
        return 1024 + len(request.has) + len(request.awaits) + 256 * len(request.declares)
    return 1024


async def _nothing_here(node: str, request: bulk.Request) -> bulk.Response:
    return peers.Failure("this node serves no files")


async def _end_when_idle(link: _Connection) -> None:
    while (left := link.used + _IDLE_S - _now()) > 0:
        await asyncio.sleep(left)
    link.abort("it was idle")


def _lower_priority(sock: socket.socket | None) -> None:
    for level, option, value in (
        ("IPPROTO_IP", "IP_TOS", _LOW_PRIORITY),
        ("IPPROTO_IPV6", "IPV6_TCLASS", _LOW_PRIORITY),
        ("IPPROTO_TCP", "TCP_NOTSENT_LOWAT", _BUFFER),
    ):
        with contextlib.suppress(OSError, AttributeError):  # of the other family; not here
            if sock is not None:
                sock.setsockopt(getattr(socket, level), getattr(socket, option), value)


def _now() -> float:
    return asyncio.get_running_loop().time()
