"""Signed links: how both ends come to one, and what an attacker between them can do."""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from random import Random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from potluck._core.transport.handshake import connect
from potluck._core.transport.listener import Admission, Listener
from potluck._core.transport.native_tls import is_available
from potluck._core.transport.record_tags import KEY_BYTES, RecordTags, agree, fresh_secret
from potluck._core.transport.signed import OVERHEAD, RECORD_BYTES, NativeSignedLink, SignedLink
from potluck._core.transport.tcp import TcpLink
from potluck._core.wire.greeting import GREETING, SEALED, SIGNED, Greeting, Hello, Welcome
from potluck.errors import LinkError, Refused
from support.links import Blocking, new_credentials, signed_ends

ENGINES = [False, *([True] if is_available() else [])]


class Server:
    """A listener that goes on as ``wire``, whatever it is asked for."""

    def __init__(self, wire: str, *, use_native: bool) -> None:
        self.links: queue.Queue[TcpLink] = queue.Queue()
        self.listener = Listener("127.0.0.1", 0, new_credentials(use_native=use_native))
        self.listener.serve(lambda hello, node: Admission(Welcome(wire=wire), self.links.put))

    def call(self, wire: str, *, use_native: bool = False) -> TcpLink:
        credentials = new_credentials(use_native=use_native)
        hello = Hello("data", rank=0, to_rank=1, wire=wire)
        deadline = time.monotonic() + 30
        where = ("127.0.0.1", self.listener.port)
        return connect(*where, hello, credentials, deadline=deadline, memory=None)[0]

    def close(self) -> None:
        self.listener.close()
        while not self.links.empty():
            self.links.get().close()


@pytest.fixture(params=ENGINES, ids=lambda native: "native" if native else "python")
def signed_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with contextlib.closing(Server(SIGNED, use_native=request.param)) as server:
        yield server


@pytest.mark.parametrize("use_native", ENGINES)
def test_bytes_that_follow_welcome_at_once_are_no_part_of_tls(
    signed_server: Server, use_native: bool
) -> None:
    """What the server says first is on its way before the client has read WELCOME."""
    for _ in range(20):
        with (
            contextlib.closing(signed_server.call(SIGNED, use_native=use_native)) as client,
            contextlib.closing(signed_server.links.get(timeout=30)) as server,
        ):
            assert isinstance(client, NativeSignedLink if use_native else SignedLink)
            assert isinstance(server, NativeSignedLink | SignedLink)
            Blocking(server).send_all(b"first" * 10_000)
            assert Blocking(client).receive(50_000) == b"first" * 10_000
            Blocking(client).send_all(b"answer")
            assert Blocking(server).receive(6) == b"answer"


@pytest.mark.parametrize(("wanted", "given"), [(SIGNED, SEALED), (SEALED, SIGNED)])
def test_a_server_that_goes_on_otherwise_than_asked_is_left(wanted: str, given: str) -> None:
    with contextlib.closing(Server(given, use_native=False)) as server:
        with pytest.raises(Refused, match="set POTLUCK_WIRE to the same") as caught:
            server.call(wanted)
        assert caught.value.code == "wire"


