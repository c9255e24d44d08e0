"""Clients and servers of services that are killed: real processes, TLS, SIGKILL."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import potluck
from potluck._core.backends.service_transport import TcpServiceTransport
from potluck._core.backends.tcp import TcpBase
from potluck._core.settings import Settings
from potluck._core.types import Group, Member
from potluck.errors import PotluckError, ServiceLost
from potluck.services import Services
from support.commands import Command
from support.links import make_credentials, psk

SCRIPT = Path(__file__).parent / "scripts" / "service_worker.py"
LATE_S = 20.0


@potluck.service("sink")
class Sink:
    """Takes arrays; each that arrives is whole."""

    def __init__(self) -> None:
        self.num_pushed = 0

    def push(self, call: potluck.Call, array: Any) -> int:
        assert array.nbytes == 32 << 20
        assert array[0] == array[-1] == 1
        assert call.rank == -1
        self.num_pushed += 1
        return self.num_pushed

    def count(self, call: potluck.Call) -> int:
        return self.num_pushed


@contextlib.contextmanager
def worker(tmp_path: Path, *others: Member) -> Iterator[tuple[Services, TcpBase]]:
    """The services of a worker named ``server`` in this process; ``others`` are in its group."""
    base = TcpBase("127.0.0.1", 0, Settings(home=tmp_path / "here", psk=psk().hex()))
    me = Member("server", base.credentials.node_id, "127.0.0.1", base.port)
    group = Group(1, 0, (me, *others), job="job")
    transport = TcpServiceTransport(base.switchboard)
    again = Member("me")  # is in the next group
    access = Services(
        transport, lambda: group, lambda: (again,), timeout_s=LATE_S, max_bytes=1 << 30
    )
    try:
        yield access, base
    finally:
        access.close()
        base.close()


def other(tmp_path: Path, *arguments: str, secret: str = psk().hex()) -> Command:
    return Command(
        [sys.executable, str(SCRIPT), *arguments],
        env={"POTLUCK_PSK": secret, "POTLUCK_HOME": str(tmp_path / "there")},
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [3, pytest.param(100, marks=pytest.mark.long)])
def test_clients_killed_in_mid_push_are_noticed_by_nobody(num_kills: int, tmp_path: Path) -> None:
    chance = random.Random(20261123)
    sink = Sink()
    with worker(tmp_path) as (access, base):
        access.serve(sink)
        mine = access.connect("sink", 0, LATE_S)
        is_over, errors = threading.Event(), []

        def go_on_calling() -> None:
            while not is_over.is_set():
                try:
                    mine.count(timeout=LATE_S)
                except PotluckError as error:
                    errors.append(error)
                    return

        caller = threading.Thread(target=go_on_calling)
        caller.start()
        try:
            for _ in range(num_kills):
                arguments = ("push", f"127.0.0.1:{base.port}", base.credentials.node_id)
                with other(tmp_path, *arguments) as client:
                    client.wait_for("pushing")
                    is_over.wait(chance.uniform(0, 0.1))
                    client.signal(SIGKILL)
                    client.finish()
        finally:
            is_over.set()
            caller.join()
        assert errors == []
        server = access._server
        deadline = time.monotonic() + LATE_S
        # A caller has its answer before the server has ended the call.
        while server._budget.used or len(server._clients) > 1:
            assert time.monotonic() < deadline, (server._budget.used, server._clients)
            threading.Event().wait(0.01)
        assert len(server._clients) == 1  # of this process
        assert mine.count() == sink.num_pushed


def test_a_killed_server_ends_each_call_at_once(tmp_path: Path) -> None:
    with other(tmp_path, "serve") as server:
        words = server.wait_for("serving at").split()
        there = Member("me", words[-1], "127.0.0.1", int(words[2]))
        with worker(tmp_path, there) as (access, _):
            slow = access.connect("slow", 1, LATE_S)
            ended: list[float] = []

            def call() -> None:
                with pytest.raises(ServiceLost, match=r"slow.wait\(\) on worker me was cut off"):
                    slow.wait()
                ended.append(time.monotonic())

            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            since = 0
            for _ in threads:
                server.wait_for("called", since=since)
                since += server.lines[since:].index("called") + 1
            killed = time.monotonic()
            server.signal(SIGKILL)
            for thread in threads:
                thread.join(LATE_S)
            assert len(ended) == 4
            took = max(ended) - killed
            print(f"4 calls ended {took * 1e3:.0f} ms after the kill")
            assert took < LATE_S / 2  # not by their deadline
            with pytest.raises(ServiceLost, match="was not called"):
                slow.wait()


def test_a_client_of_another_cluster_hears_nothing(tmp_path: Path) -> None:
    sink = Sink()
    with worker(tmp_path) as (access, base):
        access.serve(sink)
        arguments = ("push", f"127.0.0.1:{base.port}", base.credentials.node_id)
        with other(tmp_path, *arguments, secret="cd" * 32) as client:
            # It looks for the service until its deadline; nothing but the knock is answered.
            client.lacks("pushing", 1.5)
        mine = access.connect("sink", 0, LATE_S)
        assert mine.count() == 0
        # Its own, of which the one that asked for names may end a moment later.
        nodes = {each.caller.node for each in tuple(access._server._clients)}
        assert nodes == {base.credentials.node_id}


def _itself(group: Group) -> Group:
    return group


def test_a_ban_ends_the_connections_in_both_directions(tmp_path: Path) -> None:
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    banned: list[dict[str, str]] = [{}, {}]
    with contextlib.ExitStack() as stack:
        bases = []
        for key, out in zip(keys, banned, strict=True):
            settings = Settings(home=tmp_path, psk=psk().hex())
            base = TcpBase("127.0.0.1", 0, settings, make_credentials(psk(), key, out.get))
            stack.callback(base.close)
            bases.append(base)
        members = tuple(
            Member(name, base.credentials.node_id, "127.0.0.1", base.port)
            for name, base in zip("ab", bases, strict=True)
        )
        sides = []
        for rank, base in enumerate(bases):
            group = Group(1, rank, members, job="job")
            transport = TcpServiceTransport(base.switchboard)
            side = Services(
                transport, functools.partial(_itself, group), timeout_s=LATE_S, max_bytes=1 << 30
            )
            stack.callback(side.close)
            side.serve(Sink())
            sides.append(side)
        remotes = [sides[0].connect("sink", 1, LATE_S), sides[1].connect("sink", 0, LATE_S)]
        assert [each.count() for each in remotes] == [0, 0]
        banned[0][members[1].node] = "banned by a test"
        with pytest.raises(ServiceLost, match=r"was not called.*banned by a test"):
            remotes[0].count()  # the side that knows calls no more
        server = sides[0]._server
        deadline = time.monotonic() + LATE_S
        while server._clients and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert not server._clients
        with pytest.raises(ServiceLost):
            remotes[1].count()
