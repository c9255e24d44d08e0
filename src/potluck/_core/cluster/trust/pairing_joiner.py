"""The joining machine of a pairing: ``take_over`` finds the host, and enters its cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.background import stop
from potluck._core.cluster.discovery.advert import Advert, Hint, is_genuine, new_instance
from potluck._core.cluster.discovery.finder import Finder, Presence, running_finders
from potluck._core.cluster.trust.admissions import Admissions
from potluck._core.cluster.trust.pairing import (
    CONFIRM_S,
    STEP_S,
    Code,
    Confirm,
    Exchange,
    Sealing,
    agreed,
    first,
    plate_of,
    receive,
)
from potluck._core.transport.aio import end
from potluck._core.transport.credentials import node_id_of_bytes
from potluck._core.transport.listener import LIMITS
from potluck._core.wire import pairing as wire
from potluck.errors import LinkError, PotluckError, ProtocolError, SecurityError, WrongCode

MAX_GUESSES = 3
"""How many hosts a joining machine sends an opening: each may be an impostor with one guess."""

OTHERS_S = 2.0
"""How long other hosts are looked for after a wrong guess: the one that answered voids its code, if
it is no impostor."""
OTHER_CODES_S = 10.0
"""How long the host is looked for after one with other public digits was heard: nearly always the
code was mistyped."""
_MAX_CALLS = 32
_MAX_STRANGERS = 32
_CONNECT_S = 3.0
_PATIENT_S = 0.25 * LIMITS.timeout_s


async def take_over(
    code: Code,
    me: Me,
    finders: Sequence[Finder],
    confirm: Confirm,
    *,
    address: tuple[str, int] | None = None,
    timeout_s: float = 60.0,
    on_wrong: Callable[[str], None] = lambda text: None,
) -> wire.Handover:
    """What the host that shows ``code`` gives to this machine, once both people said yes.

    The host is found by ``finders``, or is at ``address``. ``on_wrong`` is told at once that a host
    has another code, while others are looked for, ``OTHERS_S`` longer, or ``OTHER_CODES_S`` if it
    was heard that its public digits differ. Tries at most ``MAX_GUESSES`` hosts; WrongCode if none
    of them has this code, or if the person said no.
    LinkError if no host was found within ``timeout_s`` seconds, or if the connection failed.
    """
    if address is not None:
        async with _connected(*address) as streams:
            return await _ask(streams, code, me, confirm)
    search = _Search(code, me, confirm, on_wrong)
    presence = _Seeker(lambda: [code.advert_key], 0, new_instance(), on_other=search.other_plate)
    try:
        async with running_finders(finders, presence, search.heard):
            if search.wrong is not None:  # heard while the finders started
                timeout_s = min(timeout_s, OTHER_CODES_S)
            async with asyncio.timeout(timeout_s) as search.deadline:
                await first(search.found, search.outcome)
            return await search.outcome
    except TimeoutError:
        if search.wrong is not None:
            raise search.wrong from None
        reached = f" ({search.failure})" if search.failure else ""
        raise LinkError(
            f"no machine that shows this code was found in {timeout_s:g} s{reached}. Was it typed "
            "as it is shown, and is `potluck pair` still waiting there, on the same network? If "
            "the network drops multicast, give its address, as `potluck pair` shows it: potluck "
            "join --address HOST:PORT"
        ) from None
    finally:
        await search.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seeker(Presence):
    """Recognises the host, and calls ``on_other(plate)`` for one with other public digits."""

    on_other: Callable[[str], None]
    _strangers: set[bytes] = field(default_factory=set)

    def recognises(self, advert: Advert) -> bool:
        if Presence.recognises(self, advert):
            return True
        known = self._strangers
        if advert.instance not in known and len(known) < _MAX_STRANGERS:
            known.add(advert.instance)
            if plate := plate_of(partial(is_genuine, advert)):
                self.on_other(plate)
        return False


class _Search:
    """The search for the host: connects to all hosts found, and tries them one after the other,
    each host once."""

    def __init__(
        self, code: Code, me: Me, confirm: Confirm, on_wrong: Callable[[str], None]
    ) -> None:
        self.failure = ""
        self.wrong: WrongCode | None = None
        """What the last host with another code led to."""
        self.found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A host with this code was found; the people are asked."""
        self.deadline: asyncio.Timeout | None = None
        self._code = code
        self._me = me
        self._confirm = confirm
        self._on_wrong = on_wrong
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

    def other_plate(self, plate: str) -> None:
        """A host on this network shows a code with other public digits."""
        if self.wrong is None and not self.found.done():
            typed = self._code.plate
            self.wrong = WrongCode(
                f"a machine on this network shows a code that begins with {plate}, and the code "
                f"that was typed begins with {typed}: type it as it is shown there"
            )
            self._on_wrong(str(self.wrong))
            self._look_on_for_a_moment(OTHER_CODES_S)

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
                self.wrong = error
                if len(self._wrong) >= MAX_GUESSES:
                    self.outcome.set_exception(error)
                else:
                    self._on_wrong(str(error))
                    self._look_on_for_a_moment()

    def _look_on_for_a_moment(self, seconds: float = OTHERS_S) -> None:
        limit = self.deadline
        if limit is not None and not limit.expired() and not self.found.done():
            soon = asyncio.get_running_loop().time() + seconds
            limit.reschedule(min(soon, limit.when() or soon))


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
            answer = await receive(reader, wire.ANSWER, wire.BUSY)
            if not answer:
                raise LinkError(
                    f"the code that {peer} shows is being used by another machine, and is good for "
                    "one: run `potluck pair` there again for this machine"
                )
            sealing = exchange.agree(answer[: wire.ELEMENT_BYTES])
            sealing.check(answer[wire.ELEMENT_BYTES :])
            newcomer = sealing.newcomer(me.key, me.name)
            writer.write(wire.encode(wire.PROOF, sealing.proof))
            writer.write(wire.encode(wire.SEALED, sealing.seal(newcomer)))
            await writer.drain()
    except WrongCode as error:
        raise WrongCode(
            f"{error}: what was typed here is not what {peer} shows, or another machine answered. "
            "A wrong code voids the shown one; run `potluck pair` there for another code"
        ) from None
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise LinkError(f"the connection with {peer} failed: {reason}; try again") from error
    return await _agree(streams, sealing, newcomer, confirm)


