"""Hosts on one machine: network namespaces, joined by a bridge, with links of a chosen speed.

    with Network(2, rate="1gbit") as (left, right):
        server = left.start(["python", "server.py", left.address])
        right.run(["python", "client.py", left.address], timeout_s=30)
        left.link(up=False)                # its cable is out
        left.link(up=True)
        right.blackhole(left)              # one way: what right sends to left is dropped
    right.routes(False)                # it has no way to anybody
        right.lose(0.01)                   # 1% of the packets that come to right

A host has a network of its own: its loopback, its ``eth0`` with an IPv4 and an IPv6 address, its
routes and its firewall. Files, processes and the clock are the machine's. Multicast and broadcast
reach all hosts of a network; nothing leaves it. Needs Linux, root and iproute2 (``lose`` also
nftables); ``missing()`` says what is not there.

Whatever runs in a host when the network closes is killed. A process that was killed before it
could close its networks leaves their namespaces behind; the next ``Network`` of anyone removes
them. Their names hold the number and the starting time of the process that made them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from potluck._core.system import SIGKILL

INTERFACE = "eth0"
"""Every host's interface to its network."""

_BRIDGE = "bridge"
_NAME = re.compile(r"potluck-(\d+)\.(\d+)-\d+-\w+")
_COMMAND_S = 60.0
_GONE_S = 60.0
_number = itertools.count()
_lock = threading.Lock()


AGENT_PORT = 52415


class HostError(RuntimeError):
    """A command that makes or changes a network failed; says which, and what it wrote."""


