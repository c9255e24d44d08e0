"""When a proposer that failed may try again."""

from __future__ import annotations

import zlib


class Backoff:
    """The delays of one node, ``me``."""

    def __init__(self, me: str, now: float) -> None:
        self.num_failures = 0
        self.retry_at = now
        self._me = me
        self._reason = ""

    def reset(self, now: float) -> None:
        """There is a new view: nothing has failed in it yet."""
        self.num_failures, self.retry_at, self._reason = 0, now, ""

    def failed(self, reason: str, number: int, now: float) -> bool:
        """The attempt of ballot ``number`` failed. True if ``reason`` is not that of the last."""
        self.num_failures += 1
        # Proposers that outbid each other must not keep step: part of the delay differs by node.
        jitter = zlib.crc32(f"{self._me} {number}".encode()) % 100 / 500
        self.retry_at = now + min(0.1 * self.num_failures, 1.0) + jitter
        is_new, self._reason = reason != self._reason, reason
        return is_new
