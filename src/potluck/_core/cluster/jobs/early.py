"""Early orders: job orders from a node that this node does not know as the leader yet.

The view that makes the sender the leader may still be on its way to this node's disk. So its orders
are kept, encoded and in the order they came, until the next view is installed; then the leader's
are carried out and all others are dropped. The bytes kept for one node are bounded. A node that
sends more is cut off; if it is the new leader, it repeats all orders over its next link.
"""

from __future__ import annotations

from potluck._core.wire import jobs, peers
from potluck._core.wire.format import PREFIX_BYTES
from potluck.errors import ProtocolError

OF_ONE_NODE = 4 << 20
OF_ALL_NODES = 16 << 20
"""The most bytes that are kept. A leader sends a few KiB for each job of its cluster."""

_EACH = 128
"""Bytes of memory that a kept message takes beside its encoding, about."""


class EarlyOrders:
    """The early orders of all nodes."""

    def __init__(self) -> None:
        self._orders: list[tuple[str, bytes]] = []
        self._held: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """The bytes that are kept."""
        return sum(self._held.values())

    def keep(self, node: str, order: jobs.JobMessage) -> None:
        """Keep ``order``. ProtocolError, which is to cut ``node`` off, if that would be too much;
        then nothing of it is kept any more."""
        data = peers.MESSAGE.encode(order)[PREFIX_BYTES:]
        size = len(data) + _EACH
        held = self._held.get(node, 0)
        if held + size > OF_ONE_NODE or self.nbytes + size > OF_ALL_NODES:
            self._orders = [(each, kept) for each, kept in self._orders if each != node]
            self._held.pop(node, None)
            raise ProtocolError(
                f"it does not lead the cluster, and ordered more than is kept until it does: "
                f"{(held + size) / 2**20:.1f} MiB after {(self.nbytes) / 2**20:.1f} of others"
            )
        self._orders.append((node, data))
        self._held[node] = held + size

    def take(self) -> list[tuple[str, jobs.FromLeader]]:
        """All that was kept, in the order in which it came; nothing is kept any more."""
        taken, self._orders, self._held = self._orders, [], {}
        orders = [(node, peers.MESSAGE.decode(data)) for node, data in taken]
        return [(node, order) for node, order in orders if isinstance(order, jobs.FromLeader)]