def test_a_client_that_says_more_under_tls_than_hello_is_dropped(
    signed_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else bytes that TLS has read, and clear text behind them, would be mixed up."""

    encode = GREETING.encode

    def and_more(message: Greeting) -> bytes:
        return encode(message) + (b"more" if isinstance(message, Hello) else b"")

    monkeypatch.setattr(GREETING, "encode", and_more)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(LinkError):
            signed_server.call(SIGNED)
        signed_server.close()
    assert "went on under TLS after a greeting that ends it" in caplog.text
    assert signed_server.links.empty()


def test_a_client_that_sends_no_secret_gets_no_link(
    signed_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("potluck._core.transport.handshake.fresh_secret", lambda: None)
    with caplog.at_level(logging.WARNING), pytest.raises(LinkError):
        signed_server.call(SIGNED)
    assert "the greeting of a signed link has no secret" in caplog.text
    assert signed_server.links.empty()


# -- keys and tags


def greeting(**fields: int | str) -> tuple[Hello, Welcome]:
    hello = Hello("data", wire=SIGNED, secret=fresh_secret(), **fields)  # type: ignore[arg-type]
    return hello, Welcome(wire=SIGNED, secret=fresh_secret())


def test_keys_depend_on_both_secrets_on_who_talks_and_for_what() -> None:
    hello, welcome = greeting(job="run", epoch=1, rank=0, to_rank=1)
    nodes = {"client": "ada", "server": "bob"}
    keys = agree(hello, welcome, **nodes)
    assert keys == agree(hello, welcome, **nodes)
    assert keys.of_peer == (keys.receives, keys.sends)
    others = [
        agree(hello, greeting()[1], **nodes),
        agree(greeting(job="run", epoch=1, rank=0, to_rank=1)[0], welcome, **nodes),
        agree(hello, welcome, client="bob", server="ada"),
        *(
            agree(Hello("data", secret=hello.secret, **other), welcome, **nodes)
            for other in (
                {"job": "run", "epoch": 2, "rank": 0, "to_rank": 1},
                {"job": "run", "epoch": 1, "rank": 2, "to_rank": 1},
                {"job": "other", "epoch": 1, "rank": 0, "to_rank": 1},
            )
        ),
    ]
    all_keys = [key for pair in (keys, *others) for key in pair]
    assert len(set(all_keys)) == len(all_keys)
    assert all(len(key) == KEY_BYTES for key in all_keys)


def test_neither_secrets_nor_keys_are_shown() -> None:
    hello, welcome = greeting()
    keys = agree(hello, welcome, client="ada", server="bob")
    assert hello.secret is not None
    for secret in (hello.secret.value, *keys):
        assert repr(secret)[2:12] not in f"{hello} {welcome} {keys} {keys!r}"


def test_a_tag_is_that_of_aes_gcm_without_plaintext() -> None:
    key = bytes(range(32))
    tags = RecordTags(key, records_per_key=2)
    later = hmac.digest(key, b"potluck signed link 1 next key\x01", sha256)  # HKDF-Expand
    for number, now in ((0, key), (1, key), (0, later), (1, later)):
        nonce = number.to_bytes(12, "big")
        assert tags.next(b"ab", b"c") == AESGCM(now).encrypt(nonce, b"", b"abc")


@pytest.mark.parametrize("native", [(a, b) for a in ENGINES for b in ENGINES])
def test_both_ends_change_keys_at_the_same_record(native: tuple[bool, bool]) -> None:
    pair = socket.socketpair()
    ends = signed_ends(*pair, native=native, records_per_key=3)
    with contextlib.closing(ends[0]), contextlib.closing(ends[1]):
        here, there = map(Blocking, ends)
        for number in range(20):
            here.send_all(bytes([number]) * (number + 1))
            assert there.receive(number + 1) == bytes([number]) * (number + 1)
            there.send_all(b"answer")
            assert here.receive(6) == b"answer"


@pytest.mark.parametrize("native", [(a, b) for a in ENGINES for b in ENGINES])
def test_both_ends_make_the_same_tags_of_records_of_any_size(native: tuple[bool, bool]) -> None:
    """The native core's hash may be its own, by wide vectors, where Python's is OpenSSL's."""
    random = Random(7)
    sizes = [*range(1, 50), *(16 * n + d for n in (15, 16, 17, 64) for d in (-5, -4, -1, 0, 1))]
    sizes += [random.randrange(RECORD_BYTES - 300, RECORD_BYTES + 1) for _ in range(10)]
    ends = signed_ends(*socket.socketpair(), native=native, records_per_key=20)
    with contextlib.closing(ends[0]), contextlib.closing(ends[1]):
        for size in sizes:
            data = random.randbytes(size)
            Blocking(ends[0]).send_all(data)
            assert Blocking(ends[1]).receive(size) == data


# -- an attacker on the wire

WORDS = (b"first", b"second", b"third")


def record(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def flipped(at: int) -> Callable[[list[bytes]], list[bytes]]:
    def change(records: list[bytes]) -> list[bytes]:
        changed = bytearray(records[1])
        changed[at] ^= 0x04
        return [records[0], bytes(changed), records[2]]

    return change


def longer(records: list[bytes]) -> list[bytes]:
    """The second and the third as one, with the length of both."""
    one = records[1][4:-16] + records[2][4:-16]
    return [records[0], record(one) + records[1][-16:]]


ATTACKS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a bit of the length": flipped(0),
    "a bit of the data": flipped(5),
    "a bit of the tag": flipped(-1),
    "a record twice": lambda records: [records[0], records[0], *records[1:]],
    "a record left out": lambda records: [records[0], records[2]],
    "records in another order": lambda records: [records[0], records[2], records[1]],
    "two records made one": longer,
    "a record of the attacker": lambda records: [records[0], record(b"evil") + bytes(16)],
    "a length of 4 GiB": lambda records: [records[0], b"\xff" * 64],
    "a length of 0": lambda records: [records[0], bytes(64)],
}


class Cable:
    """Two ends, and an attacker between them who holds what each sends."""

    def __init__(self, stack: contextlib.ExitStack, native: tuple[bool, bool]) -> None:
        mine, self.from_here = socket.socketpair()
        self.to_there, theirs = socket.socketpair()
        ends = signed_ends(mine, theirs, native=native)
        self.here, self.there = (Blocking(stack.enter_context(contextlib.closing(e))) for e in ends)
        for each in (self.from_here, self.to_there):
            each.settimeout(30)
            stack.callback(each.close)

    def capture(self, data: bytes) -> bytes:
        """The record that the first end makes of ``data``."""
        self.here.send_all(data)
        taken = b""
        while len(taken) < len(data) + OVERHEAD:
            taken += self.from_here.recv(1 << 20)
        return taken


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("native", [(a, b) for a in ENGINES for b in ENGINES])
def test_an_attack_ends_the_link_and_delivers_no_byte_of_it(
    attack: str, native: tuple[bool, bool]
) -> None:
    with contextlib.ExitStack() as stack:
        cable = Cable(stack, native)
        cable.to_there.sendall(b"".join(ATTACKS[attack]([cable.capture(w) for w in WORDS])))
        # A record that grew may wait for bytes that never come, as after a cut: none is delivered.
        cable.to_there.shutdown(socket.SHUT_WR)
        assert cable.there.receive(len(WORDS[0])) == WORDS[0]
        why = "a record's tag is wrong|a record of [0-9]+ bytes; at most|closed the connection"
        with pytest.raises(LinkError, match=why) as caught:
            cable.there.receive(1)
        for call in (lambda: cable.there.receive(1), lambda: cable.there.send_all(b"x")):
            with pytest.raises(LinkError) as again:
                call()
            assert str(again.value) == str(caught.value), "it stays ended"


@pytest.mark.parametrize("native", [(a, a) for a in ENGINES])
def test_what_an_end_said_is_not_taken_as_an_answer(native: tuple[bool, bool]) -> None:
    """Reflection: each direction has a key of its own."""
    with contextlib.ExitStack() as stack:
        cable = Cable(stack, native)
        cable.from_here.sendall(cable.capture(b"hello"))
        with pytest.raises(LinkError, match="a record's tag is wrong"):
            cable.here.receive(5)


@pytest.mark.parametrize("native", [(a, a) for a in ENGINES])
def test_a_cut_link_is_an_error_and_never_a_shorter_message(native: tuple[bool, bool]) -> None:
    with contextlib.ExitStack() as stack:
        cable = Cable(stack, native)
        cable.to_there.sendall(cable.capture(b"whole") + cable.capture(b"cut off")[:-1])
        cable.to_there.shutdown(socket.SHUT_WR)
        assert cable.there.receive(5) == b"whole"
        with pytest.raises(LinkError, match="closed the connection"):
            cable.there.receive(1)


@pytest.mark.parametrize("native", [(a, b) for a in ENGINES for b in ENGINES])
def test_records_are_bounded_and_cross_a_kernel_that_takes_a_little(
    native: tuple[bool, bool],
) -> None:
    mine, theirs = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ends = signed_ends(mine, theirs, native=native)
    data = memoryview(bytes(range(256)) * 2048)
    with contextlib.closing(ends[0]), contextlib.closing(ends[1]):
        sent = came = 0
        arrived = bytearray(len(data))
        while came < len(data):
            if sent < len(data):
                sent += ends[0].send(data[sent:])
            came += ends[1].recv_into(memoryview(arrived)[came : came + 7001])
        assert arrived == data
    assert len(data) > 4 * RECORD_BYTES
