"""Pairing: who gets the secret, who does not, and what can be seen on the way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.discovery.finder import Finder, OnHint, Presence
from potluck._core.cluster.trust import pairing_host, pairing_joiner
from potluck._core.cluster.trust.admissions import sign
from potluck._core.cluster.trust.pairing import (
    Code,
    Confirm,
    Exchange,
    Sealing,
    new_code,
    parse_code,
)
from potluck._core.cluster.trust.pairing_host import hand_over
from potluck._core.cluster.trust.pairing_joiner import MAX_GUESSES, Me, take_over
from potluck._core.transport.credentials import node_id_of_bytes
from potluck._core.transport.listener import LIMITS, Limits
from potluck._core.wire import pairing as wire
from potluck._core.wire.admissions import Admission, Founding
from potluck.errors import (
    ConfigurationError,
    IdentityError,
    LinkError,
    PotluckError,
    ProtocolError,
    WrongCode,
)

CODE = Code("274831927")
WRONG = Code("274831928")
PSK = b"the cluster's 256-bit secret, no"
HOST_KEY = Ed25519PrivateKey.from_private_bytes(b"h" * 32)
MY_KEY = Ed25519PrivateKey.from_private_bytes(b"j" * 32)
ME = Me(MY_KEY, "laptop")
MY_PUBLIC = MY_KEY.public_key().public_bytes_raw()
FOUNDING = Founding(HOST_KEY.public_key().public_bytes_raw(), bytes(16))
ADMISSION = sign(
    Admission(
        cluster=FOUNDING.cluster,
        number=1,
        signer=FOUNDING.key,
        at=1,
        key=MY_PUBLIC,
        verdict="member",
    ),
    HOST_KEY,
)
HOST = node_id_of_bytes(FOUNDING.key)
SECRET = wire.Handover(PSK, HOST, "attic", FOUNDING, (ADMISSION,))


async def yes(words: str, name: str, node: str) -> bool:
    return True


async def no(words: str, name: str, node: str) -> bool:
    return False


async def admit(newcomer: wire.Newcomer) -> wire.Handover:
    return SECRET


class Told:
    """A Finder that is told what to find."""

    name = "told"

    def __init__(self, *hints: Hint) -> None:
        self.hints = hints
        self.presence: Presence | None = None

    async def start(self, presence: Presence, on_hint: OnHint) -> None:
        self.presence = presence
        for hint in self.hints:
            on_hint(hint)

    async def close(self) -> None:
        return None


class Lingering(Told):
    """A Finder that is not closed before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closing, self.may_end = asyncio.Event(), asyncio.Event()

    async def close(self) -> None:
        self.is_closing.set()
        await self.may_end.wait()


class Waiting:
    """A host that waits with a code in a task."""

    def __init__(
        self,
        code: Code = CODE,
        expires_s: float = 30.0,
        finder: Finder | None = None,
        confirm: Confirm = yes,
        admit: Callable[[wire.Newcomer], Awaitable[wire.Handover]] = admit,
    ) -> None:
        finders = [] if finder is None else [finder]
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            hand_over(
                code, admit, finders, confirm, expires_s=expires_s, on_waiting=self._port.set_result
            )
        )

    async def address(self) -> tuple[str, int]:
        return "127.0.0.1", await self._port


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(bounded())


def test_the_right_code_hands_the_secret_over_and_tells_each_who_the_other_is() -> None:
    async def story() -> None:
        host = Waiting()
        assert await take_over(CODE, ME, [], yes, address=await host.address()) == SECRET
        assert (await host.task).key == MY_PUBLIC

    run(story)


def test_a_wrong_code_gets_nothing_and_ends_the_run() -> None:
    async def story() -> None:
        host = Waiting()
        address = await host.address()
        with pytest.raises(WrongCode, match="voids the shown one"):
            await take_over(WRONG, ME, [], yes, address=address)
        with pytest.raises(WrongCode, match="The code is void now"):
            await host.task
        with pytest.raises(LinkError):
            await take_over(CODE, ME, [], yes, address=address)

    run(story)


def test_a_code_expires() -> None:
    async def story() -> None:
        with pytest.raises(WrongCode, match="expired"):
            await Waiting(expires_s=0.05).task

    run(story)