@functools.cache
def missing() -> str:
    """Why this machine can't make hosts, and what would help; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"needs the program {program!r} (Debian, Ubuntu: apt-get install iproute2)"
    try:
        with Network(1):
            return ""
    except HostError as error:
        return f"this system makes no hosts in network namespaces: {error}"


class Host:
    """One host of a ``Network``; its number there is ``index``."""

    def __init__(self, network: Network, index: int) -> None:
        self.network = network
        self.index = index
        self.namespace = f"{network.name}-h{index}"
        self.address = f"10.88.0.{index + 1}"
        """IPv4 address of ``eth0``; the network is 10.88.0.0/24 in every ``Network``."""
        self.address6 = f"fd88::{index + 1:x}"
        """IPv6 address of ``eth0``, in fd88::/64."""

    @functools.cached_property
    def link_local(self) -> str:
        """The IPv6 address of ``eth0`` that the kernel gave it, in fe80::/64."""
        shown = _run(["ip", "-n", self.namespace, "-6", "-j", "addr", "show", "dev", INTERFACE])
        addresses = json.loads(shown.stdout)[0]["addr_info"]
        return next(str(each["local"]) for each in addresses if each["scope"] == "link")

    @functools.cached_property
    def mac(self) -> str:
        """The address of ``eth0`` in Ethernet frames."""
        shown = _run(["ip", "-n", self.namespace, "-j", "link", "show", "dev", INTERFACE])
        return str(json.loads(shown.stdout)[0]["address"])

    @property
    def port(self) -> str:
        """The other end of this host's cable: an interface of the bridge's namespace."""
        return f"port{self.index}"

    def command(self, arguments: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command line that runs ``arguments`` in this host."""
        return ["ip", "netns", "exec", self.namespace, *(os.fspath(each) for each in arguments)]

    def start(
        self, arguments: Sequence[str | os.PathLike[str]], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program in this host; ``options`` are Popen's. Its pid is the program's own."""
        return subprocess.Popen(self.command(arguments), **options)

    def run(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        timeout_s: float = _COMMAND_S,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in this host to its end; HostError if it fails or takes too long."""
        return _run(self.command(arguments), timeout_s=timeout_s, **options)

    def link(self, *, up: bool) -> None:
        """Plug the host's cable in or out; returns when it carries packets, or does not.

        The host's sockets are not told of it: they only hear silence.
        """
        # At the bridge's side, so that the host keeps its routes.
        self.network.ip("link", "set", self.port, "up" if up else "down")
        if up:
            self.wait_until_up()

    def wait_until_up(self, timeout_s: float = 60.0) -> None:
        """The kernel tells both ends that a cable is in up to a second later; wait for that."""
        deadline = time.monotonic() + timeout_s
        while not (
            self._has_carrier(self.network.bridge, self.port, "forwarding")
            and self._has_carrier(self.namespace, INTERFACE)
        ):
            if time.monotonic() > deadline:
                raise HostError(f"{self!r}: its cable is in, but does not come up")
            time.sleep(0.02)  # each look is two commands

    def _has_carrier(self, namespace: str, interface: str, state: str = "") -> bool:
        shown = _run(["ip", "-n", namespace, "-d", "-j", "link", "show", "dev", interface])
        link = json.loads(shown.stdout)[0]
        as_port = link["linkinfo"].get("info_slave_data", {})
        return link["operstate"] == "UP" and (not state or as_port.get("state") == state)

    def blackhole(self, other: Host, *, on: bool = True) -> None:
        """Drop what this host sends to ``other`` (one way only), silently; or stop that."""
        verb = "replace" if on else "delete"
        # A blackhole route of the kernel would give senders an error; an unused neighbour swallows.
        local = (other.link_local, "-6")
        for address, kind in ((other.address, "-4"), (other.address6, "-6"), local):
            arguments = ("neigh", verb, address, "dev", INTERFACE)
            hole = ("lladdr", "02:00:00:00:00:00", "nud", "permanent") if on else ()
            self._ip(kind, *arguments, *hole)

    def routes(self, on: bool) -> None:
        """Give this host blackhole routes to everybody in its network instead of its own, or give
        it those back. What it has to send is lost; connects fail at once."""
        # Two halves are more specific than the one that the kernel made for the interface.
        for half in ("10.88.0.0/25", "10.88.0.128/25", "fd88::/65", "fe80::/65", "224.0.0.0/4"):
            kind = "-6" if ":" in half else "-4"
            if on:
                self._ip(kind, "route", "delete", "blackhole", half)
            else:
                self._ip(kind, "route", "replace", "blackhole", half)

    def drop_workers(self, other: Host, *, on: bool = True) -> None:
        """Drop what comes from ``other``, but for the connections of agents, as a firewall does
        that knows the agents' port only; or stop that."""
        _need_nft()
        rules = "table inet workers\ndelete table inet workers\n"
        if on:
            rules += (
                "table inet workers {\nchain drops {\ntype filter hook input priority 0;\n"
                f"tcp dport {AGENT_PORT} accept\n"
                f"tcp sport {AGENT_PORT} accept\n"
                f"iifname {INTERFACE} ether saddr {other.mac} meta l4proto tcp drop\n"
                "}\n}\n"
            )
        self.run(["nft", "-f", "-"], input=rules)

    def refuse(self, other: Host, *, on: bool = True) -> None:
        """Let this host have no route to ``other``: senders get an error at once; or stop that."""
        for address, bits, kind in ((other.address, 32, "-4"), (other.address6, 128, "-6")):
            verb = "replace" if on else "delete"
            self._ip(kind, "route", verb, "unreachable", f"{address}/{bits}")

    def lose(self, fraction: float) -> None:
        """Drop this part (0 to 1) of the packets that come in, at random; 0 ends it."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"a part of the packets is between 0 and 1, not {fraction}")
        _need_nft()
        rules = "table inet potluck\ndelete table inet potluck\n"
        if fraction:
            some = f" numgen random mod 1000000 < {round(fraction * 1e6)}" if fraction < 1 else ""
            rules += (
                "table inet potluck {\nchain loss {\ntype filter hook input priority 0;\n"
                f"iifname {INTERFACE}{some} drop\n"
                "}\n}\n"
            )
        self.run(["nft", "-f", "-"], input=rules)

    def shape(self, rate: str | None, *, burst: int | None = None) -> None:
        """Hold both directions of this host's cable to ``rate`` (tc's words: ``1gbit``), or not.

        By a token bucket: ``burst`` bytes may pass at once (by default half a millisecond's,
        at least 256 KiB), and a queue of 50 ms holds the rest, beyond which packets are lost.
        A small ``burst`` makes small messages as slow as a real cable does; it also bounds the
        kernel's packets (up to 64 KiB before a network card cuts them), since the bucket would cut
        a larger packet at a great cost.
        """
        ends = ((self.namespace, INTERFACE), (self.network.bridge, self.port))
        for namespace, interface in ends:
            if rate is None:
                with contextlib.suppress(HostError):  # there was none
                    _run(["tc", "-n", namespace, "qdisc", "del", "dev", interface, "root"])
                continue
            _shape(namespace, interface, rate, burst)

    def pids(self) -> list[int]:
        """The processes that run in this host."""
        return _pids(self.namespace)

    def _ip(self, *arguments: str) -> None:
        _run(["ip", "-n", self.namespace, *arguments])

    def __repr__(self) -> str:
        return f"<host {self.index} of {self.network.name} at {self.address}>"


class Network(Sequence[Host]):
    """``num_hosts`` hosts, each with one cable to the same bridge. A context manager.

    ``rate`` and ``burst``: see ``Host.shape``; without a rate as fast as the machine can. HostError
    if it can't be made, and then nothing is left of it. Takes about 50 ms per host.
    """

    def __init__(self, num_hosts: int, *, rate: str | None = None, burst: int | None = None):
        if not 1 <= num_hosts <= 250:
            raise ValueError(f"a network has 1 to 250 hosts, not {num_hosts}")
        with _lock:
            remove_stale()
        me = os.getpid()
        self.name = f"potluck-{me}.{_started(me)}-{next(_number)}"
        self.bridge = f"{self.name}-{_BRIDGE}"
        self._hosts = [Host(self, index) for index in range(num_hosts)]
        self._is_closed = False
        try:
            self._make(rate, burst)
        except BaseException:
            self.close()
            raise

    def ip(self, *arguments: str) -> None:
        """``ip ARGUMENTS`` in the bridge's namespace; its interface ``portI`` is host I's."""
        _run(["ip", "-n", self.bridge, *arguments])

    def partition(self, *sides: Sequence[Host]) -> None:
        """Let hosts hear only those of their own side, from one moment to the next."""
        orders = []
        for number, side in enumerate(sides[1:], start=1):
            with contextlib.suppress(HostError):  # it is there from the last time
                self.ip("link", "add", f"br{number}", "type", "bridge", "mcast_snooping", "0")
                self.ip("link", "set", f"br{number}", "up")
            orders += [f"link set {host.port} master br{number}" for host in side]
        _batch(self.bridge, orders)

    def heal(self) -> None:
        """Join all sides again; returns when packets pass."""
        _batch(self.bridge, (f"link set {host.port} master br0" for host in self))
        for host in self:
            host.wait_until_up()

    def second(self, *, rate: str | None = None, interface: str = "wlan0") -> None:
        """Give every host a second interface, to a second network: 10.89.0.0/24 (the same last
        number as in the first), fd89::/64. ``rate`` is what each may send and be sent."""
        self.ip("link", "add", "second", "type", "bridge", "mcast_snooping", "0")
        self.ip("link", "set", "second", "up")
        for host in self._hosts:
            port = f"second{host.index}"
            peer = ("peer", "name", interface, "netns", host.namespace)
            self.ip("link", "add", port, "type", "veth", *peer)
            self.ip("link", "set", port, "master", "second", "up")
            number = host.index + 1
            host._ip("addr", "add", f"10.89.0.{number}/24", "brd", "+", "dev", interface)
            host._ip("addr", "add", f"fd89::{number:x}/64", "dev", interface, "nodad")
            host._ip("link", "set", interface, "up")
            for namespace, device in ((host.namespace, interface), (self.bridge, port)):
                if rate is not None:
                    _shape(namespace, device, rate)

    def close(self) -> None:
        """Kill what still runs in the hosts and remove them. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        remaining = set(_namespaces())
        for namespace in (*(host.namespace for host in self._hosts), self.bridge):
            if namespace in remaining:
                _remove(namespace)

    def _make(self, rate: str | None, burst: int | None) -> None:
        # A batch is one process in the place of one for each order.
        names = [self.bridge, *(host.namespace for host in self._hosts)]
        _batch("", (f"netns add {name}" for name in names))
        cables = (
            (
                f"link add {host.port} type veth peer name {INTERFACE} netns {host.namespace}",
                f"link set {host.port} master br0 up",
            )
            for host in self._hosts
        )
        orders = [
            "link set lo up",
            # Without snooping multicast goes to all ports at once, as through a plain home switch.
            "link add br0 type bridge stp_state 0 mcast_snooping 0",
            "link set br0 up",
            *(order for cable in cables for order in cable),
        ]
        _batch(self.bridge, orders)
        for host in self._hosts:
            orders = [
                "link set lo up",
                f"addr add {host.address}/24 brd + dev {INTERFACE}",
                f"addr add {host.address6}/64 dev {INTERFACE} nodad",
                f"link set {INTERFACE} up",
                f"route add default dev {INTERFACE}",  # multicast, too
            ]
            _batch(host.namespace, orders)
            if rate is not None:
                host.shape(rate, burst=burst)
        for host in self._hosts:
            host.wait_until_up()

    @overload
    def __getitem__(self, index: int) -> Host: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Host]: ...
    def __getitem__(self, index: int | slice) -> Host | Sequence[Host]:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _need_nft() -> None:
    if shutil.which("nft") is None:
        raise HostError("needs the program 'nft' (Debian, Ubuntu: apt-get install nftables)")


