"""``Endings``: ends workers in steps, from a request to SIGKILL, with a grace period after each."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from potluck._core.background import Tasks
from potluck._core.cluster.jobs.groups.roster import WorkerState
from potluck._core.system import SIGKILL, SIGPIPE
from potluck._core.wire import worker_link

_STOP_GRACE_S = 3.0
_INTERRUPT_GRACE_S = 15.0

Names = tuple[str, ...]


class Endings:
    """Ends workers of one job: by ``tell(workers, message)`` and ``signal(workers, number)``.
    ``state_of`` tells what membership knows of a worker, ``note`` tells people."""

    def __init__(
        self,
        *,
        tell: Callable[[Names, worker_link.Stop], None],
        signal: Callable[[Names, int], None],
        state_of: Callable[[str], WorkerState],
        note: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._signal = signal
        self._state_of = state_of
        self._note = note
        self._tasks = Tasks()

    def terminate(self, workers: Names) -> None:
        """End ``workers`` by SIGTERM, then by SIGKILL."""
        self._signal(workers, signal.SIGTERM)
        self._later(workers, _STOP_GRACE_S, SIGKILL)

    def interrupt(self, workers: Names, number: int) -> None:
        """Pass on the operator's signal, then end ``workers`` by SIGKILL."""
        # The command got SIGPIPE because its output is not read. Python workers ignore that signal.
        self._signal(workers, signal.SIGTERM if number == SIGPIPE else number)
        self._later(workers, _INTERRUPT_GRACE_S, SIGKILL)

    def stop(self, names: Names, reason: str) -> None:
        """Ask the workers ``names`` to end, then end them by SIGTERM, then by SIGKILL."""
        self._tell(names, worker_link.Stop(worker_link.clip(reason)))
        self._later(names, _STOP_GRACE_S, signal.SIGTERM)
        self._later(names, 2 * _STOP_GRACE_S, SIGKILL)

    def close(self) -> None:
        """End all tasks."""
        self._tasks.cancel()

    def _later(self, workers: Names, delay_s: float, number: int) -> None:
        self._tasks.start(self._signal_later(workers, delay_s, number))

    async def _signal_later(self, workers: Names, delay_s: float, number: int) -> None:
        attempts = {name: self._state_of(name).attempt for name in workers}
        await asyncio.sleep(delay_s)
        states = map(self._state_of, workers)
        alive = tuple(w.name for w in states if w.alive and w.attempt == attempts[w.name])
        if alive:
            word = signal.Signals(number).name
            self._note(f"worker {', '.join(alive)} did not end in {delay_s:g} s: {word}")
            self._signal(alive, number)
