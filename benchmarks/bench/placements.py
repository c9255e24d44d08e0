"""Ranks in the hosts of a shaped network, one each."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.bench.placement import Here
from potluck.testing.hosts import INTERFACE, Network


class InHosts(Here):
    """Rank ``i`` in host ``i``."""

    interface = INTERFACE

    def __init__(self, network: Network) -> None:
        self._network = network

    def command(self, rank: int, arguments: Sequence[str]) -> Sequence[str]:
        return self._network[rank].command(arguments)

    def address(self, rank: int) -> str:
        return self._network[rank].address

    def local_rank(self, rank: int) -> int:
        return 0
