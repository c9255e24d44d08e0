"""Which probed workers do not run: an agent's look at the processes that gave no answer.

A worker answers a probe on a thread of its own, also while its script computes or waits. No answer
is no proof, though: native code that holds the interpreter's lock keeps that thread from running.
So an agent asks the system about the processes of its own machine. Only a process that the system
reports as stopped (SIGSTOP, a debugger) at the probe and again ``ANSWER_S`` later, and that used no
processor time between the two looks, is blamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import psutil

ANSWER_S = 0.4
"""How long a worker that runs may take to answer before its agent looks again."""

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, slots=True)
class Look:
    """What the system tells of a process. ``cpu_s``: processor time that it has used so far."""

    status: str
    cpu_s: float


def look(pid: int) -> Look | None:
    """What the system tells of process ``pid`` now; None if it has ended or is not ours to see."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Look(process.status(), times.user + times.system)
    except psutil.Error:
        return None


def is_stopped(before: Look | None, after: Look | None) -> bool:
    """Whether two looks at a process that gave no answer between them prove that it is stopped."""
    if before is None or after is None:
        return False
    both = before.status in _STOPPED and after.status in _STOPPED
    return both and before.cpu_s == after.cpu_s


class Pulse:
    """The probes on their way to the workers of one crew. Runs in the loop.

    ``on_stalled(worker, reason)`` is told of a worker that does not run.
    """

    def __init__(self, on_stalled: Callable[[str, str], None]) -> None:
        self._on_stalled = on_stalled
        self._unanswered: dict[str, asyncio.TimerHandle] = {}

    def probed(self, worker: str, pid: int) -> None:
        """A probe goes to ``worker``, whose process is ``pid``."""
        if worker not in self._unanswered:
            loop = asyncio.get_running_loop()
            self._unanswered[worker] = loop.call_later(
                ANSWER_S, self._judge, worker, pid, look(pid)
            )

    def answered(self, worker: str) -> None:
        """``worker`` gave a sign of life, or is gone."""
        waiting = self._unanswered.pop(worker, None)
        if waiting is not None:
            waiting.cancel()

    def close(self) -> None:
        """Cancel all judgements."""
        for worker in list(self._unanswered):
            self.answered(worker)

    def _judge(self, worker: str, pid: int, before: Look | None) -> None:
        del self._unanswered[worker]
        if is_stopped(before, look(pid)):
            self._on_stalled(
                worker,
                f"its process {pid} is stopped (SIGSTOP or a debugger) while others wait for it; "
                f"`kill -CONT {pid}` lets it come back",
            )
