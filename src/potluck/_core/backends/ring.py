"""``RingBackend``: a fixed list of peers over TCP, without an agent and without discovery.

Every worker gets the same list of addresses and its own rank. All workers must hold the cluster
secret (``POTLUCK_HOME``, ``POTLUCK_PSK`` or ``POTLUCK_PASSPHRASE``).
"""

from __future__ import annotations

from collections.abc import Sequence

from potluck._core import hints
from potluck._core.backends.base import StaticBackend
from potluck._core.backends.tcp import TcpBase
from potluck._core.checks import checked_rank
from potluck._core.engine.communicator import Communicator
from potluck._core.settings import Settings, load_settings
from potluck._core.types import Group, Member
from potluck.errors import ConfigurationError


class RingBackend(StaticBackend[Communicator]):
    """One rank of a fixed group. ``peers`` is the list of all ranks' ``"host:port"``, in rank
    order.

    Ranks may be started in any order; forming the group waits for all of them. ConfigurationError
    for an invalid list or rank, and if this rank's port is taken.
    """

    no_next_group = "a fixed list of peers has no next group"

    @hints.arguments(hints.BACKEND)
    def __init__(
        self, peers: Sequence[str], rank: int, *, settings: Settings | None = None
    ) -> None:
        if isinstance(peers, str):
            raise ConfigurationError(f"peers is the list of all ranks' addresses, not {peers!r}")
        members = tuple(
            Member(str(index), host=host, port=port, local_rank=0)
            for index, (host, port) in enumerate(map(parse_address, peers))
        )
        if len(set(peers)) != len(peers):
            raise ConfigurationError(f"two ranks have the same address in {list(peers)}")
        rank = checked_rank("rank", rank, len(members))
        if not 0 <= rank < len(members):
            raise ConfigurationError(
                f"rank {rank} is not in a list of {len(members)} peers; ranks begin at 0"
            )
        self._group = Group(1, rank, members)
        self._base = TcpBase("", members[rank].port, settings or load_settings())

    def _form(self, timeout_s: float) -> Communicator:
        return self._base.open_linked(
            self._group, timeout_s, are_listening=False, missing=self._missing
        )

    def _missing(self, communicator: Communicator) -> str:
        """The ranks without a link to this one, in words; empty if there are none."""
        group, linked = self._group, communicator.metrics.snapshot().links
        missing = [
            f"rank {rank} at {member.host}:{member.port}"
            for rank, member in enumerate(group.members)
            if rank != group.rank and f"worker {member.worker}" not in linked
        ]
        if not missing:
            return ""
        return (
            f"rank {group.rank} waits for {', '.join(missing)} (of {len(group.members)} ranks); "
            "are all started, with the same list of peers?"
        )

    def close(self) -> None:
        self._base.close()


def parse_address(text: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[ipv6]:port"`` as a pair; ConfigurationError otherwise."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not is_number or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"{text!r} is not an address; write host:port, for example 192.168.1.20:52416"
        )
    return host, int(port)
