"""Held messages: what nodes said about a job while its leader could reach no majority.

They are taken when the pause is over. Their bytes are bounded: the oldest are dropped first.
"""

from __future__ import annotations

from collections import deque

from potluck._core.wire import jobs, peers

MAX_BYTES = 16 << 20
_EACH = 512
"""Bytes of memory that a message takes beside its encoding, about."""


class HeldMessages:
    """The messages of all nodes about one job, in the order in which they came."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._messages: deque[tuple[str, jobs.FromNode, int]] = deque()

    def keep(self, node: str, message: jobs.FromNode) -> None:
        """Keep ``message`` of ``node``."""
        size = len(peers.MESSAGE.encode(message)) + _EACH
        self._messages.append((node, message, size))
        self.nbytes += size
        while self.nbytes > MAX_BYTES:
            self.nbytes -= self._messages.popleft()[2]

    def take(self) -> list[tuple[str, jobs.FromNode]]:
        """All that was kept."""
        taken, self._messages, self.nbytes = self._messages, deque(), 0
        return [(node, message) for node, message, _ in taken]
