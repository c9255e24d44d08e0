"""Somebody between two members who ends TLS himself and starts it anew on the other side."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import pytest

from potluck.errors import PotluckError, WrongSecret
from potluck.transport import aio
from potluck.transport.credentials import Credentials
from potluck.wire.greeting import Hello, Welcome
from support.figures import Figures
from support.links import new_credentials


def trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    """He takes whatever certificate he is shown."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Attacker:
    """Relays between a client and ``port``, reading all that TLS lets him read."""

    def __init__(self, port: int, own: Credentials) -> None:
        self.heard: list[bytes] = []
        self._port = port
        self._server_side = trusting(own.server_context)
        self._client_side = trusting(own.client_context)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = None
        try:
            far_reader, far = await asyncio.open_connection(
                "127.0.0.1", self._port, ssl=self._client_side, server_hostname=""
            )
            await asyncio.gather(self._pump(reader, far), self._pump(far_reader, writer))
        except OSError:
            pass
        finally:
            for each in filter(None, (far, writer)):
                await aio.end(each)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.heard.append(data)
            writer.write(data)
        writer.close()


@pytest.mark.parametrize("times", [20])
def test_he_is_refused_by_both_every_time_and_hears_nothing(times: int, figures: Figures) -> None:
    async def story() -> None:
        greeted: list[str] = []

        async def on_greeted(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
        ) -> None:
            greeted.append(node)
            await aio.write_greeting(writer, Welcome())

        member, client = new_credentials(), new_credentials()
        real = aio.Server("127.0.0.1", 0, member, on_greeted)
        attacker = Attacker(real.port, new_credentials("the attacker's own"))
        server = await asyncio.start_server(
            attacker.serve, "127.0.0.1", 0, ssl=attacker._server_side
        )
        hello = Hello("node", client.namespace, job="SECRET-NAME")
        refused = 0
        async with server:
            port = server.sockets[0].getsockname()[1]
            for _ in range(times):
                with pytest.raises(WrongSecret):
                    await aio.connect("127.0.0.1", port, hello, client)
                refused += 1
                # Towards the real server he may say what he likes: it reads none of it.
                with contextlib.suppress(OSError, PotluckError, asyncio.IncompleteReadError):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", real.port, ssl=attacker._client_side, server_hostname=""
                    )
                    try:
                        await aio.write_greeting(writer, hello)
                        answer = await asyncio.wait_for(aio.read_greeting(reader), 30)
                        pytest.fail(f"he was answered: {answer}")
                    finally:
                        await aio.end(writer)
        await real.close()
        assert refused == times
        assert greeted == []
        fault = f"a man in the middle with TLS of his own, {times} times"
        figures.take(fault, "heard:", len(attacker.heard), asked=0, unit="bytes", page="security")
        let_in = times - refused
        figures.take(fault, "not refused:", let_in, asked=0, unit="times", page="security")

    asyncio.run(story())


def test_who_shows_no_certificate_is_not_heard() -> None:
    async def story() -> None:
        greeted: list[str] = []

        async def on_greeted(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
        ) -> None:
            greeted.append(node)

        member = new_credentials()
        real = aio.Server("127.0.0.1", 0, member, on_greeted)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            real.port,
            ssl=trusting(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)),
            server_hostname="",
        )
        with contextlib.suppress(OSError):
            await aio.write_greeting(writer, Hello("node", member.namespace))
            assert await asyncio.wait_for(reader.read(), 30) == b""
        await aio.end(writer)
        await real.close()
        assert greeted == []

    asyncio.run(story())