@pytest.mark.parametrize("how", ["expired", "given up"])
def test_a_code_that_is_void_gives_nothing_away_while_the_finders_are_closed(how: str) -> None:
    async def story() -> None:
        finder = Lingering()
        host = Waiting(expires_s=0.05 if how == "expired" else 30.0, finder=finder)
        address = await host.address()
        if how == "given up":
            host.task.cancel()
        await finder.is_closing.wait()
        with pytest.raises(LinkError):
            await take_over(CODE, ME, [], yes, address=address)
        finder.may_end.set()
        with pytest.raises(WrongCode if how == "expired" else asyncio.CancelledError):
            await host.task

    run(story)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"plpr\x02\x04\xff\xff\0\0" + bytes(100),
        b"plpr\x09\x01\x21\0\0\0" + bytes(33),
        b"plpr\x02\x01\x21\0\0\0" + b"A" + b"\xff" * 32,
        b"plpr\x02\x01\x21\0\0\0" + b"B" + b"\xff" * 32,
    ],
)
def test_junk_is_no_guess(junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever only scans the port does not end the run."""

    async def story() -> None:
        host = Waiting()
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*await host.address())
            with contextlib.suppress(ConnectionError):
                writer.write(junk)
                writer.write_eof()
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert await take_over(CODE, ME, [], yes, address=await host.address()) == SECRET
        await host.task

    began = time.monotonic()
    run(story)
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) <= 1 + (time.monotonic() - began), "one a second"


def test_a_crowd_of_silent_callers_does_not_keep_the_joiner_out() -> None:
    async def story() -> None:
        host = Waiting()
        crowd = [await asyncio.open_connection(*await host.address()) for _ in range(100)]
        assert await take_over(CODE, ME, [], yes, address=await host.address()) == SECRET
        await host.task
        for _, writer in crowd:
            writer.transport.abort()

    run(story)


async def dial(
    host: tuple[str, int], source: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection from another address of this machine."""
    return await asyncio.open_connection(*host, local_addr=(source, 0))


async def ends(reader: asyncio.StreamReader) -> bool:
    """Wait until the other side has ended it without a word."""
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            return await reader.read(1) == b""
    return True


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes was pushed out: no deadline passes, however busy this machine is."""
    monkeypatch.setattr(pairing_host, "LIMITS", Limits(timeout_s=60.0))
    for module in (pairing_host, pairing_joiner):
        monkeypatch.setattr(module, "STEP_S", 60.0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_no_crowd_ends_a_pairing_under_way(patient: None) -> None:
    """The joiner has its answer and takes its time; 150 callers from three addresses come."""

    async def story() -> None:
        host = Waiting()
        address = await host.address()
        reader, writer = await dial(address, "127.0.0.9")
        exchange = Exchange(CODE, is_host=False)
        writer.write(wire.encode(wire.OPENING, exchange.opening))
        prefix = await reader.readexactly(wire.PREFIX_BYTES)
        _, length = wire.decode_prefix(prefix, wire.ANSWER)
        answer = await reader.readexactly(length)
        crowd = [await dial(address, f"127.0.0.{9 + n % 3}") for n in range(150)]
        # So many are kept; all before them were dropped, which shows that the host has seen all.
        for stranger, _ in crowd[: -LIMITS.max_connections]:
            assert await ends(stranger)
        sealing = exchange.agree(answer[: wire.ELEMENT_BYTES])
        sealing.check(answer[wire.ELEMENT_BYTES :])
        writer.write(wire.encode(wire.PROOF, sealing.proof))
        writer.write(wire.encode(wire.SEALED, sealing.seal(sealing.newcomer(MY_KEY, "laptop"))))
        writer.write(wire.encode(wire.YES, sealing.yes))
        prefix = await reader.readexactly(wire.PREFIX_BYTES)
        _, length = wire.decode_prefix(prefix, wire.HANDOVER)
        assert sealing.open(await reader.readexactly(length), wire.Handover) == SECRET
        writer.write_eof()
        assert (await host.task).key == MY_PUBLIC
        for _, other in (*crowd, (reader, writer)):
            other.transport.abort()

    run(story)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_a_machine_that_calls_over_and_over_pushes_out_only_itself(patient: None) -> None:
    """The joiner is slower to say its opening than 150 callers from elsewhere are to come."""

    async def story() -> None:
        host = Waiting()
        address = await host.address()
        reader, writer = await dial(address, "127.0.0.9")
        crowd = [await dial(address, "127.0.0.10") for _ in range(150)]
        for stranger, _ in crowd[: -LIMITS.max_connections]:
            assert await ends(stranger)
        assert await pairing_joiner._ask((reader, writer), CODE, ME, yes) == SECRET
        assert (await host.task).key == MY_PUBLIC
        for _, other in (*crowd, (reader, writer)):
            other.transport.abort()

    run(story)


def test_who_says_nothing_is_dropped_and_costs_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_host, "LIMITS", Limits(timeout_s=1.5))

    async def story() -> None:
        host = Waiting()
        reader, writer = await asyncio.open_connection(*await host.address())
        assert await ends(reader)
        writer.transport.abort()
        monkeypatch.undo()
        assert await take_over(CODE, ME, [], yes, address=await host.address()) == SECRET
        await host.task

    run(story)


def test_a_joiner_that_asked_others_first_calls_again_where_it_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host drops who says nothing, and it had nothing to say while it asked the first one."""
    monkeypatch.setattr(pairing_joiner, "_PATIENT_S", -1.0)

    async def story() -> None:
        host = Waiting()
        hint = Hint(*(await host.address()), "told", "ee" * 16)
        assert await take_over(CODE, ME, [Told(hint)], yes) == SECRET
        await host.task

    run(story)


async def relay(
    host: tuple[str, int], change: Callable[[bytes], bytes], seen: list[bytes]
) -> tuple[asyncio.Server, tuple[str, int]]:
    """A man in the middle who reads everything and may change it."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                seen.append(data)
                writer.write(change(data))
                await writer.drain()
            writer.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*host)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        for each in (writer, far_writer):
            each.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[:2]


def test_who_listens_on_the_wire_sees_neither_code_nor_secret_nor_names() -> None:
    async def story() -> None:
        host, seen = Waiting(), []
        server, address = await relay(await host.address(), lambda data: data, seen)
        async with server:
            assert await take_over(CODE, ME, [], yes, address=address) == SECRET
            await host.task
        wire_bytes = b"".join(seen)
        assert len(wire_bytes) > 200
        for secret in (PSK, PSK[:8], CODE.digits[:6].encode(), b"attic", b"laptop", b"a1a1"):
            assert secret not in wire_bytes

    run(story)


@pytest.mark.parametrize("at", [8, 20, 41, 70])
def test_a_man_in_the_middle_who_changes_a_byte_gets_nothing_and_both_notice(at: int) -> None:
    async def story() -> None:
        host, seen = Waiting(), []

        def flip(data: bytes) -> bytes:
            at_here = min(at, len(data) - 1)
            return data[:at_here] + bytes([data[at_here] ^ 1]) + data[at_here + 1 :]

        server, address = await relay(await host.address(), flip, seen)
        async with server:
            with pytest.raises(PotluckError):
                await take_over(CODE, ME, [], yes, address=address)
            host.task.cancel()
            with pytest.raises((PotluckError, asyncio.CancelledError)):
                await host.task
        assert PSK not in b"".join(seen)

    run(story)


def test_a_man_in_the_middle_who_plays_both_sides_without_the_code_gets_neither() -> None:
    """He runs SPAKE2 with each of them under a guess of his own: one guess for one run."""

    async def story() -> None:
        host = Waiting()
        got: list[object] = []

        async def play_host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opening = (await reader.readexactly(wire.PREFIX_BYTES + 33))[wire.PREFIX_BYTES :]
            exchange = Exchange(WRONG, is_host=True)
            sealing = exchange.agree(opening)
            writer.write(wire.encode(wire.ANSWER, exchange.opening + sealing.proof))
            got.append(await reader.read())
            writer.transport.abort()

        server = await asyncio.start_server(play_host, "127.0.0.1", 0)
        async with server:
            with pytest.raises(WrongCode):
                await take_over(CODE, ME, [], yes, address=server.sockets[0].getsockname()[:2])
            with pytest.raises(WrongCode):
                await take_over(WRONG, ME, [], yes, address=await host.address())
            with pytest.raises(WrongCode):
                await host.task
        assert got == [b""], "not even the proof was shown to him"

    run(story)


def test_the_host_is_found_by_the_public_part_of_the_code() -> None:
    async def story() -> None:
        told = Told()
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            hand_over(CODE, admit, [told], yes, expires_s=30, on_waiting=port.set_result)
        )
        number = await port
        assert told.presence is not None
        seeker = Presence(lambda: [WRONG.advert_key], 0, b"s" * 16)
        stranger = Presence(lambda: [Code("111831927").advert_key], 0, b"s" * 16)
        assert seeker.recognises(told.presence.advert())
        assert not stranger.recognises(told.presence.advert())
        nowhere = Hint("127.0.0.1", 1, "told", "ff" * 16)
        found = Told(nowhere, Hint("127.0.0.1", number, "told", "ee" * 16))
        assert await take_over(CODE, ME, [found], yes) == SECRET
        await task

    run(story)


def test_a_joiner_asks_no_more_impostors_than_it_has_said() -> None:
    async def story() -> None:
        hosts = [Waiting(WRONG) for _ in range(MAX_GUESSES + 2)]
        hints = [
            Hint(*(await host.address()), "told", f"{number:032x}")
            for number, host in enumerate(hosts)
        ]
        with pytest.raises(WrongCode):
            await take_over(CODE, ME, [Told(*hints)], yes)
        asked: set[asyncio.Task[wire.Newcomer]] = set()
        waiting = {host.task for host in hosts}
        while len(asked) < MAX_GUESSES:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            asked |= ended
        ended, waiting = await asyncio.wait(waiting, timeout=0.05)
        assert len(asked | ended) == MAX_GUESSES
        for task in waiting:
            task.cancel()
        await asyncio.gather(*asked, *waiting, return_exceptions=True)

    run(story)


def test_a_wrong_code_is_said_at_once_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes on: the machine that answered may be an impostor."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        host, said = Waiting(WRONG), asyncio.Event()
        hint = Hint(*(await host.address()), "told", "ee" * 16)
        told: list[str] = []

        def wrong(text: str) -> None:
            told.append(text)
            said.set()

        search = asyncio.create_task(
            take_over(CODE, ME, [Told(hint)], yes, timeout_s=30, on_wrong=wrong)
        )
        await said.wait()
        assert not search.done()
        assert "the code is wrong" in told[0]
        with pytest.raises(WrongCode):
            await host.task
        began = loop.time()
        monkeypatch.setattr(loop, "time", lambda: began + 31)
        with pytest.raises(WrongCode, match="run `potluck pair` there for another code"):
            await search
        monkeypatch.undo()

    run(story)


def test_the_search_ends_soon_after_a_wrong_code() -> None:
    """The machine that shows the code voids it, so nothing is left to be found."""

    async def story() -> None:
        host = Waiting(WRONG)
        hint = Hint(*(await host.address()), "told", "ee" * 16)
        async with asyncio.timeout(20):
            with pytest.raises(WrongCode, match="run `potluck pair` there for another code"):
                await take_over(CODE, ME, [Told(hint)], yes, timeout_s=3600)
            with pytest.raises(WrongCode):
                await host.task

    run(story)


def test_a_code_whose_public_digits_are_wrong_is_said_at_once_and_ends_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen: a minute of silence, then a doubt about the network."""

    class Hears(Told):
        async def start(self, presence: Presence, on_hint: OnHint) -> None:
            shown = Presence(lambda: [Code("111831927").advert_key], 1, b"h" * 16)
            cluster = Presence(lambda: [b"k" * 32], 1, b"c" * 16)
            for each in (cluster, shown, shown):
                assert not presence.recognises(each.advert())

    async def story() -> None:
        monkeypatch.setattr(pairing_joiner, "OTHER_CODES_S", 0.1)
        told: list[str] = []
        async with asyncio.timeout(20):
            with pytest.raises(WrongCode, match="begins with 111, and the code that was typed beg"):
                await take_over(CODE, ME, [Hears()], yes, timeout_s=3600, on_wrong=told.append)
        assert len(told) == 1

    run(story)


def test_nobody_there_is_said_with_what_to_try_next() -> None:
    async def story() -> None:
        with pytest.raises(LinkError, match="--address"):
            await take_over(CODE, ME, [Told()], yes, timeout_s=0.05)
        with pytest.raises(LinkError, match="can't be reached"):
            await take_over(CODE, ME, [], yes, address=("127.0.0.1", 1))

    run(story)


@pytest.mark.parametrize(
    "text", ["274-831-927", "274831927", " 274 831 927 ", "274\u2013831\u2013927"]
)
def test_a_code_is_read_as_people_type_it(text: str) -> None:
    assert parse_code(text) == CODE
    assert parse_code(text).spoken() == "274-831-927"


@pytest.mark.parametrize("text", ["", "555-831-92", "555-831-9277", "two74831927", "٢٧٤٨٣١٩٢٧"])
def test_what_cannot_be_a_code_is_not_quoted_back(text: str) -> None:
    with pytest.raises(ConfigurationError, match="9 digits") as caught:
        parse_code(text)
    assert not text or text not in str(caught.value)


def test_a_code_is_never_printed_and_no_two_are_alike() -> None:
    codes = {new_code().spoken() for _ in range(200)}
    assert len(codes) > 190
    for shown in (repr(CODE), str(CODE), f"{CODE}", repr(SECRET)):
        assert "831" not in shown
        assert "927" not in shown
        assert "secret" not in shown


def test_an_element_of_any_bytes_is_refused_or_leads_to_another_key(seed: int) -> None:
    rng = random.Random(seed)
    right = Exchange(CODE, is_host=True)
    for kind in (b"A", b"B", b"S", b""):
        for _ in range(10):
            data = kind + rng.randbytes(33 - len(kind))
            with contextlib.suppress(ProtocolError):
                sealing = Exchange(CODE, is_host=True).agree(data)
                assert sealing.proof != right.agree(Exchange(CODE, is_host=False).opening).proof
                right = Exchange(CODE, is_host=True)


def test_messages_of_any_bytes_are_refused_without_being_decoded(seed: int) -> None:
    rng = random.Random(seed)
    kinds = (wire.OPENING, wire.ANSWER, wire.PROOF, wire.SEALED, wire.BUSY)
    good = wire.encode(wire.OPENING, bytes(33))[: wire.PREFIX_BYTES]
    assert wire.decode_prefix(good, wire.OPENING) == (wire.OPENING, 33)
    with pytest.raises(ProtocolError, match="out of turn"):
        wire.decode_prefix(good, wire.PROOF)
    for _ in range(2000):
        prefix = b"plpr\x01" + rng.randbytes(3)
        try:
            _, length = wire.decode_prefix(prefix, *kinds)
        except ProtocolError:
            continue
        assert length <= wire.MAX_SEALED
    with pytest.raises(ProtocolError, match="can't have"):
        wire.encode(wire.SEALED, bytes(wire.MAX_SEALED + 1))
    sealing = Exchange(CODE, is_host=True).agree(Exchange(CODE, is_host=False).opening)
    for data in (b"", bytes(16), rng.randbytes(100)):
        with pytest.raises(ProtocolError, match="changed on the way"):
            sealing.open(data, wire.Newcomer)


def test_both_screens_show_the_same_words_and_the_host_knows_whom_it_admits() -> None:
    async def story() -> None:
        shown: dict[str, tuple[str, str, str]] = {}

        async def on_host(*said: str) -> bool:
            shown["host"] = said  # type: ignore[assignment]
            return True

        async def on_joiner(*said: str) -> bool:
            shown["joiner"] = said  # type: ignore[assignment]
            return True

        host = Waiting(confirm=on_host)
        await take_over(CODE, ME, [], on_joiner, address=await host.address())
        await host.task
        words, name, node = shown["host"]
        assert shown["joiner"][0] == words
        assert len(words.split()) == 3
        assert (name, node) == ("laptop", node_id_of_bytes(MY_PUBLIC))

    run(story)


def test_without_both_yeses_nobody_is_admitted_and_no_secret_is_sent() -> None:
    async def story(host_says: Confirm, joiner_says: Confirm) -> None:
        admitted: list[wire.Newcomer] = []

        async def admit(newcomer: wire.Newcomer) -> wire.Handover:
            admitted.append(newcomer)
            return SECRET

        host = Waiting(confirm=host_says, admit=admit)
        with pytest.raises(LinkError, match="not joined"):
            await take_over(CODE, ME, [], joiner_says, address=await host.address())
        with pytest.raises((WrongCode, LinkError)):
            await host.task
        assert admitted == []

    run(lambda: story(no, yes))
    run(lambda: story(yes, no))


class Thinking:
    """A person who is asked, and does not answer before ``answer`` is set."""

    def __init__(self) -> None:
        self.is_asked, self.was_freed, self.answer = asyncio.Event(), False, asyncio.Event()

    async def confirm(self, words: str, name: str, node: str) -> bool:
        self.is_asked.set()
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            self.was_freed = True
            raise
        return True


async def nobody(newcomer: wire.Newcomer) -> wire.Handover:
    raise AssertionError("nobody is to be admitted")


def test_when_one_machine_leaves_the_person_at_the_other_is_not_asked_any_longer() -> None:
    async def joiner_leaves() -> None:
        person = Thinking()
        host = Waiting(confirm=person.confirm, admit=nobody)
        joining = asyncio.create_task(
            take_over(CODE, ME, [], Thinking().confirm, address=await host.address())
        )
        await person.is_asked.wait()
        joining.cancel()
        with pytest.raises(LinkError, match=r"left before both said yes .* It is not admitted"):
            await host.task
        assert person.was_freed

    async def host_leaves() -> None:
        person = Thinking()
        host = Waiting(admit=nobody)
        joining = asyncio.create_task(
            take_over(CODE, ME, [], person.confirm, address=await host.address())
        )
        await person.is_asked.wait()
        host.task.cancel()
        with pytest.raises(LinkError, match="not joined: the other machine ended the pairing"):
            await joining
        assert person.was_freed

    run(joiner_leaves)
    run(host_leaves)


async def answered(
    host: Waiting,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Sealing]:
    """A joiner that has the code and the host's answer, and has proved nothing yet."""
    reader, writer = await asyncio.open_connection(*await host.address())
    exchange = Exchange(CODE, is_host=False)
    writer.write(wire.encode(wire.OPENING, exchange.opening))
    prefix = await reader.readexactly(wire.PREFIX_BYTES)
    answer = await reader.readexactly(wire.decode_prefix(prefix, wire.ANSWER)[1])
    return reader, writer, exchange.agree(answer[: wire.ELEMENT_BYTES])


def test_a_machine_that_left_after_its_yes_is_not_admitted() -> None:
    async def story() -> None:
        person = Thinking()
        host = Waiting(confirm=person.confirm, admit=nobody)
        _, writer, sealing = await answered(host)
        writer.write(wire.encode(wire.PROOF, sealing.proof))
        writer.write(wire.encode(wire.SEALED, sealing.seal(sealing.newcomer(MY_KEY, "laptop"))))
        writer.write(wire.encode(wire.YES, sealing.yes))
        writer.write_eof()
        await person.is_asked.wait()
        person.answer.set()
        with pytest.raises(LinkError, match="It is not admitted"):
            await host.task
        writer.transport.abort()

    run(story)


def test_a_yes_that_is_not_under_the_agreed_key_admits_nobody() -> None:
    """Whoever is between the machines can send one; only the joining machine has the key."""

    async def story() -> None:
        host = Waiting(admit=nobody)
        reader, writer, sealing = await answered(host)
        writer.write(wire.encode(wire.PROOF, sealing.proof))
        writer.write(wire.encode(wire.SEALED, sealing.seal(sealing.newcomer(MY_KEY, "laptop"))))
        writer.write(wire.encode(wire.YES, sealing.proof))
        with pytest.raises(LinkError, match=r"yes was changed on the way\. It is not admitted"):
            await host.task
        assert await reader.read() == b""
        writer.transport.abort()

    run(story)


def test_a_second_machine_with_the_same_code_is_told_that_it_is_in_use() -> None:
    async def story() -> None:
        person = Thinking()
        host = Waiting(confirm=person.confirm)
        address = await host.address()
        joining = asyncio.create_task(take_over(CODE, ME, [], yes, address=address))
        await person.is_asked.wait()
        second = Me(Ed25519PrivateKey.generate(), "desktop")
        with pytest.raises(LinkError, match="is being used by another machine"):
            await take_over(CODE, second, [], yes, address=address)
        person.answer.set()
        assert await joining == SECRET
        assert (await host.task).name == "laptop"

    run(story)


def test_without_an_answer_both_machines_say_that_there_was_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (pairing_host, pairing_joiner):
        monkeypatch.setattr(module, "CONFIRM_S", 0.05)

    async def story(host_says: Confirm, joiner_says: Confirm) -> None:
        host = Waiting(confirm=host_says, admit=nobody)
        with pytest.raises(LinkError, match="not joined: "):
            await take_over(CODE, ME, [], joiner_says, address=await host.address())
        with pytest.raises(LinkError, match=r"had the right code, but .* It is not admitted"):
            await host.task

    run(lambda: story(Thinking().confirm, yes))
    run(lambda: story(yes, Thinking().confirm))


def test_what_fails_on_the_hosts_own_disk_or_screen_is_said_and_nobody_waits_for_ever() -> None:
    """It is no fault of the connection; and no error leaves the command waiting."""

    async def full(newcomer: wire.Newcomer) -> wire.Handover:
        raise IdentityError("the list can't be written: no space left")

    async def confused(newcomer: wire.Newcomer) -> wire.Handover:
        return object()  # type: ignore[return-value]

    async def gone(words: str, name: str, node: str) -> bool:
        raise RuntimeError("the terminal is gone")

    async def story(host: Waiting, error: type[Exception], text: str) -> None:
        with pytest.raises(LinkError):
            await take_over(CODE, ME, [], yes, address=await host.address())
        with pytest.raises(error, match=text):
            await host.task

    async def both() -> None:
        await story(Waiting(admit=full), IdentityError, "no space left")
        await story(Waiting(confirm=gone), RuntimeError, "the terminal is gone")
        await story(Waiting(admit=confused), TypeError, "object")

    run(both)


def test_a_question_that_fails_ends_the_joiners_search() -> None:
    async def gone(words: str, name: str, node: str) -> bool:
        raise RuntimeError("the terminal is gone")

    async def story() -> None:
        host = Waiting()
        place = await host.address()
        hint = Hint(*place, "told", "ee" * 16)
        with pytest.raises(RuntimeError, match="the terminal is gone"):
            await take_over(CODE, ME, [Told(hint)], gone)
        with pytest.raises(LinkError, match="right code"):
            await host.task

    run(story)


def test_a_key_that_the_joiner_does_not_have_is_not_admitted() -> None:
    async def story() -> None:
        host = Waiting()
        reader, writer, sealing = await answered(host)
        mine = sealing.newcomer(Ed25519PrivateKey.generate(), "laptop")
        stolen = msgspec.structs.replace(mine, key=MY_PUBLIC)
        writer.write(wire.encode(wire.PROOF, sealing.proof))
        writer.write(wire.encode(wire.SEALED, sealing.seal(stolen)))
        writer.write(wire.encode(wire.YES, sealing.yes))
        assert await reader.read() == b""
        with pytest.raises(PotluckError):
            await host.task
        writer.transport.abort()

    run(story)


@pytest.mark.parametrize(
    "given",
    [
        msgspec.structs.replace(SECRET, records=()),
        msgspec.structs.replace(SECRET, node="ee" * 32),
        msgspec.structs.replace(
            SECRET, records=(msgspec.structs.replace(ADMISSION, verdict="admin"),)
        ),
    ],
    ids=["not on it", "by no admin", "forged"],
)
def test_a_list_that_does_not_admit_the_joiner_is_refused(given: wire.Handover) -> None:
    async def story() -> None:
        async def admit(newcomer: wire.Newcomer) -> wire.Handover:
            return given

        host = Waiting(admit=admit)
        with pytest.raises(ProtocolError, match="list"):
            await take_over(CODE, ME, [], yes, address=await host.address())
        host.task.cancel()
        await asyncio.gather(host.task, return_exceptions=True)

    run(story)
