"""The testing kit itself: hosts that talk, lose packets, are cut off, and leave nothing behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.forked import Popen
from support.hosts import Host, Network, remove_stale
from support.quiet_imports import ZYGOTE

pytestmark = pytest.mark.needs_root_netns

ECHO = """
import socket, struct, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 5000))
group = socket.inet_aton("224.0.0.77")
server.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + bytes(4))
print("ready", flush=True)
while True:
    data, caller = server.recvfrom(100)
    server.sendto(data, caller)
"""
ASK = """
import socket, sys, time
server, count, patience = (sys.argv[1], 5000), int(sys.argv[2]), float(sys.argv[3])
answers, deadline, is_over = 0, time.monotonic() + patience, False
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.settimeout(0.2)
    try:
        for number in range(count):
            client.sendto(b"%d" % number, server)
        # Answers come in order: all that come are there soon after the one to a last question,
        # which is asked until it is answered.
        while not is_over and time.monotonic() < deadline:
            client.sendto(b"last", server)
            try:
                while not (is_over and answers == count):
                    if client.recv(100) == b"last":
                        is_over = True
                    else:
                        answers += 1
            except TimeoutError:
                pass
        print(answers)
    except OSError as error:
        print(type(error).__name__, error.errno)
"""
SILENCE_S = 0.5


def asked(host: Host, address: str, count: int = 1, patience_s: float = 20.0) -> str:
    """How many of ``count`` questions were answered, or the error of the first."""
    words = [sys.executable, "-c", ASK, address, str(count), str(patience_s)]
    return host.run(words).stdout.strip()


def is_silent(host: Host, address: str) -> bool:
    """Whether no answer comes for half a second."""
    return asked(host, address, patience_s=SILENCE_S) == "0"


def wait_for_line(process: subprocess.Popen[str], timeout_s: float = 120.0) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], timeout_s)[0], "it said nothing in time"
    return process.stdout.readline().strip()


def ended(process: subprocess.Popen[str]) -> int:
    """Its exit code; its pipe is closed."""
    with process:
        return process.wait(timeout=120)


def namespaces() -> set[str]:
    folder = Path("/run/netns")
    return set(os.listdir(folder)) if folder.is_dir() else set()


def test_hosts_hear_each_other_until_they_are_cut_off() -> None:
    with ExitStack() as stack:
        server, client = stack.enter_context(Network(2))
        echo = stack.enter_context(
            server.start([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(server.network.close)
        assert wait_for_line(echo) == "ready"
        assert echo.pid in server.pids()
        assert asked(client, server.address) == "1"
        assert asked(client, "224.0.0.77") == "1"  # multicast

        server.link(up=False)
        assert is_silent(client, server.address)
        server.link(up=True)
        assert asked(client, server.address) == "1"
        client.lose(1.0)
        assert is_silent(client, server.address)
        client.lose(0.5)
        assert 20 <= int(asked(client, server.address, 100)) <= 80  # six deviations
        client.lose(0)
        assert asked(client, server.address, 100) == "100"

        client.blackhole(server)
        assert is_silent(client, server.address)
        client.blackhole(server, on=False)
        client.refuse(server)
        assert asked(client, server.address) == "OSError 113"
        client.refuse(server, on=False)
        server.network.close()
        assert echo.wait(timeout=120) == -signal.SIGKILL  # with the network, its programs end
    assert not any(host.namespace in namespaces() for host in (server, client))


LOOK = """
import os, socket
print(sorted(socket.if_nameindex()), sorted(os.listdir("/sys/class/net")))
print(os.readlink("/proc/self/ns/net"), os.getcwd())
print(open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)))
print([line.split()[1:3] for line in open("/proc/self/mounts") if "sys" in line.split()[1]])
"""


def test_a_program_that_is_forked_in_a_host_finds_what_an_executed_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Network(2) as network:
        words = [sys.executable, "-c", LOOK, "word"]
        with network[1].start(words, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert isinstance(process, Popen)
            assert process.is_forked
            forked = process.communicate()[0].decode()
        monkeypatch.delenv(ZYGOTE)
        assert forked == network[1].run(words).stdout


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    script = (
        "import sys; from support.hosts import Network; network = Network(1)\n"
        "sleeper = network[0].start([sys.executable, '-c', 'input()'])\n"
        "print(network[0].namespace, network.bridge, sleeper.pid, flush=True); input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    *left, _ = wait_for_line(owner).split()
    assert set(left) <= namespaces()
    assert not set(left) & set(remove_stale())  # its owner lives
    owner.kill()
    assert ended(owner) == -signal.SIGKILL
    with Network(1):
        assert not set(left) & namespaces()


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="1 to 250 hosts, not 0"):
        Network(0)
    with pytest.raises(ValueError, match="'fast' is not a rate: write 100mbit"):
        Network(1, rate="fast")
