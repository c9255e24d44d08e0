"""Placements: where the ranks of a comparison run. On this machine, or one rank on each of several.

On several machines each machine runs the same comparison in lockstep, with one rank of every peer;
``exchange`` gathers the results of all, so that all machines take the same decisions.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from potluck._core.cluster.discovery.interfaces import interface_of
from potluck.errors import ConfigurationError, PotluckError

_MEET_S = 600.0
_EXCHANGE_S = 900.0


class BenchError(PotluckError):
    """A peer did not start, failed or gave no answer. The text names the peer and the rank, and
    ends with the last lines of its output."""


class Here:
    """All ranks on this machine, over its loopback; also the base of other placements."""

    interface = "lo0" if sys.platform == "darwin" else "lo"
    """The network interface that Gloo is told to use."""
    is_one_machine = True
    """Whether this process starts all ranks."""

    def ranks(self, world_size: int) -> Sequence[int]:
        """The ranks that this process starts."""
        return range(world_size)

    def command(self, rank: int, arguments: Sequence[str]) -> Sequence[str]:
        """The command line that runs ``arguments`` where ``rank`` belongs."""
        return arguments

    def address(self, rank: int) -> str:
        """The address at which the other ranks reach ``rank``."""
        return "127.0.0.1"

    def local_rank(self, rank: int) -> int:
        """The number of ``rank`` among the ranks of its machine."""
        return rank

    def exchange(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        """Gather ``found`` of all machines, in the order of their ranks. A collective call."""
        return [found]


class OnCluster(Here):
    """One rank of every peer on each machine. ``peers`` are the machines' ``host:port``, and
    ``rank`` is the index of this machine among them.

    The constructor waits up to 10 minutes for the other machines. The ports belong to the
    comparison itself (potluck's links, authenticated by the cluster secret that all machines must
    hold); the peers under test use free ports.
    """

    is_one_machine = False

    def __init__(self, peers: Sequence[str], rank: int) -> None:
        from potluck._core.backends.addresses import address_towards
        from potluck._core.backends.ring import parse_address
        from potluck._core.context import init

        self._hosts = [parse_address(peer)[0] for peer in peers]
        self._ctx = init("ring", peers=peers, rank=rank, timeout_s=_MEET_S)
        self.rank, self.world_size = self._ctx.rank, self._ctx.world_size
        mine = address_towards(self._hosts[self.rank - 1], 9)
        self.interface = interface_of(mine or "") or self.interface

    def ranks(self, world_size: int) -> Sequence[int]:
        return (self.rank,)

    def address(self, rank: int) -> str:
        return self._hosts[rank]

    def local_rank(self, rank: int) -> int:
        return 0

    def exchange(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        mine = np.frombuffer(json.dumps(found).encode(), np.uint8)
        lengths = self._ctx.all_gather(np.array([mine.size]), timeout=_EXCHANGE_S)
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: mine.size] = mine
        rows = self._ctx.all_gather(padded, timeout=_EXCHANGE_S)
        return [
            json.loads(row[: int(length)].tobytes())
            for row, (length,) in zip(rows, lengths, strict=True)
        ]

    def agree(self, what: str, mine: str) -> None:
        """ConfigurationError on all machines if ``mine``, the value of the option ``what``,
        differs."""
        found = [each["given"] for each in self.exchange({"given": mine})]
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                raise ConfigurationError(
                    f"machine 0 was given {what} {found[0]}, machine {rank} {theirs}; run the "
                    "same command on all machines, with only --rank different"
                )

    def close(self) -> None:
        """Leave the group of the machines."""
        self._ctx.close()

    def __enter__(self) -> OnCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free TCP ports. On Linux they stay bound until the end, so that only servers that set
    SO_REUSEADDR, as the peers do, can take them."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("0.0.0.0", 0))
            ports.append(int(sock.getsockname()[1]))
            stack.callback(sock.close)
        if sys.platform != "linux":
            stack.close()
        yield ports
