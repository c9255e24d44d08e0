"""The host of a pairing: ``hand_over`` waits for a machine that has the code, and has it admitted.

The port is open only while ``hand_over`` runs. A client is unauthenticated, within
``transport.listener``'s limits, until it has sent a well-formed opening; a client that sends
anything else is disconnected without effect on the code. The first opening is the only guess of the
code: a wrong guess voids the code. The client with the guess counts as authenticated, so that
further connections can't displace it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from potluck._core.background import start_task, stop, why
from potluck._core.cluster.discovery.advert import new_instance
from potluck._core.cluster.discovery.finder import Finder, Presence, running_finders
from potluck._core.cluster.trust.pairing import (
    CONFIRM_S,
    STEP_S,
    Code,
    Confirm,
    Exchange,
    Sealing,
    agreed,
    first,
    receive,
)
from potluck._core.transport.aio import end
from potluck._core.transport.credentials import node_id_of_bytes
from potluck._core.transport.listener import (
    LIMITS,
    Acceptor,
    Caller,
    ListeningSocket,
    listening_socket,
)
from potluck._core.wire import pairing as wire
from potluck.errors import LinkError, PotluckError, ProtocolError, WrongCode

T = TypeVar("T")


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
                    await first(waiting.begun, waiting.outcome)
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


@dataclass(eq=False, repr=False)
class _Host:
    """The host of a pairing; ``outcome`` is the machine that has proved the code."""

    code: Code
    admit: Callable[[wire.Newcomer], Awaitable[wire.Handover]]
    confirm: Confirm
    sock: ListeningSocket

    def __post_init__(self) -> None:
        self.port = self.sock.port
        self.outcome: asyncio.Future[wire.Newcomer] = asyncio.get_running_loop().create_future()
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A machine has proved the code."""
        self.is_used = False
        acceptor = Acceptor(self.sock, self._answer, LIMITS, awaits="a pairing opening")
        self._accepting = start_task(acceptor.run, name="pairing", on_broken=self._broke)

    async def close(self) -> None:
        await stop(self._accepting)
        self.sock.close()  # the task closes it, unless it was cancelled before it began
        if self.outcome.done() and not self.outcome.cancelled():
            self.outcome.exception()  # so that asyncio does not report an unretrieved exception

    async def _answer(self, caller: Caller) -> None:
        reader, writer = await asyncio.open_connection(sock=caller.sock)
        try:
            opening = await receive(reader, wire.OPENING)
            if self.is_used:
                writer.write(wire.encode(wire.BUSY))
                await writer.drain()
                return
            exchange = Exchange(self.code, is_host=True)
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
        """Exchange proofs with the client that has the guess; if both persons agree, admit it."""
        reached = _NOTHING
        try:
            async with asyncio.timeout(STEP_S):
                await writer.drain()
                sealing.check(await receive(reader, wire.PROOF))
                reached = _PROVED
                newcomer = sealing.open(await receive(reader, wire.SEALED), wire.Newcomer)
                sealing.check_newcomer(newcomer)
            self.begun.set_result(None)
            node = node_id_of_bytes(newcomer.key)
            words = sealing.words(newcomer.key)
            async with asyncio.timeout(CONFIRM_S):
                question = self._own(self.confirm(words, newcomer.name, node))
                said = await agreed(question, receive(reader, wire.YES))
            if said is None:
                self._settle(WrongCode("not admitted: the code is void now"))
                return
            sealing.check_yes(said)
            if reader.at_eof():
                raise LinkError("the joining machine left after its yes")
            handover = await self._own(self.admit(newcomer))
            reached = _ADMITTED
            async with asyncio.timeout(CONFIRM_S):
                writer.write(wire.encode(wire.HANDOVER, sealing.seal(handover)))
                await writer.drain()
                if await reader.read(1):  # the joining machine confirms by closing the connection
                    raise ProtocolError("a pairing message after the last one")
            self._settle(newcomer)
        except (PotluckError, OSError) as error:
            self._settle(_unfinished(error, reached))
        except Exception as error:  # else the command would wait for ever
            self._settle(error)
            raise

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


_NOTHING, _PROVED, _ADMITTED = range(3)
"""How far the client with the guess has come."""


def _unfinished(error: PotluckError | OSError, reached: int) -> PotluckError:
    """Why the pairing with the client that has the guess was not finished, and what to do."""
    if reached == _NOTHING:
        return WrongCode(
            "a machine used a wrong code, or its connection ended before it proved the code. The "
            "code is void now; run `potluck pair` for another code"
        )
    if reached == _ADMITTED:
        return LinkError(
            "the machine is admitted (`potluck nodes`), but its connection ended before it said "
            "that it has the secret. If it does not take part, run `potluck pair` again"
        )
    reason = "it left before both said yes (its person said no, or the connection was lost)"
    if isinstance(error, TimeoutError):
        reason = f"there was no yes on both machines within {CONFIRM_S:g} s"
    elif isinstance(error, ProtocolError):
        reason = str(error)
    return LinkError(
        f"a machine had the right code, but {reason}. It is not admitted, and the code is void; "
        "run `potluck pair` for another code"
    )
