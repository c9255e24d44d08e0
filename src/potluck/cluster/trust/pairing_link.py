"""Pairing over the network: the host waits to be found, the joiner looks for it.

The port is open only while ``hand_over`` runs. A caller is unauthenticated, within
``transport.acceptor``'s limits, until it has sent a well-formed opening; junk costs it the
connection and nothing else. An opening is the one guess at the code: if it is wrong the code is
void. The caller that has the guess is no longer counted, so no crowd can end a pairing under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence

from potluck.background import start_task, stop, why
from potluck.cluster.discovery.advert import Hint, Presence, new_instance
from potluck.cluster.discovery.finder import Finder, running_finders
from potluck.cluster.trust.pairing import Code, Exchange, Sealing
from potluck.errors import LinkError, PotluckError, ProtocolError, WrongCode
from potluck.transport.acceptor import LIMITS, Acceptor, Caller, listening_socket
from potluck.transport.aio import end
from potluck.wire import pairing as wire

STEP_S = 5.0
"""How long each of the two is at work on one run, from the opening to the end."""
MAX_GUESSES = 3
"""How many hosts a joiner tells an opening: each might be an impostor, and gets one guess."""

_MAX_CALLS = 32
_CONNECT_S = 3.0
_PATIENT_S = 0.25 * LIMITS.timeout_s


async def hand_over(
    code: Code,
    secret: wire.Handover,
    finders: Sequence[Finder],
    *,
    port: int = 0,
    expires_s: float = 300.0,
    on_waiting: Callable[[int], None] = lambda port: None,
) -> wire.Newcomer:
    """Wait for one machine that knows ``code``, and give it ``secret``; who it was.

    ``on_waiting`` is called with the TCP port. WrongCode if a machine came with a wrong code, or
    none came within ``expires_s``; ConfigurationError if the port can't be had. LinkError if the
    machine left before it confirmed that it has the secret.
    """
    host = _Host(code, secret, listening_socket("", port))
    presence = Presence(lambda: [code.advert_key], host.port, new_instance())
    try:
        async with running_finders(finders, presence, lambda hint: None):
            try:
                on_waiting(host.port)
                async with asyncio.timeout(expires_s):
                    return await host.outcome
            finally:  # the code is void now: to close the finders takes a while
                await host.close()
    except TimeoutError:
        raise WrongCode(
            f"the code has expired: nobody used it within {expires_s:g} s; run `potluck pair` again"
        ) from None
    finally:
        await host.close()


class _Host:
    """The side that shows the code; ``outcome`` is the machine that knew it."""

    def __init__(self, code: Code, secret: wire.Handover, sock: socket.socket) -> None:
        self.port: int = sock.getsockname()[1]
        self.outcome: asyncio.Future[wire.Newcomer] = asyncio.get_running_loop().create_future()
        self._sock = sock
        self._code = code
        self._secret = secret
        self._is_used = False
        acceptor = Acceptor(sock, self._answer, LIMITS, awaits="a pairing opening")
        self._accepting = start_task(acceptor.run, name="pairing", on_broken=self._broke)

    async def close(self) -> None:
        await stop(self._accepting)
        self._sock.close()  # of a task that had not begun
        if self.outcome.done() and not self.outcome.cancelled():
            self.outcome.exception()  # seen, also if a timeout came first

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
        """Exchange proofs and secrets with the caller that has the guess."""
        is_proved = False
        try:
            async with asyncio.timeout(STEP_S):
                await writer.drain()
                sealing.check(await _receive(reader, wire.PROOF))
                is_proved = True
                newcomer = sealing.open(await _receive(reader, wire.SEALED), wire.Newcomer)
                writer.write(wire.encode(wire.SEALED, sealing.seal(self._secret)))
                await writer.drain()
                if await reader.read(1):  # the joiner ends the connection once it has it all
                    raise ProtocolError("something was said after the end")
            self._settle(newcomer)
        except (PotluckError, OSError):
            if is_proved:
                self._settle(
                    LinkError(
                        "a machine had the right code, but went away before it said that it has "
                        "the secret; run `potluck pair` again if it is not in"
                    )
                )
            else:
                self._settle(
                    WrongCode(
                        "somebody tried to join with a wrong code, or went away in the middle. "
                        "The code is void now; run `potluck pair` for another one"
                    )
                )

    def _broke(self, error: BaseException) -> None:
        self._settle(LinkError(f"the port for pairing broke ({why(error)}); run it again"))

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
    """The secret of the machine that shows ``code``, found by ``finders`` or at ``address``.

    WrongCode if no machine that was asked has this code (at most ``MAX_GUESSES`` are asked).
    LinkError if none was found in time.
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
    """Connects to all that is found, and asks one after the other, each host once."""

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
                    # Others were asked meanwhile, and this host has dropped who said nothing.
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
        why = str(error) or "no answer in time"
        raise LinkError(f"{host}:{port} can't be reached: {why}") from error
    try:
        yield reader, writer
    finally:
        await end(writer)


async def _ask(streams: Streams, code: Code, me: wire.Newcomer) -> wire.Handover:
    """One run with one host. LinkError if it goes away, WrongCode if it has another code."""
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
            "A wrong code is void at once; run `potluck pair` there for another one"
        ) from None
    except (OSError, TimeoutError) as error:
        why = str(error) or "no answer in time"
        raise LinkError(f"{peer} went away: {why}") from error


async def _receive(reader: asyncio.StreamReader, *kinds: int) -> bytes:
    try:
        prefix = await reader.readexactly(wire.PREFIX_BYTES)
        _, length = wire.decode_prefix(prefix, *kinds)
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise LinkError("the other side ended the connection") from error
