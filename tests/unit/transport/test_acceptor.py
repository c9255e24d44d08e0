"""What callers may use before they have authenticated: the same for workers and agents."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from potluck._core.transport import aio
from potluck._core.transport.listener import (
    Acceptor,
    Caller,
    Limits,
    Listener,
    Unauthenticated,
    listening_socket,
)
from potluck.errors import ProtocolError
from support.knocking import do_knock
from support.links import new_credentials

PATIENT = Limits(timeout_s=60.0)
"""A connection that ends was dropped for another: no deadline passes, however busy the machine."""

all_of_loopback = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8"
)


@contextlib.asynccontextmanager
async def accepting(
    serve: Callable[[Caller], Awaitable[None]],
    limits: Limits = PATIENT,
    crowd: Unauthenticated | None = None,
) -> AsyncIterator[int]:
    """The port of an acceptor that runs in this loop."""
    sock = listening_socket("127.0.0.1", 0)
    task = asyncio.create_task(Acceptor(sock, serve, limits, awaits="a word", crowd=crowd).run())
    try:
        yield sock.port
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def dial(port: int, source: str = "127.0.0.1") -> socket.socket:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind((source, 0))
    await loop.sock_connect(sock, ("127.0.0.1", port))
    return sock


async def ends(sock: socket.socket) -> bool:
    """Wait until the other side has ended it without a word."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    return True


async def reads_one_byte(caller: Caller) -> None:
    reader, writer = await asyncio.open_connection(sock=caller.sock)
    try:
        await reader.readexactly(1)
        await reader.read()
    finally:
        await aio.end(writer)


@all_of_loopback
@pytest.mark.parametrize("kind", ["worker", "agent"])
def test_a_machine_that_calls_over_and_over_displaces_only_its_own(kind: str) -> None:
    """One caller is slower to knock than 150 connections from elsewhere are to come."""
    credentials = new_credentials()

    async def greeted(*_: object) -> None:
        return None

    async def story(port: int) -> None:
        async with asyncio.timeout(60):
            with contextlib.ExitStack() as stack:
                slow = stack.enter_context(await dial(port, "127.0.0.9"))
                crowd = [stack.enter_context(await dial(port, "127.0.0.10")) for _ in range(150)]
                for sock in crowd[: -PATIENT.max_connections]:
                    assert await ends(sock)
                await asyncio.to_thread(finish_tls, slow)

    def finish_tls(sock: socket.socket) -> None:
        do_knock(sock)
        sock.settimeout(30)
        with credentials.client_context.wrap_socket(sock) as tls:
            assert tls.version() == "TLSv1.3"

    async def agent() -> None:
        server = aio.Server("127.0.0.1", 0, credentials, greeted, limits=PATIENT)
        try:
            await story(server.port)
        finally:
            await server.close()

    if kind == "agent":
        asyncio.run(agent())
    else:
        with contextlib.closing(Listener("127.0.0.1", 0, credentials, limits=PATIENT)) as listener:
            asyncio.run(story(listener.port))


def test_ports_that_share_a_crowd_share_its_limit() -> None:
    async def story() -> None:
        crowd: Unauthenticated = {}
        limits = Limits(max_connections=4, timeout_s=60.0)
        async with (
            asyncio.timeout(60),
            accepting(reads_one_byte, limits, crowd) as one,
            accepting(reads_one_byte, limits, crowd) as other,
        ):
            with contextlib.ExitStack() as stack:
                first = [stack.enter_context(await dial(one)) for _ in range(4)]
                for _ in range(4):
                    stack.enter_context(await dial(other))
                for sock in first:
                    assert await ends(sock)
                assert len(crowd) == 4

    asyncio.run(story())


@all_of_loopback
def test_of_the_largest_crowd_the_oldest_silent_connection_goes_first() -> None:
    async def story() -> None:
        spoke = asyncio.Event()

        async def serve(caller: Caller) -> None:
            spoke.set()
            await reads_one_byte(caller)

        limits = Limits(max_connections=3, timeout_s=60.0)
        async with accepting(serve, limits) as port, asyncio.timeout(30):
            talker, alone = await dial(port), await dial(port, "127.0.0.9")
            talker.send(b"x")
            await spoke.wait()
            first, second = await dial(port), await dial(port)
            assert await ends(first)
            third = await dial(port)
            assert await ends(second)
            for sock in (talker, alone, third):
                with pytest.raises(BlockingIOError):
                    sock.recv(1)
                sock.close()
            first.close()
            second.close()

    asyncio.run(story())


def test_a_silent_connection_is_not_served_and_costs_no_tls_state() -> None:
    async def story() -> None:
        served: list[str] = []
        spoke = asyncio.Event()

        async def serve(caller: Caller) -> None:
            served.append(caller.peer)
            spoke.set()

        async with accepting(serve) as port, asyncio.timeout(30):
            silent, talker = await dial(port), await dial(port)
            talker.send(b"x")
            await spoke.wait()
            assert served == ["{}:{}".format(*talker.getsockname())]
            silent.close()
            talker.close()

    asyncio.run(story())


def test_no_limit_holds_for_a_caller_that_has_authenticated() -> None:
    async def story() -> None:
        known, over = asyncio.Event(), asyncio.Event()

        async def serve(caller: Caller) -> None:
            caller.authenticated()
            known.set()
            await over.wait()

        limits = Limits(max_connections=1, timeout_s=1.5)
        async with accepting(serve, limits) as port, asyncio.timeout(30):
            member = await dial(port)
            member.send(b"x")
            await known.wait()
            strangers = [await dial(port) for _ in range(3)]
            for stranger in strangers:
                assert await ends(stranger)  # its time was up, or the next one came
                stranger.close()
            with pytest.raises(BlockingIOError):
                member.recv(1)
            over.set()
            assert await ends(member)
            member.close()

    asyncio.run(story())


def test_what_goes_wrong_with_one_caller_is_one_log_line_and_ends_that_one_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = iter([ProtocolError("not a word"), OSError(104, "reset"), KeyError("a bug")])

    async def story() -> None:
        async def serve(caller: Caller) -> None:
            raise next(errors)

        async with accepting(serve) as port, asyncio.timeout(30):
            for _ in range(3):
                with contextlib.closing(await dial(port)) as caller:
                    caller.send(b"x")
                    assert await ends(caller)

    asyncio.run(story())
    assert next(errors, None) is None
    assert "not a word" in caplog.records[0].getMessage()


def test_an_acceptor_that_breaks_ends_and_says_why() -> None:
    told: list[BaseException] = []

    async def story() -> None:
        async def greeted(*_: object) -> None:
            return None

        broken = asyncio.Event()

        def on_broken(error: BaseException) -> None:
            told.append(error)
            broken.set()

        server = aio.Server("127.0.0.1", 0, new_credentials(), greeted, on_broken=on_broken)
        server._sock.close()  # as if another part of the process had closed the descriptor
        async with asyncio.timeout(30):
            await broken.wait()
        await server.close()

    asyncio.run(story())
    assert len(told) == 1
