"""Sockets for workers in a sandbox: what they get, and what they do not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from potluck._core.cluster.sharing.broker import FIRST_PORT, MAX_PORTS, MAX_REQUESTS
from potluck._core.transport import aio, broker
from potluck._core.transport.broker import BrokeredSocket, short_path
from potluck._core.transport.handshake import connect
from potluck._core.transport.listener import Admission, Listener, is_port_taken, listening_socket
from potluck._core.wire.broker import Denied, Granted, Listen, decode_answer, encode
from potluck._core.wire.greeting import Hello, Welcome
from potluck.errors import ConfigurationError, LinkError, WrongSecret
from support.links import new_credentials

pytestmark = pytest.mark.skipif(not hasattr(socket, "send_fds"), reason="needs SCM_RIGHTS")


AGENT = """
import asyncio, sys
from pathlib import Path
from potluck._core.cluster.sharing import broker
from potluck._core.cluster.sharing.broker import FIRST_PORT, Broker
from support.links import new_credentials

broker._REQUEST_S = float(sys.argv[2])

async def main():
    credentials, allowed = new_credentials(), set()
    broker = Broker(Path(sys.argv[1]), lambda host, port: (host, port) in allowed,
                    eras=lambda: credentials.eras, bind="", on_broken=print)
    print("up", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        allowed.add((line.split()[0], int(line.split()[1])))
        print("done", flush=True)
    await broker.close()

asyncio.run(main())
"""


class Agent:
    """A process with the broker of a job; this process has its sockets from there."""

    def __init__(self, path: Path, request_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(path), str(request_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout.readline() == "up\n"

    def allow(self, host: str, port: int) -> None:
        """Let workers call there."""
        self._process.stdin.write(f"{host} {port}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()


@pytest.fixture
def agent(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Agent]:
    """In this process, which gets its sockets from it. A parameter is how many seconds a worker has
    to say what it asks for."""
    path = tmp_path / ("a folder with a name longer than an address of a Unix socket " * 2) / "b"
    path.parent.mkdir()
    running = Agent(path, getattr(request, "param", 30.0))
    monkeypatch.setenv(broker.VARIABLE, str(path))
    yield running
    running.close()


def waits(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline, tick = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        tick.wait(0.005)


def call(port: int, agent: Agent, **options: object) -> None:
    agent.allow("127.0.0.1", port)
    link, _ = connect(
        "127.0.0.1",
        port,
        Hello("data"),
        new_credentials(),
        deadline=time.monotonic() + 30,
        max_retries=0,
    )
    link.close()


def test_links_are_made_and_taken_over_its_sockets(agent: Agent) -> None:
    """A listener and a caller in one process without sockets of their own."""
    links = []
    with contextlib.closing(Listener("", 0, new_credentials())) as listener:
        listener.serve(lambda hello, node: Admission(Welcome(), links.append))
        call(listener.port, agent)
        waits(lambda: len(links) == 1)
    for link in links:
        assert "127.0.0.1:" in link.peer
        link.close()


def test_where_the_group_is_not_nobody_is_called(agent: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        other.setblocking(False)
        with pytest.raises(LinkError, match=r"belongs to no worker of this group"):
            connect(
                "127.0.0.1",
                port,
                Hello("data"),
                new_credentials(),
                deadline=time.monotonic() + 30,
                max_retries=0,
            )
        with pytest.raises(OSError, match="belongs to no worker") as caught:
            asyncio.run(aio.dial("127.0.0.1", port))
        assert caught.value.errno == errno.EACCES
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_refused_connection_is_a_refused_connection(agent: Agent) -> None:
    """By that a peer's death is known at once."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    agent.allow("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(aio.dial("127.0.0.1", port))


def test_a_caller_of_the_port_knocks_at_the_broker_before_the_script_hears_of_it(
    agent: Agent,
) -> None:
    asked = []

    def admit(hello: Hello, node: str) -> Admission:
        asked.append(node)
        return Admission(Welcome(), lambda link: link.close())

    with contextlib.closing(Listener("", 0, new_credentials())) as listener:
        listener.serve(admit)
        with socket.create_connection(("127.0.0.1", listener.port), timeout=30) as stranger:
            stranger.sendall(bytes(200))
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b"", "not a byte for strangers"
        with pytest.MonkeyPatch.context() as outside:
            outside.delenv(broker.VARIABLE)
            with pytest.raises(WrongSecret):
                connect(
                    "127.0.0.1",
                    listener.port,
                    Hello("data"),
                    new_credentials("another"),
                    deadline=time.monotonic() + 30,
                    max_retries=0,
                )
        assert asked == []
        call(listener.port, agent)
        assert len(asked) == 1


def test_another_program_at_a_port_that_a_worker_says_is_its_own_hears_nothing_of_it(
    agent: Agent,
) -> None:
    """A worker says itself at which port it listens: a script could say 22."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        agent.allow("127.0.0.1", port)
        asked = []

        def serve() -> None:
            caller, _ = other.accept()
            with caller:
                caller.settimeout(60)
                asked.append(caller.recv(4096))
                caller.sendall(b"SSH-2.0-OpenSSH_9.6p1 Debian-2\r\n")  # as long as an answer
                asked.append(caller.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(WrongSecret, match="does not hold this cluster's secret"):
            asyncio.run(aio.dial("127.0.0.1", port))
        thread.join(60)
        assert [len(each) for each in asked] == [80, 0], (
            "the broker's knock, not the script's bytes"
        )


def test_an_agent_without_descriptors_goes_on_when_it_has_some_again(agent: Agent) -> None:
    """A script in the sandbox can take all that the agent's process may open."""
    files = 48
    _, most = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (files, most))
    with contextlib.ExitStack() as stack:
        for _ in range(2 * files):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.setblocking(False)
            with (
                short_path(Path(os.environ[broker.VARIABLE])) as path,
                contextlib.suppress(BlockingIOError),
            ):
                sock.connect(path)
        waits(lambda: len(os.listdir(f"/proc/{agent.pid}/fd")) >= files)
    with contextlib.closing(Listener("", 0, new_credentials())) as listener:
        listener.serve(lambda hello, node: Admission(Welcome(), lambda link: link.close()))
        call(listener.port, agent)


