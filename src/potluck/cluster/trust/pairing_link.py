"""Pairing over the network: ``hand_over`` on the host, ``take_over`` on the joining machine.

The port is open only while ``hand_over`` runs. A client is unauthenticated, within
``transport.acceptor``'s limits, until it has sent a well-formed opening; a client that sends
anything else is disconnected without effect on the code. The first opening is the only guess of the
code: a wrong guess voids the code. The client with the guess counts as authenticated, so that
further connections can't displace it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.background import start_task, stop, why
from potluck.cluster.discovery.advert import Hint, new_instance
from potluck.cluster.discovery.finder import Finder, running_finders
from potluck.cluster.discovery.presence import Presence
from potluck.cluster.trust.admissions import Admissions
from potluck.cluster.trust.pairing import Code, Exchange, Sealing
from potluck.errors import (
    LinkError,
    PotluckError,
    ProtocolError,
    SecurityError,
    WrongCode,
)
from potluck.transport.acceptor import LIMITS, Acceptor, Caller, ListeningSocket, listening_socket
from potluck.transport.aio import end
from potluck.transport.credentials import node_id_of_bytes
from potluck.wire import pairing as wire

STEP_S = 5.0
"""Deadline of one run of the protocol, from the opening to the proofs, on either machine."""
CONFIRM_S = 180.0
"""How long the two people may take to compare the words and say yes."""
MAX_GUESSES = 3
"""How many hosts a joining machine sends an opening: each may be an impostor with one guess."""

_MAX_CALLS = 32
_CONNECT_S = 3.0
_PATIENT_S = 0.25 * LIMITS.timeout_s


T = TypeVar("T")

Confirm = Callable[[str, str, str], Awaitable[bool]]
"""``confirm(words, name, node)``: whether the person says that both screens show these words; about
the machine that calls itself ``name`` (empty: not known yet)."""


async def hand_over(
    code: Code,
    admit: Callable[[wire.Newcomer], Awaitable[wire.Handover]],
    finders: Sequence[Finder],
    confirm: Confirm,
    *,
    host: str = "",
    port: int = 0,
    expires_s: float = 300.0,
    on_waiting: Callable[[int], None] = lambda port: None,
) -> wire.Newcomer:
    """Wait for a machine that has ``code``, and have it admitted; the machine's description.

    ``admit(newcomer)`` admits the key that the machine has proved, once the person said yes, and
    returns what the machine is to have. ``host`` is an interface or address to wait on;
    ``on_waiting`` is called with the TCP port. WrongCode if a machine used a wrong code, if the
    person said no, or if no machine used ``code`` within ``expires_s`` seconds; ConfigurationError
    if the port is in use or forbidden. LinkError if the connection ended before the machine
    confirmed that it has all. What ``admit`` and ``confirm`` raise is passed on.
    """
    waiting = _Host(code, admit, confirm, listening_socket(host, port))
    presence = Presence(lambda: [code.advert_key], waiting.port, new_instance())
    try:
        async with running_finders(finders, presence, lambda hint: None):
            try:
                on_waiting(waiting.port)
                async with asyncio.timeout(expires_s):
                    await _first(waiting.begun, waiting.outcome)
                return await waiting.outcome  # it has its own deadlines
            finally:  # first, because the code is void and the finders take a while to close
                await waiting.close()
    except TimeoutError:
        raise WrongCode(
            f"the code has expired: no machine used it within {expires_s:g} s; "
            "run `potluck pair` again"
        ) from None
    finally:
        await waiting.close()


class _Host:
    """The host of a pairing; ``outcome`` is the machine that has proved the code."""

    def __init__(
        self,
        code: Code,
        admit: Callable[[wire.Newcomer], Awaitable[wire.Handover]],
        confirm: Confirm,
        sock: ListeningSocket,
    ) -> None:
        self.port = sock.port
        self.outcome: asyncio.Future[wire.Newcomer] = asyncio.get_running_loop().create_future()
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A machine has proved the code."""
        self._sock = sock
        self._code = code
        self._admit = admit
        self._confirm = confirm
        self.is_used = False
        acceptor = Acceptor(sock, self._answer, LIMITS, awaits="a pairing opening")
        self._accepting = start_task(acceptor.run, name="pairing", on_broken=self._broke)

    async def close(self) -> None:
        await stop(self._accepting)
        self._sock.close()  # the task closes it, unless it was cancelled before it began
        if self.outcome.done() and not self.outcome.cancelled():
            self.outcome.exception()  # so that asyncio does not report an unretrieved exception

    async def _answer(self, caller: Caller) -> None:
        reader, writer = await asyncio.open_connection(sock=caller.sock)
        try:
            opening = await _receive(reader, wire.OPENING)
            if self.is_used:
                writer.write(wire.encode(wire.BUSY))
                await writer.drain()
                return
            exchange = Exchange(self._code, is_host=True)
            sealing = exchange.agree(opening)
            self.is_used = True
            caller.authenticated()
            writer.write(wire.encode(wire.ANSWER, exchange.opening + sealing.proof))
            await self._finish(sealing, reader, writer)
        finally:
            await end(writer)

    async def _finish(
        self, sealing: Sealing, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Exchange proofs with the client that has the guess; if the person agrees, admit it."""
        is_proved = False
        try:
            async with asyncio.timeout(STEP_S):
                await writer.drain()
                sealing.check(await _receive(reader, wire.PROOF))
                is_proved = True
                newcomer = sealing.open(await _receive(reader, wire.SEALED), wire.Newcomer)
                sealing.check_newcomer(newcomer)
            self.begun.set_result(None)
            node = node_id_of_bytes(newcomer.key)
            words = sealing.words(newcomer.key)
            async with asyncio.timeout(CONFIRM_S):
                if not await self._own(self._confirm(words, newcomer.name, node)):
                    self._settle(WrongCode("not admitted: the code is void now"))
                    return
                sealing.check_yes(await _receive(reader, wire.YES))
            handover = await self._own(self._admit(newcomer))
            async with asyncio.timeout(CONFIRM_S):
                writer.write(wire.encode(wire.HANDOVER, sealing.seal(handover)))
                await writer.drain()
                if await reader.read(1):  # the joining machine confirms by closing the connection
                    raise ProtocolError("a pairing message after the last one")
            self._settle(newcomer)
        except (PotluckError, OSError):
            if is_proved:
                self._settle(
                    LinkError(
                        "a machine had the right code, but its connection ended before it "
                        "confirmed that it is in; if it is not, run `potluck pair` again"
                    )
                )
            else:
                self._settle(
                    WrongCode(
                        "a machine used a wrong code, or its connection ended before it proved "
                        "the code. The code is void now; run `potluck pair` for another code"
                    )
                )

    async def _own(self, step: Awaitable[T]) -> T:
        """The result of ``step`` of this machine. Its error is the outcome: it says nothing about
        the connection or the code."""
        try:
            return await step
        except Exception as error:
            self._settle(error)
            raise

    def _broke(self, error: BaseException) -> None:
        self._settle(LinkError(f"the pairing port failed ({why(error)}); run `potluck pair` again"))

    def _settle(self, outcome: wire.Newcomer | Exception) -> None:
        if self.outcome.done():
            return
        if isinstance(outcome, Exception):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


async def take_over(
    code: Code,
    me: Me,
    finders: Sequence[Finder],
    confirm: Confirm,
    *,
    address: tuple[str, int] | None = None,
    timeout_s: float = 60.0,
) -> wire.Handover:
    """What the host that shows ``code`` gives to this machine, once both people said yes.

    The host is found by ``finders``, or is at ``address``. Tries at most ``MAX_GUESSES`` hosts;
    WrongCode if none of them has this code, or if the person said no. LinkError if no host was
    found within ``timeout_s`` seconds, or if the connection failed.
    """
    if address is not None:
        async with _connected(*address) as streams:
            return await _ask(streams, code, me, confirm)
    search = _Search(code, me, confirm)
    presence = Presence(lambda: [code.advert_key], 0, new_instance())
    try:
        async with running_finders(finders, presence, search.heard):
            async with asyncio.timeout(timeout_s):
                await _first(search.found, search.outcome)
            return await search.outcome
    except TimeoutError:
        reached = f" ({search.failure})" if search.failure else ""
        raise LinkError(
            f"no machine that shows this code was found in {timeout_s:g} s{reached}. Is `potluck "
            "pair` still waiting there, on the same network? If the network drops multicast, give "
            "its address, as `potluck pair` shows it: potluck join --address HOST:PORT"
        ) from None
    finally:
        await search.close()


class _Search:
    """The search for the host: connects to all hosts found, and tries them one after the other,
    each host once."""

    def __init__(self, code: Code, me: Me, confirm: Confirm) -> None:
        self.failure = ""
        self.found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A host with this code was found; the people are asked."""
        self._code = code
        self._me = me
        self._confirm = confirm
        self.outcome: asyncio.Future[wire.Handover] = asyncio.get_running_loop().create_future()
        self._calls: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._asking = asyncio.Lock()
        self._wrong: set[str] = set()

    def heard(self, hint: Hint) -> None:
        place = (hint.host, hint.port)
        if place in self._calls or hint.instance in self._wrong or len(self._calls) >= _MAX_CALLS:
            return
        task = asyncio.create_task(self._call(hint))
        self._calls[place] = task
        task.add_done_callback(lambda _: self._calls.pop(place, None))

    async def close(self) -> None:
        await stop(*self._calls.values())
        if self.outcome.done() and not self.outcome.cancelled():
            self.outcome.exception()

    async def _call(self, hint: Hint) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                streams = await stack.enter_async_context(_connected(hint.host, hint.port))
                since = asyncio.get_running_loop().time()
                await stack.enter_async_context(self._asking)
                if self.outcome.done() or hint.instance in self._wrong:
                    return
                if asyncio.get_running_loop().time() - since > _PATIENT_S:
                    # The host has dropped the silent connection while other hosts were tried.
                    again = _connected(hint.host, hint.port)
                    streams = await stack.enter_async_context(again)
                await self._guess(hint, streams)
        except PotluckError as error:
            self.failure = str(error)

    async def _guess(self, hint: Hint, streams: Streams) -> None:
        async def confirm(words: str, name: str, node: str) -> bool:
            self.found.set_result(None)
            return await self._confirm(words, name, node)

        try:
            self.outcome.set_result(await _ask(streams, self._code, self._me, confirm))
        except Exception as error:
            self.failure = str(error)
            if self.found.done():  # it had the code: no other host will
                self.outcome.set_exception(error)
            elif not isinstance(error, PotluckError):
                raise
            elif isinstance(error, WrongCode):
                self._wrong.add(hint.instance)
                if len(self._wrong) >= MAX_GUESSES:
                    self.outcome.set_exception(error)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def _connected(host: str, port: int) -> AsyncIterator[Streams]:
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise LinkError(f"{host}:{port} can't be reached: {reason}") from error
    try:
        yield reader, writer
    finally:
        await end(writer)


@dataclass(frozen=True, slots=True)
class Me:
    """The joining machine: its key, and the name that it calls itself."""

    key: Ed25519PrivateKey = field(repr=False)
    name: str


async def _ask(streams: Streams, code: Code, me: Me, confirm: Confirm) -> wire.Handover:
    """One run of the protocol with one host. LinkError if the connection fails, WrongCode if the
    host has another code or the person says no."""
    reader, writer = streams
    place = writer.get_extra_info("peername")  # None if the peer has reset the connection already
    peer = f"{place[0]}:{place[1]}" if place else "the other machine"
    try:
        async with asyncio.timeout(STEP_S):
            exchange = Exchange(code, is_host=False)
            writer.write(wire.encode(wire.OPENING, exchange.opening))
            await writer.drain()
            answer = await _receive(reader, wire.ANSWER, wire.BUSY)
            if not answer:
                raise WrongCode(f"the code that {peer} shows was used already")
            sealing = exchange.agree(answer[: wire.ELEMENT_BYTES])
            sealing.check(answer[wire.ELEMENT_BYTES :])
            newcomer = sealing.newcomer(me.key, me.name)
            writer.write(wire.encode(wire.PROOF, sealing.proof))
            writer.write(wire.encode(wire.SEALED, sealing.seal(newcomer)))
            await writer.drain()
        async with asyncio.timeout(CONFIRM_S):
            if not await confirm(sealing.words(newcomer.key), "", ""):
                raise LinkError("not joined: the other machine shows other words, or you said no")
            writer.write(wire.encode(wire.YES, sealing.yes))
            await writer.drain()
            given = sealing.open(await _receive(reader, wire.HANDOVER), wire.Handover)
            _check(given, newcomer.key)
            writer.write_eof()
            return given
    except WrongCode as error:
        raise WrongCode(
            f"{error}: what was typed here is not what {peer} shows, or another machine answered. "
            "A wrong code voids the shown one; run `potluck pair` there for another code"
        ) from None
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise LinkError(f"the connection with {peer} failed: {reason}; try again") from error


def _check(given: wire.Handover, key: bytes) -> None:
    """ProtocolError unless the list that the host sent admits this machine, by an admin's word."""
    try:
        roster = Admissions(given.founding, given.records).roster
    except SecurityError as error:
        raise ProtocolError(f"the other machine sent a list that is not genuine: {error}") from None
    entry = roster.entries.get(node_id_of_bytes(key))
    if entry is None or entry.role == "revoked" or not roster.is_admin(given.node):
        raise ProtocolError("the other machine sent a list that does not admit this one")


async def _first(*events: asyncio.Future[Any]) -> None:
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)


async def _receive(reader: asyncio.StreamReader, *kinds: int) -> bytes:
    try:
        prefix = await reader.readexactly(wire.PREFIX_BYTES)
        _, length = wire.decode_prefix(prefix, *kinds)
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise LinkError("the peer closed the connection before pairing was complete") from error
