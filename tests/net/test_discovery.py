"""Hosts that find each other with nothing configured, and those that must not get in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from potluck._core.cluster.trust.credentials import load_or_create_identity
from potluck._core.transport.credentials import node_id_of
from support.clusters import lock
from support.figures import Figures
from support.hosts import Host, Network
from support.talking import TalkingProcess

pytestmark = pytest.mark.needs_root_netns

PSK, OTHER = "ab" * 32, "cd" * 32
FORM_S = 5.0
WAIT_S = 120.0

SCRIPT = """
import json, sys, time
import numpy as np
from potluck._core.backends.discovery import AutoDiscoveryBackend
from potluck._core.context import DistributedContext
from potluck.errors import PotluckError

world, patience = int(sys.argv[1]), float(sys.argv[2])
print(json.dumps({"said": "ready"}), flush=True)
sys.stdin.readline()
start = time.monotonic()
backend = AutoDiscoveryBackend(world)
try:
    with DistributedContext(backend, timeout_s=patience) as context:
        seconds = time.monotonic() - start
        marker = np.frombuffer(b"MARKER-IN-A-TENSOR-OF-NO-OTHER-USE!!!!!!" * 20_000, np.uint8)
        total = context.broadcast(marker.copy(), root=0)
        print(json.dumps({"said": "in", "seconds": seconds, "rank": context.rank,
                          "world": context.world_size,
                          "nodes": [member.node for member in context.members],
                          "equal": bool((total == marker).all())}), flush=True)
        sys.stdin.readline()
except PotluckError as error:
    print(json.dumps({"said": "out", "why": str(error), "found": len(backend.peers)}), flush=True)
    backend.close()
"""

SNIFFER = """
import select, socket, sys
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: miss nothing
sock.bind(("eth0", 0))
marker, count, seen = b"MARKER-IN-A-TENSOR", 0, 0
print("listening", flush=True)
while True:
    ready, _, _ = select.select([sock, sys.stdin], [], [])
    if sock in ready:
        data = sock.recv(1 << 20)
        count += len(data)
        seen += marker in data
    elif sys.stdin in ready:
        print(count, seen, flush=True)
        break
"""

HOLDER = """
import socket, sys
socks = [socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_INET6)]
socks[1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
for sock in socks:
    sock.bind(("", 5353))  # without SO_REUSEADDR or SO_REUSEPORT
print("holds 5353", flush=True)
sys.stdin.readline()
"""


class Script(TalkingProcess):
    """SCRIPT in a host, with a home, and what it says line by line."""

    def __init__(self, host: Host, home: Path, world: int, psk: str, ways: str, **more: str):
        # Hosts in namespaces share a kernel, and could share memory: not these.
        environment = {
            "POTLUCK_HOME": str(home),
            "POTLUCK_DISCOVERY": ways,
            "POTLUCK_USE_SHARED_MEMORY": "no",
            **more,
        }
        if psk:
            environment["POTLUCK_PSK"] = psk
        patience = more.get("PATIENCE", "40")
        process: subprocess.Popen[str] = host.start(
            [sys.executable, "-c", SCRIPT, str(world), patience],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        super().__init__(process, timeout_s=WAIT_S)


@contextmanager
def running(*scripts: Script) -> Iterator[None]:
    """All are started before any may begin, so that times are not those of imports."""
    try:
        for script in scripts:
            assert script.hears() == {"said": "ready"}
        for script in scripts:
            script.go()
        yield
        for script in scripts:
            script.process.communicate("\n", timeout=WAIT_S)
    finally:
        for script in scripts:
            script.end()


@pytest.mark.parametrize("ways", ["mdns", "beacon", "static"])
def test_three_hosts_find_each_other_by_one_way_alone(
    ways: str, figures: Figures, tmp_path: Path
) -> None:
    with Network(3) as network:
        more = {"POTLUCK_PEERS": ",".join(host.address for host in network)}
        scripts = [
            Script(host, tmp_path / str(host.index), 3, PSK, ways, **more) for host in network
        ]
        with running(*scripts):
            said = [script.hears() for script in scripts]
    assert [each["said"] for each in said] == ["in"] * 3, said
    assert sorted(each["rank"] for each in said) == [0, 1, 2]
    assert all(each["equal"] and each["nodes"] == said[0]["nodes"] for each in said)
    seconds = max(each["seconds"] for each in said)
    figures.take(f"three hosts, {ways} alone", "in one group after", seconds, asked=FORM_S)


@pytest.mark.parametrize("ways", ["mdns,static", "mdns,beacon,static"])
def test_hosts_whose_mdns_port_another_program_holds_find_each_other_by_the_beacon(
    ways: str, figures: Figures, tmp_path: Path
) -> None:
    """avahi-daemon with disallow-other-stacks=yes, say; and nobody has written an address."""
    with Network(2) as network:
        holders = [
            host.start(
                [sys.executable, "-c", HOLDER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in network
        ]
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds 5353\n"
        patience = {} if "beacon" in ways else {"PATIENCE": "4"}
        scripts = [
            Script(host, tmp_path / str(host.index), 2, PSK, ways, **patience) for host in network
        ]
        with running(*scripts):
            said = [script.hears() for script in scripts]
        for holder in holders:
            holder.communicate("\n", timeout=WAIT_S)
    if "beacon" not in ways:
        assert [(each["said"], each["found"]) for each in said] == [("out", 0)] * 2, said
        return
    assert [each["said"] for each in said] == ["in"] * 2, said
    seconds = max(each["seconds"] for each in said)
    fault = "two hosts, another program holds mDNS's port"
    figures.take(fault, "in one group after", seconds, asked=FORM_S)


def test_another_secret_no_secret_and_a_key_not_on_the_list_stay_out_while_two_work(
    figures: Figures, tmp_path: Path
) -> None:
    with Network(5) as network:
        homes = [tmp_path / str(host.index) for host in network]
        banned = node_id_of(load_or_create_identity(homes[4]).public_key())
        lock(*homes[:2], psk=PSK)
        peers = {"POTLUCK_PEERS": ",".join(host.address for host in network)}
        ways = "mdns,beacon,static"
        sniffer: subprocess.Popen[str] = network[1].start(
            [sys.executable, "-c", SNIFFER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline() == "listening\n"
        guests = [
            Script(network[2], homes[2], 3, OTHER, ways, **peers, PATIENCE="3"),
            Script(network[3], homes[3], 3, "", ways, **peers, PATIENCE="3"),
            Script(network[4], homes[4], 3, PSK, ways, **peers, PATIENCE="3"),
        ]
        members = [Script(network[i], homes[i], 2, PSK, ways, **peers) for i in (0, 1)]
        with running(*guests, *members):
            inside = [script.hears() for script in members]
            outside = [script.hears() for script in guests]
        counted, _ = sniffer.communicate("\n", timeout=WAIT_S)
    assert [each["said"] for each in inside] == ["in", "in"], inside
    assert all(each["equal"] and banned not in each["nodes"] for each in inside)
    assert [each["said"] for each in outside] == ["out"] * 3, outside
    assert [each["found"] for each in outside[:2]] == [0, 0]
    num_bytes, num_seen = map(int, counted.split())
    assert num_bytes > 800_000, "the tensor itself must have been on the wire"
    fault = f"a marker tensor of 800,000 bytes, sniffed ({num_bytes:,} bytes) at a member's cable"
    figures.take(fault, "marker seen:", num_seen, asked=0, unit="times", page="security")
