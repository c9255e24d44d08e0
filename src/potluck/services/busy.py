"""``BusyWait``: a wait for one peer that is busy at first, while the peer is quick.

A processor that has nothing to do sleeps, and takes longer to wake up than a small call takes: two
processes on an idle machine spent two thirds of a call on that. So the side that waits asks the
kernel again and again, for as long as a small call may take, before it sleeps. On a machine whose
processors are all busy that keeps the peer from its own, so waits in vain make busy ones rarer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from potluck._core.system import usable_cpus, wait_readable

LONGEST_S = 1.5e-4
"""How long a wait is busy at most."""
_QUICK_S = 4e-4
"""A peer that takes no longer, waking up included, may be quick enough for a busy wait."""
_HAS_OTHERS = len(usable_cpus()) > 1
"""Else the peer may need this processor."""
_MOST_SKIPPED = 64
"""Calls without a busy wait after several in vain."""


def _nothing_else() -> bool:
    return False


class BusyWait:
    """For one thread at a time."""

    __slots__ = ("_is_quick", "_is_readable", "_num_after_failure", "_num_to_skip")

    def __init__(self, fd: int) -> None:
        self._is_readable = wait_readable(fd)
        self._is_quick = False
        self._num_to_skip = self._num_after_failure = 0

    @property
    def is_due(self) -> bool:
        """Whether a busy wait is worth it."""
        return self._is_quick and not self._num_to_skip

    def note(self, seconds: float) -> None:
        """The peer took so long."""
        self._is_quick = seconds < _QUICK_S and _HAS_OTHERS
        if self._num_to_skip:
            self._num_to_skip -= 1

    def run(self, has_other: Callable[[], object] = _nothing_else) -> bool:
        """Wait busily: whether bytes have come. At once False if it is not due, and if
        ``has_other()``. It costs ``LONGEST_S`` of processor time at most."""
        if not self.is_due:
            return False
        end = time.monotonic() + LONGEST_S
        while not self._is_readable(0.0):
            if time.monotonic() > end:
                self._is_quick = False
                self._num_after_failure = min(2 * self._num_after_failure + 1, _MOST_SKIPPED)
                self._num_to_skip = self._num_after_failure
                return False
            if has_other():
                return False
        self._num_after_failure = 0
        return True