def test_a_port_is_closed_when_the_worker_is_gone(agent: Agent) -> None:
    listening = listening_socket("", 0)
    with socket.create_connection(("127.0.0.1", listening.port), timeout=30):
        pass
    listening.close()

    def is_closed() -> bool:
        try:
            socket.create_connection(("127.0.0.1", listening.port), timeout=30).close()
        except ConnectionRefusedError:
            return True
        return False

    waits(is_closed)


def test_a_port_that_is_taken_is_named_as_by_the_system(agent: Agent) -> None:
    taken = pytest.raises(ConfigurationError, match="is in use by another program")
    with socket.create_server(("", 0)) as other, taken as caught:
        BrokeredSocket(other.getsockname()[1])
    assert is_port_taken(caught.value)


def asks(agent: Agent, stack: contextlib.ExitStack, request: object = None) -> socket.socket:
    """A worker's connection to the broker, and what it asks for."""
    sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    with short_path(Path(os.environ[broker.VARIABLE])) as path:
        sock.connect(path)
    sock.settimeout(60)
    if request is not None:
        sock.send(encode(request))
    return sock


def test_junk_gets_an_answer(agent: Agent) -> None:
    with contextlib.ExitStack() as stack:
        junk = asks(agent, stack)
        junk.send(b"junk")
        assert isinstance(decode_answer(junk.recv(4096)), Denied)


@pytest.mark.parametrize("agent", [0.5], indirect=True)
def test_workers_that_ask_for_nothing_keep_others_waiting_for_a_moment(agent: Agent) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [asks(agent, stack) for _ in range(MAX_REQUESTS)]
        listening_socket("", 0).close()  # waits until there is room
        assert all(sock.recv(4096) == b"" for sock in crowd), "they are hung up on"


def test_the_ports_of_a_job_are_bounded(agent: Agent) -> None:
    """Each costs the agent descriptors; and a worker hears why it gets none."""
    with contextlib.ExitStack() as stack:
        packets = [asks(agent, stack, Listen(0)).recv(4096) for _ in range(MAX_PORTS + 8)]
        answers = [decode_answer(packet) for packet in packets]
        assert all(isinstance(answer, Granted) for answer in answers[:MAX_PORTS])
        assert all(isinstance(answer, Denied) for answer in answers[MAX_PORTS:])
        with pytest.raises(ConfigurationError, match=f"at most {MAX_PORTS} ports"):
            listening_socket("", 0)
    waits(has_room)


def test_a_sandbox_gets_no_port_of_the_system(agent: Agent) -> None:
    """Also where the agent is root, and could have it."""
    with contextlib.ExitStack() as stack:
        for port in (1, 80, 443, FIRST_PORT - 1):
            answer = decode_answer(asks(agent, stack, Listen(port)).recv(4096))
            assert isinstance(answer, Denied)
            assert answer.errno == errno.EACCES
            assert "no port below 1024" in answer.reason


def has_room() -> bool:
    try:
        listening_socket("", 0).close()
    except ConfigurationError:
        return False
    return True


def test_without_its_agent_a_worker_has_no_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(broker.VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(OSError, match="the agent that started this worker is gone"):
        asyncio.run(aio.dial("127.0.0.1", 1))
    with pytest.raises(ConfigurationError, match="the agent that started this worker is gone"):
        listening_socket("", 0)
