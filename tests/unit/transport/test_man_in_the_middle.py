"""An attacker between two members, who ends TLS himself and starts it anew on the other side."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import pytest

from potluck._core.transport import aio
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.knock import ANSWER_BYTES, CALL_BYTES, PROOF_BYTES
from potluck._core.wire.greeting import GREETING, Greeting, Hello, Refusal, Welcome
from potluck.errors import PotluckError, Refused, SecurityError
from support.figures import Figures
from support.knocking import knocked_streams, raw, untrusting
from support.links import new_credentials

NAME = "SECRET-NAME"


class Attacker:
    """Relays between a client and ``port``. He passes their knock on, since he cannot make one, and
    then shows each of them a certificate of his own, which the public issuer has signed."""

    def __init__(self, port: int) -> None:
        own = new_credentials("the attacker's own")
        self.heard: list[bytes] = []
        self._target = port
        self._server_side = trusting(own.server_context)
        self._client_side = trusting(own.client_context)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]

    def relay(self, times: int) -> None:
        """Serve so many connections, one after the other, and stop listening."""
        with self._listening:
            for _ in range(times):
                client, _ = self._listening.accept()
                client.settimeout(30)
                with client, raw(self._target) as server:
                    server.sendall(exactly(client, CALL_BYTES))
                    client.sendall(exactly(server, ANSWER_BYTES))
                    server.sendall(exactly(client, PROOF_BYTES))
                    with contextlib.suppress(OSError):
                        self._end_tls(client, server)

    def _end_tls(self, client: socket.socket, server: socket.socket) -> None:
        with (
            self._client_side.wrap_socket(server) as far,
            self._server_side.wrap_socket(client, server_side=True) as near,
        ):
            # The client speaks first, if it speaks; he goes on with what he has.
            for source, target in ((near, far), (far, near)):
                with contextlib.suppress(OSError):
                    self.heard.append(source.recv(65536))
                    target.sendall(self.heard[-1] or b"?")


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        some = sock.recv(count - len(data))
        assert some, "a side hung up within the knock"
        data += some
    return data


def trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    """He takes whatever certificate he is shown."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


def members(count: int) -> list[Credentials]:
    """Nodes of one cluster, each of which talks to the others only."""
    nodes = [new_credentials() for _ in range(count)]
    known = {node.node_id for node in nodes}
    for node in nodes:
        node.objects_to = lambda other: None if other in known else "nobody has admitted it"
    return nodes


async def welcomes(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
) -> None:
    await aio.write_greeting(writer, Welcome())
    await reader.read()


@pytest.mark.parametrize("times", [20])
def test_he_is_refused_by_both_every_time_and_hears_nothing(times: int, figures: Figures) -> None:
    async def story() -> None:
        asked: list[Hello] = []

        async def greeted(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
        ) -> None:
            asked.append(hello)
            await welcomes(reader, writer, hello, node)

        member, client = members(2)
        real = aio.Server("127.0.0.1", 0, member, greeted)
        hello = Hello("node", job=NAME)
        _, writer, _ = await aio.connect("127.0.0.1", real.port, hello, client, timeout_s=30)
        await aio.end(writer)
        assert len(asked) == 1

        attacker = Attacker(real.port)
        relaying = asyncio.create_task(asyncio.to_thread(attacker.relay, times))
        refused = 0
        for _ in range(times):
            with pytest.raises(Refused, match="nobody has admitted it") as caught:
                await aio.connect("127.0.0.1", attacker.port, hello, client, timeout_s=30)
            assert caught.value.code == "banned"
            refused += 1
        await relaying
        await real.close()
        assert refused == times
        assert len(asked) == 1
        # The server tells him that he is refused, and nothing else; the client says nothing.
        told = GREETING.encode(Refusal("banned", "nobody has admitted it"))
        assert told in attacker.heard
        more = len(b"".join(attacker.heard).replace(told, b""))
        fault = f"a man in the middle with TLS of his own, {times} times"
        figures.take(fault, "heard:", more, asked=0, unit="bytes", page="security")
        let_in = times - refused
        figures.take(fault, "not refused:", let_in, asked=0, unit="times", page="security")

    asyncio.run(story())


def test_without_the_secret_he_cannot_answer_for_the_server() -> None:
    """He speaks TLS at once: the client does not, and says 80 random bytes."""

    async def story() -> None:
        heard: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.readexactly(CALL_BYTES))
            writer.write(b"\x16\x03\x03" + bytes(100))
            heard.append(await reader.read())
            writer.close()

        client = new_credentials()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(PotluckError, match="does not hold this cluster's secret"):
                await aio.connect("127.0.0.1", port, Hello("node"), client)
        assert b"".join(heard[1:]) == b""

    asyncio.run(story())


@pytest.mark.parametrize("does_knock", [False, True])
def test_a_client_without_a_certificate_is_not_heard(does_knock: bool) -> None:
    async def story() -> None:
        asked: list[Greeting] = []

        async def greeted(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, node: str
        ) -> None:
            asked.append(hello)

        member = new_credentials()
        real = aio.Server("127.0.0.1", 0, member, greeted)
        writer = None
        with contextlib.suppress(OSError, SecurityError):
            if does_knock:
                reader, writer = await knocked_streams(real.port, untrusting())
            else:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", real.port, ssl=untrusting(), server_hostname=""
                )
            await aio.write_greeting(writer, Hello("node"))
            assert await asyncio.wait_for(reader.read(), 30) == b""
        if writer is not None:
            await aio.end(writer)
        await real.close()
        assert asked == []

    asyncio.run(story())
