"""The links of one agent to other agents, its peers: at most one link for each pair.

Links are made by calling the addresses in hints, and made again when lost. Either side may call. If
both call at once, the call of the lower node id wins. A peer that calls although there is a link to
it has lost that link (its agent was started again, say): the call replaces the link, unless the
link is younger than ``_YOUNG_S``. The messages are in ``wire.peers``. Which peers are alive is not
decided here, but from heartbeats (``cluster/membership/failure_detector.py``).

Each part of the agent registers for the messages that concern it (``on``), for requests that it
answers (``on_request``), and for the start and end of links.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from types import UnionType
from typing import Any, TypeVar, get_args

from potluck._core.background import OnBroken, Tasks, start_task, stop
from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.discovery.caller import HintCaller
from potluck._core.cluster.discovery.interfaces import interface_of
from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials, node_id_of_bytes
from potluck._core.transport.listener import REFUSAL_S, RateLimitedLog
from potluck._core.wire import peers
from potluck._core.wire.format import UnknownMessage
from potluck._core.wire.greeting import Hello, Refusal, Welcome, common_version
from potluck.errors import LinkError, PotluckError, ProtocolError, Refused, WrongSecret

KIND = "node"
"""The ``kind`` in the greeting of one agent to another."""
IDLE_S = 4.0
"""Seconds without a message after which a link is ended; heartbeats come five times a second. TCP
alone backs off while a network is cut, and after the heal would wait as long again as the cut
lasted before it sends."""

_CALL_S = 3.0
_INTRODUCTION_S = 5.0
_YOUNG_S = 1.0
_PASSING = ("duplicate", "collision", "self")
_LAST_WORDS_S = 0.5
_MAX_UNSENT = 8 << 20
_MAX_LINKS = 1024

_log = logging.getLogger(__name__)


Linked = Callable[[str, peers.Introduction], None]
"""``(node, introduction)``: there is a link to ``node``."""
Ended = Callable[[str, int, str], None]
"""``(node, incarnation, reason)``: the link has ended; its address is called again."""
Unreachable = Callable[[str, int], None]
"""``(node, incarnation)``: the host of ``node`` refused a connection to the address of the last
link: no agent listens there any more."""


T = TypeVar("T")

Answer = Callable[[str, Any], peers.ResponseContent | Awaitable[peers.ResponseContent]]
"""``answer(node, request)``: the response, or a coroutine that returns it. The text of a
PotluckError or OSError becomes a Failure."""


class Requests:
    """The side that asks: an agent over its links (``PeerLinks.ask``), a command by way of its
    agent. A request has a number, which its response repeats."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[object]]] = {}

    async def ask(
        self, node: str, kind: type[T], send: Callable[[int], bool], *, timeout_s: float | None
    ) -> T:
        """The response of ``node``, of type ``kind``, to the request that ``send(number)`` sends.

        LinkError if there is no link to the node (``send`` returns False), if the link ends, if the
        response is a Failure (with its reason), or if none comes in ``timeout_s`` (None: no limit);
        ProtocolError if it is of another type.
        """
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = node, future
        try:
            if not send(number):
                raise LinkError(f"there is no link to node {node[:12]}")
            async with asyncio.timeout(timeout_s):
                content: Any = await future
        except TimeoutError:
            raise LinkError(f"node {node[:12]} did not answer for {timeout_s:g} s") from None
        finally:
            del self._waiting[number]
        if isinstance(content, peers.Failure):
            raise LinkError(content.reason)
        if not isinstance(content, kind):
            raise ProtocolError(f"node {node[:12]} answered with {type(content).__name__}")
        return content

    def answered(self, node: str, number: int, content: object) -> None:
        """``node`` sent a response. One that was not asked for is dropped."""
        asked, future = self._waiting.get(number, ("", None))
        if future is not None and asked == node and not future.done():
            future.set_result(content)

    def lost(self, reason: str, node: str = "") -> None:
        """Nothing more comes from ``node`` (empty: from any)."""
        for asked, future in self._waiting.values():
            if node in ("", asked) and not future.done():
                future.set_exception(LinkError(reason))


