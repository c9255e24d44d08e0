"""The greeting over asyncio streams: the same answers as over links."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from potluck._core.transport import aio
from potluck._core.transport.listener import Limits
from potluck._core.wire.greeting import GREETING, Hello, Refusal, Welcome
from potluck._core.wire.versions import NEWEST
from potluck.errors import ConfigurationError, LinkError, ProtocolError, Refused, WrongSecret
from support.knocking import client_hello, do_hear, do_knock, knocked_streams, raw
from support.links import new_credentials

Test = Callable[["Host"], Awaitable[None]]


class Host:
    """A server that welcomes everybody and echoes one line."""

    def __init__(self) -> None:
        self.credentials = new_credentials()
        self.asked: list[tuple[Hello, str]] = []
        self.server: aio.Server

    async def greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
    ) -> None:
        self.asked.append((hello, node))
        if hello.job == "unwanted":
            await aio.write_greeting(writer, Refusal("job", "there is no such job"))
            return
        await aio.write_greeting(writer, Welcome(rank=5))
        with contextlib.suppress(ConnectionError):
            writer.write(await reader.readline())
            await writer.drain()
            await reader.read()


@contextlib.asynccontextmanager
async def hosting(**options: float) -> AsyncIterator[Host]:
    host = Host()
    limits = Limits(**options)  # type: ignore[arg-type]
    host.server = aio.Server("127.0.0.1", 0, host.credentials, host.greeted, limits=limits)
    try:
        yield host
    finally:
        await host.server.close()


def hello(**fields: object) -> Hello:
    return Hello(**{"kind": "worker"} | fields)  # type: ignore[arg-type]


async def call(host: Host, message: Hello | None = None, cluster: str = "ours"):
    return await aio.connect(
        "127.0.0.1",
        host.server.port,
        message or hello(),
        new_credentials(cluster),
        timeout_s=30,
    )


async def assert_a_good_peer_gets_through(host: Host) -> None:
    reader, writer, welcome = await call(host)
    assert welcome.rank == 5
    writer.write(b"ping\n")
    assert await reader.readline() == b"ping\n"
    await aio.end(writer)


def test_peers_learn_each_others_identity_and_talk() -> None:
    async def story() -> None:
        async with hosting() as host:
            mine = new_credentials()
            reader, writer, welcome = await aio.connect(
                "127.0.0.1", host.server.port, hello(worker="2"), mine
            )
            assert welcome == Welcome(rank=5, newest=NEWEST)
            assert aio.peer_identity(writer).node == host.credentials.node_id
            said = msgspec.structs.replace(hello(worker="2"), newest=NEWEST)
            assert host.asked == [(said, mine.node_id)]
            await aio.end(writer)
            del reader

    asyncio.run(story())


def test_a_node_that_this_one_does_not_want_is_told_so_and_nothing_it_says_is_read() -> None:
    """Its HELLO may be on its way already: the refusal must not be lost over it."""

    async def story() -> None:
        unwanted = new_credentials()
        async with hosting() as host:
            host.credentials.objects_to = {unwanted.node_id: "it was banned by bo"}.get
            with pytest.raises(Refused, match="it was banned by bo") as caught:
                await aio.connect("127.0.0.1", host.server.port, hello(), unwanted, timeout_s=30)
            assert caught.value.code == "banned"
            reader, writer = await knocked_streams(host.server.port, unwanted.client_context)
            refusal = GREETING.encode(Refusal("banned", "it was banned by bo"))
            first = await asyncio.wait_for(reader.readexactly(4), 30)
            for _ in range(20):
                writer.write(b"\xff" * 500)  # a greeting of 4 GiB: never looked at
                await asyncio.sleep(0)
            assert first + await reader.readexactly(len(refusal) - 4) == refusal
            await aio.end(writer)
            assert host.asked == []
            await assert_a_good_peer_gets_through(host)

    asyncio.run(story())


def test_a_server_that_this_node_does_not_want_hears_no_hello() -> None:
    async def story() -> None:
        mine = new_credentials()
        async with hosting() as host:
            mine.objects_to = {host.credentials.node_id: "it was banned by bo"}.get
            with pytest.raises(Refused, match="is not called: it was banned by bo") as caught:
                await aio.connect("127.0.0.1", host.server.port, hello(), mine, timeout_s=30)
            assert caught.value.code == "banned"
            assert host.asked == []

    asyncio.run(story())


def test_another_secret_is_refused() -> None:
    async def story() -> None:
        async with hosting() as host:
            with pytest.raises(WrongSecret, match="another cluster secret"):
                await call(host, cluster="another")
            assert host.asked == []
            await assert_a_good_peer_gets_through(host)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (hello(version=7), "version"),
        (hello(job="unwanted"), "job"),
    ],
)
def test_a_refusal_carries_its_code_and_reason(message: Hello, code: str) -> None:
    async def story() -> None:
        async with hosting() as host:
            with pytest.raises(Refused) as caught:
                await call(host, message)
            assert caught.value.code == code

    asyncio.run(story())


@pytest.mark.parametrize(
    "junk",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, client_hello()],
    ids=["nothing", "HTTP", "ones", "TLS"],
)
def test_junk_gets_no_byte_and_disturbs_nobody(junk: bytes) -> None:
    async def story() -> None:
        async with hosting() as host:
            reader, writer = await asyncio.open_connection("127.0.0.1", host.server.port)
            with contextlib.suppress(ConnectionError):
                writer.write(junk)
                writer.write_eof()
                assert await asyncio.wait_for(reader.read(), 30) == b""
            await aio.end(writer)
            await assert_a_good_peer_gets_through(host)

    asyncio.run(story())


def test_a_greeting_of_4_gib_is_refused_under_tls_too() -> None:
    async def story() -> None:
        async with hosting() as host:
            context = new_credentials().client_context
            reader, writer = await knocked_streams(host.server.port, context)
            writer.write(b"\xff\xff\xff\xff" + bytes(100))
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            await aio.end(writer)
            assert host.asked == []
            await assert_a_good_peer_gets_through(host)

    asyncio.run(story())


def test_a_crowd_of_idle_connections_does_not_keep_a_peer_out() -> None:
    async def story() -> None:
        async with hosting(max_connections=8) as host:
            idle = [
                await asyncio.open_connection("127.0.0.1", host.server.port) for _ in range(100)
            ]
            await assert_a_good_peer_gets_through(host)
            for _, writer in idle:
                await aio.end(writer)

    asyncio.run(story())


def test_of_a_crowd_that_arrives_at_once_no_more_are_kept_than_may_wait() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with hosting(max_connections=8, timeout_s=60) as host, asyncio.timeout(30):
            crowd = [socket.create_connection(("127.0.0.1", host.server.port)) for _ in range(60)]
            for sock in crowd:
                sock.setblocking(False)
            for sock in crowd[:-8]:
                with contextlib.suppress(ConnectionError):
                    assert await loop.sock_recv(sock, 1) == b""
            await assert_a_good_peer_gets_through(host)
            for sock in crowd:
                sock.close()

    asyncio.run(story())


@pytest.mark.parametrize("does_knock", [False, True], ids=["at once", "after a right knock"])
def test_a_silent_caller_is_dropped_when_its_time_is_up(does_knock: bool) -> None:
    async def story() -> None:
        async with hosting(timeout_s=1.5) as host:
            sock = await asyncio.to_thread(raw, host.server.port)
            if does_knock:
                await asyncio.to_thread(do_knock, sock)
            reader, writer = await asyncio.open_connection(sock=sock)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            await aio.end(writer)

    asyncio.run(story())


def test_a_connection_that_is_made_as_its_caller_is_cancelled_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio would wait for the other side to end it, maybe longer than its loop runs."""
    made = aio._KeepsItsTransport.connection_made
    sockets: list[socket.socket] = []

    async def story() -> None:
        async with hosting() as host:
            calling = asyncio.ensure_future(call(host))

            def cancels(protocol: aio._KeepsItsTransport, transport: asyncio.Transport) -> None:
                made(protocol, transport)
                if not transport.get_extra_info("ssl_object").server_side:
                    sockets.append(transport.get_extra_info("socket"))
                    calling.cancel()

            monkeypatch.setattr(aio._KeepsItsTransport, "connection_made", cancels)
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert [sock.fileno() for sock in sockets] == [-1]

    asyncio.run(story())


