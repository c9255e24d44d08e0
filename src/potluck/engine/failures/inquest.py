"""Who is in an operation that does not end? Asked when it stalls, judged when it is overdue.

An operation that has run for ``STALL_S`` tells whom it waits for which call it is in (ASK with the
call's fingerprint): two ranks that wait for each other in different calls would send each other
nothing. One that has passed its deadline asks all members (ASK with ``segment`` 1). Whoever is in
the call passes that on to its own links, and answers (TELL) come back the same way. A rank that
says it has not called, or that says nothing for ``ANSWER_S``, is the one that the error names; the
neighbour that this rank happens to wait for may only be waiting itself. Keeps what was heard;
sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

STALL_S = 0.25
ANSWER_S = 0.25
_MAX_INQUESTS = 64

Key = tuple[int, int]
"""Channel and number of an operation."""


@dataclass(slots=True)
class Inquest:
    """What is known of one operation: ``heard[rank]`` is whether that rank has called it."""

    askers: set[int] = field(default_factory=set)
    heard: dict[int, bool] = field(default_factory=dict)

    def culprit(self, ranks: Iterable[int], awaited: Iterable[int], *, final: bool) -> int:
        """Who holds the operation up, -1 if (so far) nobody in particular.

        ``final``: the time for answers is over, so silence counts.
        """
        for rank, has_called in self.heard.items():
            if not has_called:
                return rank
        if not final:
            return -1
        silent = [rank for rank in ranks if rank not in self.heard]
        return next((rank for rank in awaited if rank in silent), silent[0] if silent else -1)


class Inquests:
    """The latest inquests, at most 64 of them: a peer may ask about anything."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Inquest] = {}

    def get(self, key: Key) -> Inquest | None:
        return self._by_key.get(key)

    def open(self, key: Key) -> tuple[Inquest, bool]:
        """The inquest about ``key``, and whether it is new."""
        inquest = self._by_key.get(key)
        if inquest is not None:
            return inquest, False
        if len(self._by_key) >= _MAX_INQUESTS:
            del self._by_key[next(iter(self._by_key))]
        inquest = self._by_key[key] = Inquest()
        return inquest, True
