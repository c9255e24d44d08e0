"""Lines on stderr that name the keys that ranks wait for, written by the store on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from potluck._core.backends.places import listed
from potluck._core.waiting import FIRST_S, Reminder, to_stderr

_TORCHS_PREFIX = "default_pg/0//"
"""torch's prefix of a script's keys in the store of the default group."""


@dataclass(frozen=True, slots=True)
class _Wait:
    keys: tuple[str, ...]
    since: float
    until: float


class StoreWaits:
    """The requests that wait for a key. ``is_set(key)`` says whether the key has a value.

    Not thread-safe: the caller holds the store's lock.
    """

    def __init__(
        self,
        is_set: Callable[[str], bool],
        *,
        say: Callable[[str], None] = to_stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_set = is_set
        self._say = say
        self._clock = clock
        self._waits: dict[int, _Wait] = {}
        self._reminder: Reminder | None = None

    def begin(self, rank: int, keys: Sequence[str], timeout_s: float) -> None:
        """Note that ``rank`` waits for ``keys``, for at most ``timeout_s`` seconds."""
        now = self._clock()
        self._waits[rank] = _Wait(tuple(keys), now, now + timeout_s)
        if self._reminder is None:
            self._reminder = Reminder(self._describe, say=self._say, clock=self._clock)

    def end(self, rank: int) -> None:
        """Note that ``rank`` does not wait any more."""
        self._waits.pop(rank, None)

    def tick(self) -> float | None:
        """Write a line with the waiting ranks if it is due.

        Returns the seconds until the next call; None while no rank waits.
        """
        now = self._clock()
        self._waits = {rank: wait for rank, wait in self._waits.items() if now < wait.until}
        if not self._waits:
            self._reminder = None
        if self._reminder is None:
            return None
        self._reminder.tick()
        return self._reminder.patience()

    def _describe(self) -> str:
        """The keys for which ranks have waited for several seconds, in words; empty without any."""
        now = self._clock()
        by_key: dict[str, list[int]] = {}
        for rank, wait in self._waits.items():
            for key in wait.keys if now - wait.since >= FIRST_S else ():
                if not self._is_set(key):
                    by_key.setdefault(key, []).append(rank)
        if not by_key:
            return ""
        first, *more = by_key
        shown = first.removeprefix(_TORCHS_PREFIX)
        others = f" (and {len(more)} more)" if more else ""
        return (
            f"no rank has set the key {shown!r}{others} in the store, which rank "
            f"{listed(by_key[first])} asked for; has every rank reached the line that sets it?"
        )