def test_closing_the_server_ends_its_conversations() -> None:
    async def story() -> None:
        async with hosting() as host:
            reader, writer, _ = await call(host)
            await host.server.close()
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            await aio.end(writer)

    asyncio.run(story())


def test_a_port_in_use_is_a_configuration_error() -> None:
    async def story() -> None:
        async with hosting() as host:
            with pytest.raises(ConfigurationError, match=f"port {host.server.port}"):
                aio.Server("127.0.0.1", host.server.port, host.credentials, host.greeted)

    asyncio.run(story())


def test_nobody_there_is_a_link_error_that_names_the_place() -> None:
    async def story() -> None:
        async with hosting() as host:
            port = host.server.port
        with pytest.raises(LinkError, match=f"127.0.0.1:{port}"):
            await aio.connect("127.0.0.1", port, hello(), new_credentials())

    asyncio.run(story())


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (None, LinkError, "did not answer in time while setting up TLS"),
        (b"", LinkError, "while setting up TLS"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError, "does not speak TLS 1.3"),
    ],
    ids=["silence", "its end", "junk"],
)
def test_a_server_that_fails_after_the_knock_is_an_error_that_says_where(
    answer: bytes | None, error: type[Exception], text: str
) -> None:
    """The wait for the end of such a connection must end, too."""
    credentials = new_credentials()

    async def story(port: int) -> None:
        async with asyncio.timeout(60):
            with pytest.raises(error, match=text):
                await aio.connect(
                    "127.0.0.1",
                    port,
                    hello(),
                    credentials,
                    timeout_s=1.5 if answer is None else 30,
                )

    def serve(listening: socket.socket) -> None:
        sock, _ = listening.accept()
        with sock:
            sock.settimeout(30)
            do_hear(sock, credentials)
            sock.recv(65536)
            if answer is not None:
                with contextlib.suppress(OSError):  # the caller may hang up at the first byte
                    sock.sendall(answer)
                    sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while sock.recv(65536):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        asyncio.run(story(listening.getsockname()[1]))
        thread.join()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"", WrongSecret, "hung up without a word"),
        (b"HTTP/1.1 400 Bad", ProtocolError, "another program"),
        (bytes(200), ProtocolError, "another program"),
    ],
)
def test_who_answers_no_knock_is_named(answer: bytes, error: type[Exception], text: str) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(80)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(error, match=rf"127.0.0.1:{port}, knocking: .*{text}"):
                await aio.connect("127.0.0.1", port, hello(), new_credentials(), timeout_s=30)

    asyncio.run(story())


def test_a_name_is_looked_up_and_one_without_an_address_is_a_link_error() -> None:
    async def story() -> None:
        async with hosting() as host:
            _, writer, _ = await aio.connect(
                "localhost", host.server.port, hello(), new_credentials(), timeout_s=30
            )
            await aio.end(writer)
        with pytest.raises(LinkError, match=r"nowhere\.invalid"):
            await aio.connect("nowhere.invalid", 1, hello(), new_credentials(), timeout_s=30)

    asyncio.run(story())


def test_a_stream_that_ends_within_a_greeting_is_a_link_error_and_junk_a_protocol_error() -> None:
    async def story() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(GREETING.encode(Welcome())[:-1])
        reader.feed_eof()
        with pytest.raises(LinkError, match="before its greeting was whole"):
            await aio.read_greeting(reader)
        reader = asyncio.StreamReader()
        reader.feed_data(bytes(4))
        with pytest.raises(ProtocolError):
            await aio.read_greeting(reader)

    asyncio.run(story())
