"""The caller of hints: connects to each address when it is due, to ``_MAX_CALLS`` at the same
time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from potluck._core.background import Tasks, stop
from potluck._core.cluster.discovery.advert import Hint
from potluck._core.cluster.discovery.hints import HintBook
from potluck._core.transport.listener import RateLimitedLog

_MAX_CALLS = 16
_SAY_AGAIN_S = 600.0

_log = logging.getLogger(__name__)

Call = Coroutine[Any, Any, None]


class HintCaller:
    """Runs ``call(hint)`` for the hints that are due in ``book``. ``call`` must report its outcome
    to the book. Code that changes the book must ``wake`` the caller."""

    def __init__(self, call: Callable[[Hint], Call]) -> None:
        self.book = HintBook()
        self._call = call
        self._calls = Tasks()
        self._changed = asyncio.Event()
        self._complain = RateLimitedLog(_log, interval_s=_SAY_AGAIN_S)

    def heard(self, hint: Hint) -> None:
        """Add a hint of a finder."""
        if not self.book.heard(hint, asyncio.get_running_loop().time()):
            self._complain.warning(
                f"an advert of this cluster, heard from {hint.host}, is of another time than this "
                "machine's, and does not count: either the clock of the machine there is wrong, or "
                "somebody sends an old advert again. To call it: POTLUCK_PEERS"
            )
        self.wake()

    def wake(self) -> None:
        """Check again which hints are due."""
        self._changed.set()

    def start(self, call: Call) -> None:
        """Run ``call`` immediately; it counts as one of the unfinished calls."""
        self._calls.start(call).add_done_callback(lambda _: self.wake())

    async def run(self) -> None:
        """Run calls until cancelled; then cancel the unfinished calls."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                now = loop.time()
                for hint in self.book.due(now)[: max(0, _MAX_CALLS - len(self._calls))]:
                    self.book.calling(hint)
                    self.start(self._call(hint))
                at = self.book.next_due(now) if len(self._calls) < _MAX_CALLS else None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if at is None else max(0.01, at - now)):
                        await self._changed.wait()
        finally:
            await stop(*self._calls)
