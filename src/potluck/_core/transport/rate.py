"""A rate limit for log lines, so that an attacker can't flood the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from potluck._core.printable import plain

REFUSAL_S = 60.0
"""Between lines about machines that are refused: a banned machine calls again every second."""


class RateLimitedLog:
    """Writes at most one line per ``interval_s``; the next line counts those left out."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")
        self._left_out = 0

    def warning(self, text: str) -> None:
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + self._interval_s
            left_out, self._left_out = self._left_out, 0
        more = f" (and {left_out} more since the last line)" if left_out else ""
        self._logger.warning("%s%s", plain(text), more)
