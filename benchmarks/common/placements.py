"""Ranks in the hosts of a shaped network, as many in each."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from potluck.cli.bench.placement import Here
from support.hosts import INTERFACE, Network

_AS_ITS_OWN = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
"""``ip netns exec`` has given the program mounts of its own."""


class InHosts(Here):
    """Neighbouring ranks in one host, ``per_host`` of them."""

    interface = INTERFACE

    def __init__(self, network: Network, per_host: int = 1, folder: Path | None = None) -> None:
        """``folder``: for files by which hosts find that they share no memory. Without it they
        find that they do, as they share a kernel: then shared memory must be switched off."""
        self._network = network
        self._folder = folder
        self._per_host = per_host

    def command(self, rank: int, arguments: Sequence[str]) -> Sequence[str]:
        host = self._network[rank // self._per_host]
        if self._folder is None:
            return host.command(arguments)
        identity = self._folder / host.namespace
        identity.write_text(str(uuid.uuid5(uuid.NAMESPACE_DNS, host.namespace)))
        return host.command(["sh", "-c", _AS_ITS_OWN, str(identity), *arguments])

    def address(self, rank: int) -> str:
        return self._network[rank // self._per_host].address

    def local_rank(self, rank: int) -> int:
        return rank % self._per_host