class _Link(aio.MessageLink[peers.PeerMessage, peers.PeerMessage]):
    """The link to ``node`` at ``host``, made at this time; ``via`` is the node that relays it."""

    def __init__(
        self,
        node: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        greeting: Hello | Welcome,
        via: str = "",
    ) -> None:
        form, version = peers.MESSAGE, common_version(greeting)
        super().__init__(
            reader, writer, received=form, sent=form, max_unsent=_MAX_UNSENT, version=version
        )
        self.node = node
        self.via = via
        self.host = "" if via else _host_of(writer.get_extra_info("peername"))
        self.made = _now()
        self.introduction: peers.Introduction | None = None

    def drop(self, unknown: UnknownMessage) -> None:
        super().drop(unknown)
        if unknown.number:
            text = f"the potluck of node {self.node[:12]} asked what this one's does not know"
            self.send(peers.Response(unknown.number, peers.Failure(f"{text}: {unknown.kind}")))

    def objection(self, content: peers.RequestContent) -> str:
        """Why the peer can't be asked this; empty if it can."""
        if self.introduction is None or self.sent.is_known(peers.Request(0, content), self.version):
            return ""
        versions = self.introduction.versions
        return (
            f"{self.introduction.name} has potluck {versions.potluck}, which is too old for this. "
            f"Enter there: {versions.upgrade}"
        )


