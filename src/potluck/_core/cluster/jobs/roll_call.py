"""Which workers a job's first group waits for, told again and again until it has formed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from potluck._core.waiting import Reminder


class RollCall:
    """Runs in the event loop. ``describe()`` names the missing workers; an empty answer ends the
    roll call. ``say`` gets the lines."""

    def __init__(self, describe: Callable[[], str], say: Callable[[str], None]) -> None:
        self._describe = describe
        self._say = say
        self._reminder: Reminder | None = None
        self._next: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin, unless it has begun: some worker waits from now on."""
        if self._reminder is None:
            self._reminder = Reminder(self._describe, say=self._say)
            self._wait()

    def close(self) -> None:
        """Say nothing more."""
        if self._next is not None:
            self._next.cancel()
        self._reminder = None

    def _wait(self) -> None:
        assert self._reminder is not None
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self._reminder.patience(), self._tick)

    def _tick(self) -> None:
        if self._reminder is not None and self._describe():
            self._reminder.tick()
            self._wait()
        else:
            self.close()
