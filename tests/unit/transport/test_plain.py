"""From TLS to clear text: both say so under TLS, and no byte is taken for the other kind."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Iterator

import pytest

from potluck.errors import LinkError, Refused
from potluck.transport.handshake import connect
from potluck.transport.listener import Admission, Listener
from potluck.transport.native_tls import is_available
from potluck.transport.plain import PlainLink
from potluck.transport.tcp import TcpLink
from potluck.wire.greeting import GREETING, PLAIN, SEALED, Greeting, Hello, Welcome
from support.links import Blocking, new_credentials

ENGINES = [False, *([True] if is_available() else [])]


class Server:
    """A listener that goes on as ``wire``, whatever it is asked for."""

    def __init__(self, wire: str, *, use_native: bool) -> None:
        self.links: queue.Queue[TcpLink] = queue.Queue()
        self.listener = Listener("127.0.0.1", 0, new_credentials(use_native=use_native))
        self.listener.serve(lambda hello, node: Admission(Welcome(wire=wire), self.links.put))

    def call(self, wire: str, *, use_native: bool = False) -> TcpLink:
        credentials = new_credentials(use_native=use_native)
        hello = Hello("data", credentials.namespace, rank=0, to_rank=1, wire=wire)
        deadline = time.monotonic() + 30
        where = ("127.0.0.1", self.listener.port)
        return connect(*where, hello, credentials, deadline=deadline, memory=None)[0]

    def close(self) -> None:
        self.listener.close()
        while not self.links.empty():
            self.links.get().close()


@pytest.fixture(params=ENGINES, ids=lambda native: "native" if native else "python")
def plain_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with contextlib.closing(Server(PLAIN, use_native=request.param)) as server:
        yield server


@pytest.mark.parametrize("use_native", ENGINES)
def test_bytes_that_follow_welcome_at_once_are_no_part_of_tls(
    plain_server: Server, use_native: bool
) -> None:
    """What the server says first is on its way before the client has read WELCOME."""
    for _ in range(20):
        with (
            contextlib.closing(plain_server.call(PLAIN, use_native=use_native)) as client,
            contextlib.closing(plain_server.links.get(timeout=30)) as server,
        ):
            assert isinstance(client, PlainLink)
            assert isinstance(server, PlainLink)
            Blocking(server).send_all(b"first" * 10_000)
            assert Blocking(client).receive(50_000) == b"first" * 10_000
            Blocking(client).send_all(b"answer")
            assert Blocking(server).receive(6) == b"answer"


@pytest.mark.parametrize(("wanted", "given"), [(PLAIN, SEALED), (SEALED, PLAIN)])
def test_a_server_that_goes_on_otherwise_than_asked_is_left(wanted: str, given: str) -> None:
    """An older potluck answers so, as it knows no such word."""
    with contextlib.closing(Server(given, use_native=False)) as server:
        with pytest.raises(Refused, match="set POTLUCK_WIRE to the same") as caught:
            server.call(wanted)
        assert caught.value.code == "wire"


def test_a_client_that_says_more_under_tls_than_hello_is_dropped(
    plain_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else bytes that TLS has read, and clear text behind them, would be mixed up."""

    encode = GREETING.encode

    def and_more(message: Greeting) -> bytes:
        return encode(message) + (b"more" if isinstance(message, Hello) else b"")

    monkeypatch.setattr(GREETING, "encode", and_more)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(LinkError):
            plain_server.call(PLAIN)
        plain_server.close()
    assert "went on under TLS after a greeting that ends it" in caplog.text
    assert plain_server.links.empty()