class PeerLinks:
    """The links of one agent. ``me()`` is its introduction to peers; hints come in by ``heard``,
    connections that peers make by ``greeted``."""

    def __init__(
        self,
        credentials: Credentials,
        me: Callable[[], peers.Introduction],
        *,
        bind: str = "",
        on_broken: OnBroken,
    ) -> None:
        """``bind``: the interface or address to call peers from; empty for any.
        ``on_broken(error)``: the task that calls peers broke."""
        self.bind = bind
        self._credentials = credentials
        self._me = me
        self._takers: dict[type, Callable[[str, Any], None]] = {}
        self._answers: dict[type, Answer] = {}
        self._requests = Requests()
        self.on_linked: list[Linked] = []
        self.on_ended: list[Ended] = []
        self.on_unreachable: list[Unreachable] = []
        self._calls = HintCaller(self._call)
        self._book = self._calls.book
        self._links: dict[str, _Link] = {}
        self._addresses: dict[str, str] = {}
        self._incarnations: dict[str, int] = {}
        self._calling: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._complain = RateLimitedLog(_log)
        self._complain_of_refusal = RateLimitedLog(_log, interval_s=REFUSAL_S)
        self._is_closed = False
        self._caller = start_task(self._calls.run, name="calling peers", on_broken=on_broken)

    def on(self, messages: UnionType | type, take: Callable[[str, Any], None]) -> None:
        """Register ``take(node, message)`` for messages of these types. It is called in the event
        loop and must not block; a PotluckError that it raises ends the link."""
        for kind in get_args(messages) or (messages,):
            self._takers[kind] = take

    def on_request(self, requests: UnionType | type, answer: Answer) -> None:
        """Register ``answer(node, request)`` for requests of these types."""
        for kind in get_args(requests) or (requests,):
            self._answers[kind] = answer

    async def ask(
        self, node: str, request: peers.RequestContent, kind: type[T], *, timeout_s: float | None
    ) -> T:
        """The response to ``request`` of ``node``, maybe this node; see ``Requests.ask``. LinkError
        also if the potluck there is too old for such a request."""
        link = self._links.get(node)
        if link is not None and (text := link.objection(request)):
            raise LinkError(text)

        def send(number: int) -> bool:
            return self.send(node, peers.Request(number, request))

        return await self._requests.ask(node, kind, send, timeout_s=timeout_s)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The peers with a link."""
        return tuple(node for node, link in self._links.items() if link.introduction)

    def introduction(self, node: str) -> peers.Introduction | None:
        """The introduction of ``node``, which may be this node; None without a link."""
        if node == self._credentials.node_id:
            return self._me()
        link = self._links.get(node)
        return None if link is None else link.introduction

    def address(self, node: str) -> str:
        """The host at the other end of the link to ``node``; empty without a link of its own."""
        link = self._links.get(node)
        return "" if link is None else link.host

    def via(self, node: str) -> str:
        """The node that relays the link to ``node``; empty if none does."""
        link = self._links.get(node)
        return "" if link is None else link.via

    def last_address(self, node: str) -> str:
        """The host of the newest link to ``node``, also if it has ended; empty if there was
        none."""
        return self._addresses.get(node, "")

    def local(self, node: str) -> str:
        """This machine's address on the link to ``node``; empty without a link."""
        link = self._links.get(node)
        name = None if link is None or link.via else link.writer.get_extra_info("sockname")
        with contextlib.suppress(OSError):  # its interface has gone
            return "" if name is None else _host_of(name)
        return ""

    def move(self, node: str, host: str, port: int) -> None:
        """Replace the link to ``node`` by one to this address, if ``node`` answers there."""
        hint = Hint(host, port, "measured")
        self._book.heard(hint, _now())
        self._book.prefer(node, hint)
        self._calls.start(self._call(hint, replaces=node))

    def unsent(self, node: str) -> int:
        """Bytes that wait to be sent to ``node``; 0 without a link."""
        link = self._links.get(node)
        return 0 if link is None else link.unsent

    def heard(self, hint: Hint) -> None:
        """A finder found ``hint``."""
        self._calls.heard(hint)

    def send(self, node: str, message: peers.PeerMessage) -> bool:
        """Send ``message``, without blocking; False without a link. A peer that does not read loses
        its link once 8 MiB wait for it. A message to this node itself arrives in the next turn of
        the event loop."""
        if node == self._credentials.node_id:
            asyncio.get_running_loop().call_soon(self._take_message, node, message)
            return True
        link = self._links.get(node)
        if link is None or link.introduction is None:
            return False
        return link.send(message)

    def drop(self, node: str, reason: str, last_words: Sequence[peers.PeerMessage] = ()) -> None:
        """End the link to ``node``, if there is one. From now on no message of the node is
        heard; ``last_words`` are still sent, for ``_LAST_WORDS_S`` at most."""
        link = self._links.get(node)
        if link is None:
            return
        link.reason = reason
        if link.introduction is None:
            link.abort(reason)
            return
        for message in last_words:
            link.send(message)
        self._forget(link)
        self._tasks.start(self._end(link, reason))

    async def _end(self, link: _Link, reason: str) -> None:
        await link.flush(_LAST_WORDS_S)
        link.abort(reason)

    async def close(self) -> None:
        """End all links and calls. Nothing more is told."""
        self._is_closed = True
        await stop(self._caller, *self._tasks)

    # Calls of peers.

    async def greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        """A node called (``hello.kind`` is ``KIND``): answer, and serve the link to its end."""
        refusal = self._objection(node)
        if refusal is not None:
            await aio.write_greeting(writer, refusal)
            return
        other = self._calling.pop(node, None)
        if other is not None:
            other.cancel()
        link = self._take(node, reader, writer, hello, hello.via)
        try:
            await aio.write_greeting(writer, Welcome())
        except BaseException:
            self._forget(link)
            raise
        await self._serve(link)

    def _objection(self, node: str) -> Refusal | None:
        if self._is_closed:
            return Refusal("closed", "this agent is ending")
        if node == self._credentials.node_id:
            return Refusal("self", "that is this node itself")
        link = self._links.get(node)
        if link is not None and _now() - link.made < _YOUNG_S:
            return Refusal("duplicate", "there is a link between these nodes already")
        if node in self._calling and self._credentials.node_id < node:
            return Refusal("collision", "this node is calling that one")
        if link is None and len(self._links) >= _MAX_LINKS:
            return Refusal("full", f"this agent has {_MAX_LINKS} links, and takes no more")
        return None

    # Calls to peers.

    async def _call(self, hint: Hint, replaces: str = "") -> None:
        """Call one address. Which node answers is known after the TLS handshake, before any
        message. ``replaces``: a node whose link is to be replaced by this one."""
        hello = Hello(KIND)
        reached = ""

        def wanted(node: str) -> bool:
            nonlocal reached
            reached = node
            if node == self._credentials.node_id or node in self._calling:
                return False
            if node != replaces if replaces else self._has_own_link(node):
                return False
            task = asyncio.current_task()
            assert task is not None
            self._calling[node] = task
            return True

        link = None
        is_refused = False
        try:
            reader, writer, welcome = await aio.connect(
                hint.host,
                hint.port,
                hello,
                self._credentials,
                timeout_s=_CALL_S,
                bind=self.bind,
                wanted=wanted,
            )
            # The peer's own call came in while this one was under way.
            if self._has_own_link(reached) and reached != replaces:
                await aio.end(writer)
            else:
                link = self._take(reached, reader, writer, welcome)
        except aio.Unwanted:
            pass
        except (PotluckError, TimeoutError) as error:
            is_refused = isinstance(error, Refused) and error.code not in _PASSING
            self._failed(hint, error)
        finally:
            if self._calling.get(reached) is asyncio.current_task():
                del self._calling[reached]
            if reached and not is_refused:
                self._book.reached(hint, reached, _now())
                if reached == self._credentials.node_id:
                    self._book.linked(reached)
            else:
                self._book.failed(hint, _now())
        if link is not None:
            self._tasks.start(self._serve(link))

    def _has_own_link(self, node: str) -> bool:
        link = self._links.get(node)
        return link is not None and not link.via

    async def call_by(self, via: str, node: str, sock: socket.socket) -> bool:
        """Make the link to ``node`` over ``sock``, which ``via`` connects with it. It replaces a
        link that does not work. Returns whether it is made; errors as for ``aio.connect``."""
        reader, writer, welcome = await aio.connect(
            f"node {node[:12]} by way of {via[:12]}",
            0,
            Hello(KIND, via=via),
            self._credentials,
            timeout_s=_CALL_S,
            wanted=lambda found: found == node and node not in self._calling,
            opened=sock,
        )
        if self._is_closed:
            await aio.end(writer)
            return False
        self._tasks.start(self._serve(self._take(node, reader, writer, welcome, via)))
        return True

    def _failed(self, hint: Hint, error: PotluckError | TimeoutError) -> None:
        where = f"{hint.host}:{hint.port} (found by {hint.source})"
        if isinstance(error, Refused):
            if error.code not in _PASSING:
                self._complain_of_refusal.warning(f"{error}")
        elif isinstance(error, WrongSecret):
            self._complain.warning(f"{where} is not of this cluster: {error}")
        else:
            _log.debug("%s: %s", where, error)
        if isinstance(error.__cause__, ConnectionRefusedError):
            for node, incarnation in list(self._incarnations.items()):
                places = {(each.host, each.port) for each in self._book.places_of(node)}
                if node not in self._links and (hint.host, hint.port) in places:
                    for tell in self.on_unreachable:
                        tell(node, incarnation)

    # One link, from its start to its end.

    def _take(
        self,
        node: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        greeting: Hello | Welcome,
        via: str = "",
    ) -> _Link:
        old = self._links.get(node)
        link = _Link(node, reader, writer, greeting, via)
        self._links[node] = link
        if via:  # its own addresses are called until one answers
            self._book.unlinked(node, _now())
            self._calls.wake()
        else:
            self._book.linked(node)
        if old is not None:
            old.abort("the peer made a new link")
            self._tell_end(old)
        return link

    async def _serve(self, link: _Link) -> None:
        """Introduce this node, then take messages until the link ends."""
        try:
            link.send(self._me())
            async with asyncio.timeout(_INTRODUCTION_S):
                first = await link.receive()
            if not isinstance(first, peers.Introduction):
                raise ProtocolError(f"it began with {type(first).__name__}, not an introduction")
            if node_id_of_bytes(first.key) != link.node:
                raise ProtocolError("it introduced itself with another key than its own")
            link.introduction = first
            self._incarnations[link.node] = first.incarnation
            if not link.via:
                self._addresses[link.node] = link.host
            for tell in self.on_linked:
                tell(link.node, first)
            while True:
                async with asyncio.timeout(IDLE_S):
                    message = await link.receive()
                if self._links.get(link.node) is not link:
                    return
                self._take_message(link.node, message)
        except TimeoutError:
            link.reason = link.reason or "it said nothing for too long"
        except LinkError as error:
            link.reason = link.reason or str(error)
        except PotluckError as error:
            link.reason = str(error)
            self._complain.warning(f"cut off node {link.node[:12]} at {link.host}: {error}")
        finally:
            self._forget(link)
            await link.close()

    def _take_message(self, node: str, message: peers.PeerMessage) -> None:
        if isinstance(message, peers.Request):
            answer = self._answers.get(type(message.content))
            if answer is not None and not self._is_closed:
                self._tasks.start(self._answer(node, message, answer))
        elif isinstance(message, peers.Response):
            self._requests.answered(node, message.number, message.content)
        elif (take := self._takers.get(type(message))) is not None:
            take(node, message)

    async def _answer(self, node: str, request: peers.Request, answer: Answer) -> None:
        try:
            made = answer(node, request.content)
            content = await made if isinstance(made, Awaitable) else made
        except (PotluckError, OSError) as error:
            content = peers.Failure(str(error)[:4096])
        self.send(node, peers.Response(request.number, content))

    def _forget(self, link: _Link) -> None:
        if self._links.get(link.node) is link:
            del self._links[link.node]
            self._book.unlinked(link.node, _now())
            self._calls.wake()
            self._tell_end(link)

    def _tell_end(self, link: _Link) -> None:
        self._requests.lost(f"the link to node {link.node[:12]} ended", link.node)
        if link.introduction is not None and not self._is_closed:
            _log.info("the link to %s ended: %s", link.node[:12], link.reason)
            for tell in self.on_ended:
                tell(link.node, link.introduction.incarnation, link.reason)


def _host_of(peer: tuple[Any, ...]) -> str:
    """The host of a socket's address, in a form that can be called: a link-local IPv6 address
    (fe80::) needs the name of its interface."""
    host = str(peer[0]).removeprefix("::ffff:")
    if "%" in host or len(peer) < 4:
        return host
    if peer[3]:
        return f"{host}%{socket.if_indextoname(peer[3])}"
    # The own end of a connection may be link-local although the other end is not: while the global
    # address of the interface is still being checked for duplicates. Such an end has no scope.
    name = interface_of(host) if host.startswith("fe80:") else ""
    return f"{host}%{name}" if name else host


def _now() -> float:
    return asyncio.get_running_loop().time()
