"""Hang detection: which rank holds up an operation that does not end.

The neighbour that a rank waits for is seldom to blame: it may itself wait for another. So ranks
ask each other which of them have made the call.

- *Stalled*: an operation that has run for ``STALL_S`` sends HANG_QUERY with its call's fingerprint
  to the ranks that it waits for. A rank in another call sees the mismatch and raises Desync.
  Without this query two ranks in different calls could wait for each other and never exchange a
  frame.
- *Overdue*: an operation past its deadline sends HANG_QUERY with ``segment`` 1 to all members. A
  receiver that is in the call sends the query on over its own links, because not every pair of
  ranks has a link; the answers (HANG_REPORT: has rank r made this call?) return the same way.

A rank that reports that it has not called is the blocking rank. A rank without a report after
``ANSWER_S`` is one too, but only then: a busy rank answers late, a dead or stopped rank never.
This module keeps what was reported; it sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

STALL_S = 0.25
ANSWER_S = 1.0
_MAX_CHECKS = 64

Key = tuple[int, int]
"""Channel and number of an operation."""


@dataclass(slots=True)
class HangCheck:
    """What is known of one operation: ``reports[rank]`` is whether that rank has made the call."""

    askers: set[int] = field(default_factory=set)
    reports: dict[int, bool] = field(default_factory=dict)

    def blocking_rank(self, ranks: Iterable[int], awaited: Iterable[int], *, final: bool) -> int:
        """The rank that holds the operation up, -1 if none is known (yet).

        ``ranks`` are all other members, ``awaited`` those that this rank waits for. ``final``: the
        time for answers is over, so a missing report counts against its rank.
        """
        for rank, has_called in self.reports.items():
            if not has_called:
                return rank
        if not final:
            return -1
        # Of several silent ranks one that this rank waits for comes first: its silence is known to
        # matter, another's may only come of a broken way between.
        silent = [rank for rank in ranks if rank not in self.reports]
        return next((rank for rank in awaited if rank in silent), silent[0] if silent else -1)


class HangDetector:
    """The latest checks, at most 64: a peer may ask about operations that do not exist."""

    def __init__(self) -> None:
        self._by_key: dict[Key, HangCheck] = {}

    def get(self, key: Key) -> HangCheck | None:
        return self._by_key.get(key)

    def open(self, key: Key) -> tuple[HangCheck, bool]:
        """The check of operation ``key``, and whether it is new."""
        check = self._by_key.get(key)
        if check is not None:
            return check, False
        if len(self._by_key) >= _MAX_CHECKS:
            del self._by_key[next(iter(self._by_key))]
        check = self._by_key[key] = HangCheck()
        return check, True
