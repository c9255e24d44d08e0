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
from collections.abc import AsyncIterator, Callable, Sequence

from potluck.background import start_task, stop, why
from potluck.cluster.discovery.advert import Hint, new_instance
from potluck.cluster.discovery.finder import Finder, running_finders
from potluck.cluster.discovery.presence import Presence
from potluck.cluster.trust.pairing import Code, Exchange, Sealing
from potluck.errors import LinkError, PotluckError, ProtocolError, WrongCode
from potluck.transport.acceptor import LIMITS, Acceptor, Caller, ListeningSocket, listening_socket
from potluck.transport.aio import end
from potluck.wire import pairing as wire

STEP_S = 5.0
"""Deadline of one run of the protocol, from the opening to the end, on either machine."""
MAX_GUESSES = 3
"""How many hosts a joining machine sends an opening: each may be an impostor with one guess."""

_MAX_CALLS = 32
_CONNECT_S = 3.0
_PATIENT_S = 0.25 * LIMITS.timeout_s


async def hand_over(
    code: Code,
    secret: wire.Handover,
    finders: Sequence[Finder],
    *,
    host: str = "",
    port: int = 0,
    expires_s: float = 300.0,
    on_waiting: Callable[[int], None] = lambda port: None,
) -> wire.Newcomer:
    """Wait for a machine that has ``code``, and send it ``secret``; the machine's description.

    ``host`` is an interface or address to wait on; ``on_waiting`` is called with the TCP port.
    WrongCode if a machine used a wrong code, or if no machine used ``code`` within ``expires_s``
    seconds; ConfigurationError if the port is in use or forbidden. LinkError if the connection
    ended before the machine confirmed the secret.
    """
    waiting = _Host(code, secret, listening_socket(host, port))
    presence = Presence(lambda: [code.advert_key], waiting.port, new_instance())
    try:
        async with running_finders(finders, presence, lambda hint: None):
            try:
                on_waiting(waiting.port)
                async with asyncio.timeout(expires_s):
                    return await waiting.outcome
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

    def __init__(self, code: Code, secret: wire.Handover, sock: ListeningSocket) -> None:
        self.port = sock.port
        self.outcome: asyncio.Future[wire.Newcomer] = asyncio.get_running_loop().create_future()
        self._sock = sock
        self._code = code
        self._secret = secret
        self._is_used = False
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
            if self._is_used:
                writer.write(wire.encode(wire.BUSY))
                await writer.drain()
                return
            exchange = Exchange(self._code, is_host=True)
            sealing = exchange.agree(opening)
            self._is_used = True
            caller.authenticated()
            writer.write(wire.encode(wire.ANSWER, exchange.opening + sealing.proof))
            await self._finish(sealing, reader, writer)
        finally:
            await end(writer)

    async def _finish(
        self, sealing: Sealing, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Exchange proofs and secrets with the client that has the guess."""
        is_proved = False
        try:
            async with asyncio.timeout(STEP_S):
                await writer.drain()
                sealing.check(await _receive(reader, wire.PROOF))
                is_proved = True
                newcomer = sealing.open(await _receive(reader, wire.SEALED), wire.Newcomer)
                writer.write(wire.encode(wire.SEALED, sealing.seal(self._secret)))
                await writer.drain()
                if await reader.read(1):  # the joining machine confirms by closing the connection
                    raise ProtocolError("a pairing message after the last one")
            self._settle(newcomer)
        except (PotluckError, OSError):
            if is_proved:
                self._settle(
                    LinkError(
                        "a machine had the right code, but its connection ended before it "
                        "confirmed the secret; if it has not joined, run `potluck pair` again"
                    )
                )
            else:
                self._settle(
                    WrongCode(
                        "a machine used a wrong code, or its connection ended before it proved "
                        "the code. The code is void now; run `potluck pair` for another code"
                    )
                )

    def _broke(self, error: BaseException) -> None:
        self._settle(LinkError(f"the pairing port failed ({why(error)}); run `potluck pair` again"))

    def _settle(self, outcome: wire.Newcomer | PotluckError) -> None:
        if self.outcome.done():
            return
        if isinstance(outcome, PotluckError):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


async def take_over(
    code: Code,
    me: wire.Newcomer,
    finders: Sequence[Finder],
    *,
    address: tuple[str, int] | None = None,
    timeout_s: float = 60.0,
) -> wire.Handover:
    """The secret of the host that shows ``code``, found by ``finders`` or at ``address``.

    Tries at most ``MAX_GUESSES`` hosts; WrongCode if none of them has this code. LinkError if no
    host was found within ``timeout_s`` seconds, or if the connection failed.
    """
    if address is not None:
        async with _connected(*address) as streams:
            return await _ask(streams, code, me)
    search = _Search(code, me)
    presence = Presence(lambda: [code.advert_key], 0, new_instance())
    try:
        async with running_finders(finders, presence, search.heard), asyncio.timeout(timeout_s):
            return await search.outcome
    except TimeoutError:
        reached = f" ({search.failure})" if search.failure else ""
        raise LinkError(
            f"no machine that shows this code was found in {timeout_s:g} s{reached}. Is `potluck "
            "pair` still waiting there, on the same network? If the network drops multicast, give "
            "its address, as `potluck pair` shows it: potluck join CODE --address HOST:PORT"
        ) from None
    finally:
        await search.close()


class _Search:
    """The search for the host: connects to all hosts found, and tries them one after the other,
    each host once."""

    def __init__(self, code: Code, me: wire.Newcomer) -> None:
        self.failure = ""
        self._code = code
        self._me = me
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
        try:
            self.outcome.set_result(await _ask(streams, self._code, self._me))
        except WrongCode as error:
            self.failure = str(error)
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


async def _ask(streams: Streams, code: Code, me: wire.Newcomer) -> wire.Handover:
    """One run of the protocol with one host. LinkError if the connection fails, WrongCode if the
    host has another code."""
    reader, writer = streams
    peer = "{}:{}".format(*writer.get_extra_info("peername")[:2])
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
            writer.write(wire.encode(wire.PROOF, sealing.proof))
            writer.write(wire.encode(wire.SEALED, sealing.seal(me)))
            await writer.drain()
            secret = sealing.open(await _receive(reader, wire.SEALED), wire.Handover)
            writer.write_eof()
            return secret
    except WrongCode as error:
        raise WrongCode(
            f"{error}: what was typed here is not what {peer} shows, or another machine answered. "
            "A wrong code voids the shown one; run `potluck pair` there for another code"
        ) from None
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise LinkError(f"the connection with {peer} failed: {reason}; try again") from error


async def _receive(reader: asyncio.StreamReader, *kinds: int) -> bytes:
    try:
        prefix = await reader.readexactly(wire.PREFIX_BYTES)
        _, length = wire.decode_prefix(prefix, *kinds)
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise LinkError("the peer closed the connection before pairing was complete") from error