def remove_stale() -> list[str]:
    """Remove the namespaces of processes that are gone, and what runs in them; their names."""
    removed = []
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match is None or _started(int(match[1])) == match[2]:
            continue
        with contextlib.suppress(HostError):  # another process may be removing it, too
            _remove(name)
            removed.append(name)
        deadline = time.monotonic() + _GONE_S
        while name in _namespaces() and time.monotonic() < deadline:
            time.sleep(0.005)
    return removed


def _namespaces() -> Iterator[str]:
    folder = Path("/run/netns")
    return (path.name for path in folder.iterdir()) if folder.is_dir() else iter(())


def _pids(namespace: str) -> list[int]:
    """The processes in a namespace, as ``ip netns pids`` finds them."""
    try:
        wanted = os.stat(f"/run/netns/{namespace}")
    except FileNotFoundError as error:  # another process may be removing it, too
        raise HostError(f"there is no namespace {namespace}") from error
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # It has ended, or is one of the system's own.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if os.path.samestat(os.stat(f"/proc/{entry}/ns/net"), wanted):
                    found.append(int(entry))
    return found


def _batch(namespace: str, orders: Iterable[str]) -> None:
    """Orders of ``ip`` in a namespace, or where this process is."""
    where = ["-n", namespace] if namespace else []
    _run(["ip", *where, "-batch", "-"], input="\n".join(orders))


