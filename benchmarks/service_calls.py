"""Time of a call of a service with 1 KiB, between two processes over TLS on the loopback.

    python benchmarks/service_calls.py [--calls 2000] [--rounds 5]
    python benchmarks/service_calls.py --save    # keep the result in benchmarks/results/

Prints the median of each round in microseconds, and their median. Beside it the same bytes over a
bare TCP socket between the same processes, which is what the kernel and two wake-ups take.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import results
from common.script import Page

from potluck._core.backends.service_transport import TcpServiceTransport
from potluck._core.backends.tcp import TcpBase
from potluck._core.settings import Settings
from potluck._core.types import Group, Member
from potluck.cli.bench.machine import heading, machine
from potluck.services import Call, Services, service

NUM_BYTES = 1024


@service("echo")
def echo(call: Call, array: np.ndarray) -> np.ndarray:
    return array


def services(home: Path, secret: str, rank: int, other: Member) -> tuple[Services, Member]:
    base = TcpBase("127.0.0.1", 0, Settings(home=home, psk=secret))
    me = Member(str(rank), base.credentials.node_id, "127.0.0.1", base.port)
    members = (me, other) if rank == 0 else (other, me)
    group = Group(1, rank, members, job="bench")
    transport = TcpServiceTransport(base.switchboard)
    return Services(transport, lambda: group, timeout_s=30.0, max_bytes=1 << 30), me


def serve(home: Path, secret: str) -> None:
    access, me = services(home, secret, 0, Member("1"))
    access.serve(echo)
    bare = socket.create_server(("127.0.0.1", 0))
    print(me.node, me.port, bare.getsockname()[1], flush=True)
    connection, _ = bare.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(NUM_BYTES, socket.MSG_WAITALL):
        connection.sendall(data)
    sys.stdin.read()


def median_us(run: Callable[[], object], num_calls: int) -> float:
    times = []
    for _ in range(num_calls):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=2, metavar=("HOME", "SECRET"))
    results.add_option(parser)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve[0]), options.serve[1])
        return
    page, facts = Page(), machine()
    page.say(heading(facts))
    secret = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", f"{folder}/0", secret]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        node, port, bare_port = server.stdout.readline().split()
        access, _ = services(
            Path(folder, "1"), secret, 1, Member("0", node, "127.0.0.1", int(port))
        )
        remote = access.connect("echo", 0, 20.0)
        array = np.zeros(NUM_BYTES, np.uint8)
        data = array.tobytes()
        bare = socket.create_connection(("127.0.0.1", int(bare_port)))
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ping() -> None:
            bare.sendall(data)
            bare.recv(NUM_BYTES, socket.MSG_WAITALL)

        median_us(lambda: remote.echo(array), 200)
        calls, pings = [], []
        for _ in range(options.rounds):
            calls.append(median_us(lambda: remote.echo(array), options.calls))
            pings.append(median_us(ping, options.calls))
        bare.close()
        access.close()
        server.communicate("")
    for name, rounds in (("call", calls), ("bare TCP", pings)):
        each_us = " ".join(f"{each:.0f}" for each in rounds)
        page.say(f"{name}: {each_us} us, median {statistics.median(rounds):.0f} us")
    result = {
        "benchmark": "service_calls",
        "machine": facts,
        "nbytes": NUM_BYTES,
        "calls_of_a_round": options.calls,
        "call_us": calls,
        "bare_tcp_us": pings,
    }
    results.keep(options.save, result, page.lines)


if __name__ == "__main__":
    main()
