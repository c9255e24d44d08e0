"""Where the ranks of a comparison run: here, in hosts of a shaped network, or on several machines.

On several machines every machine runs the same comparison in step, each with its own rank of every
peer; ``exchange`` merges what they find, so that all decide alike.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from potluck.cluster.discovery.interfaces import interface_of
from potluck.errors import ConfigurationError, PotluckError

_MEET_S = 600.0
_EXCHANGE_S = 900.0


class BenchError(PotluckError):
    """A peer did not start, failed, or gave no answer; the text says which rank, and its words."""


class Here:
    """All ranks on this machine, over its loopback. Others are like it, but for what they say."""

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
        """How the other ranks reach it."""
        return "127.0.0.1"

    def local_rank(self, rank: int) -> int:
        """Its number on its machine."""
        return rank

    def exchange(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        """``found`` of every process that starts ranks, in the order of their ranks."""
        return [found]


class OnCluster(Here):
    """One rank of every peer per machine; ``peers`` are the machines' ``host:port``, ``rank`` ours.

    Waits until all machines are there. The ports are for the comparison itself (potluck's links,
    under the cluster secret that all must hold); the peers under test take any free ones.
    """

    is_one_machine = False

    def __init__(self, peers: Sequence[str], rank: int) -> None:
        from potluck.backends.addresses import address_towards
        from potluck.backends.ring import parse_address
        from potluck.context import init

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
        """ConfigurationError on all machines if they were not given the same."""
        found = [each["given"] for each in self.exchange({"given": mine})]
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                raise ConfigurationError(
                    f"machine 0 was given {what} {found[0]}, machine {rank} {theirs}; start the "
                    "same command on all, with another --rank"
                )

    def close(self) -> None:
        """Leave the others in order."""
        self._ctx.close()

    def __enter__(self) -> OnCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free ports that, on Linux, nobody but a server that reuses addresses can take meanwhile."""
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