def _remove(namespace: str) -> None:
    """Kill its processes, wait until they are gone, and delete it."""
    deadline = time.monotonic() + _GONE_S
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
        if time.monotonic() > deadline:
            raise HostError(f"{namespace}: processes {pids} do not end")
        time.sleep(0.005)
    _run(["ip", "netns", "delete", namespace])


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks since boot; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def _shape(namespace: str, interface: str, rate: str, burst: int | None = None) -> None:
    if burst is not None:
        largest = str(min(1 << 16, burst * 4 // 5))
        _run(["ip", "-n", namespace, "link", "set", "dev", interface, "gso_max_size", largest])
    bucket = burst or max(256 << 10, round(_bits_per_s(rate) / 8 * 0.0005))
    _run(
        [
            *("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root"),
            *("tbf", "rate", rate, "burst", str(bucket), "latency", "50ms"),
        ]
    )


def _bits_per_s(rate: str) -> float:
    match = re.fullmatch(r"([\d.]+)([kmgt]?)bit", rate.lower())
    if match is None:
        raise ValueError(f"{rate!r} is not a rate: write 100mbit, 1gbit or 10gbit")
    return float(match[1]) * 1000.0 ** " kmgt".index(match[2] or " ")


def _run(
    command: Sequence[str], *, timeout_s: float = _COMMAND_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    except FileNotFoundError as error:
        raise HostError(f"there is no program {command[0]!r}") from error
    except subprocess.TimeoutExpired as error:
        raise HostError(f"{' '.join(command)}: still running after {timeout_s:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise HostError(f"{' '.join(command)}: exit code {done.returncode}: {said}")
    return done