async def _agree(
    streams: Streams, sealing: Sealing, newcomer: wire.Newcomer, confirm: Confirm
) -> wire.Handover:
    """What the host gives once both persons have said yes. LinkError if they do not."""
    reader, writer = streams
    again = "Run `potluck pair` on the other machine for another code"
    try:
        async with asyncio.timeout(CONFIRM_S):
            given = await agreed(
                confirm(sealing.words(newcomer.key), "", ""),
                receive(reader, wire.HANDOVER),
                lambda: writer.write(wire.encode(wire.YES, sealing.yes)),
            )
    except TimeoutError:
        reason = f"there was no yes on both machines within {CONFIRM_S:g} s"
        raise LinkError(f"not joined: {reason}. {again}") from None
    except LinkError as error:
        raise LinkError(
            "not joined: the other machine ended the pairing (its person said no, or `potluck "
            f"pair` was interrupted), or the connection was lost. {again}"
        ) from error
    if given is None:
        raise LinkError("not joined: the other machine shows other words, or you said no")
    handover = sealing.open(given, wire.Handover)
    _check(handover, newcomer.key)
    writer.write_eof()
    return handover


def _check(given: wire.Handover, key: bytes) -> None:
    """ProtocolError unless the list that the host sent admits this machine, by an admin's word."""
    try:
        roster = Admissions(given.founding, given.records).roster
    except SecurityError as error:
        raise ProtocolError(f"the other machine sent a list that is not genuine: {error}") from None
    entry = roster.entries.get(node_id_of_bytes(key))
    if entry is None or entry.role == "revoked" or not roster.is_admin(given.node):
        raise ProtocolError("the other machine sent a list that does not admit this one")
