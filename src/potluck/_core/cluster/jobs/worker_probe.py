"""Probes: which workers of this machine do not run, by the state of their processes.

A worker answers a probe on a thread of its own, also while its script computes or waits. No answer
is no proof, though: native code that holds the interpreter's lock keeps that thread from running.
So an agent asks the system about the processes of its own machine. Only a process that the system
reports as stopped (SIGSTOP, a debugger) at the probe and again ``ANSWER_S`` later, and that used no
processor time between the two looks, is blamed.

A process that waits for a disk, as in a machine that swaps, may come back at any moment: people get
a note, and no worker is blamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import psutil

ANSWER_S = 0.4
"""How long a worker that runs may take to answer before its agent looks again."""

NUM_DISK_WAITS = 3
"""After so many probes in a row, unanswered by a process that waits for a disk, people get a
note."""

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a process, by the system. ``cpu_s``: processor time that it has used so far."""

    status: str
    cpu_s: float


def look(pid: int) -> Look | None:
    """The state of process ``pid`` now; None if it has ended or belongs to another user."""
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


def waits_for_disk(before: Look | None, after: Look | None) -> bool:
    """Whether a process that gave no answer between two looks waited for a disk in both, without
    processor time between them."""
    waiting = psutil.STATUS_DISK_SLEEP
    return before is not None and before == after and before.status == waiting


class WorkerProbe:
    """The unanswered probes of the workers of one job. Runs in the loop.

    ``on_stalled(worker, reason)`` is called about a worker that does not run, ``on_note(text)``
    with lines for people.
    """

    def __init__(
        self,
        on_stalled: Callable[[str, str], None],
        on_note: Callable[[str], None],
        look: Callable[[int], Look | None] = look,
    ) -> None:
        self._on_stalled = on_stalled
        self._on_note = on_note
        self._look = look
        self._disk_waits: dict[str, int] = {}
        self._unanswered: dict[str, asyncio.TimerHandle] = {}

    def probed(self, worker: str, pid: int) -> None:
        """A probe goes to ``worker``, whose process is ``pid``."""
        if worker not in self._unanswered:
            loop = asyncio.get_running_loop()
            self._unanswered[worker] = loop.call_later(
                ANSWER_S, self._judge, worker, pid, self._look(pid)
            )

    def answered(self, worker: str) -> None:
        """``worker`` gave a sign of life, or is gone."""
        self._disk_waits.pop(worker, None)
        waiting = self._unanswered.pop(worker, None)
        if waiting is not None:
            waiting.cancel()

    def close(self) -> None:
        """Cancel all judgements."""
        for worker in list(self._unanswered):
            self.answered(worker)

    def _judge(self, worker: str, pid: int, before: Look | None) -> None:
        del self._unanswered[worker]
        after = self._look(pid)
        if after is not None and is_stopped(before, after):
            self._on_stalled(worker, _stopped(pid, after))
        if not waits_for_disk(before, after):
            self._disk_waits.pop(worker, None)
            return
        self._disk_waits[worker] = self._disk_waits.get(worker, 0) + 1
        if self._disk_waits[worker] == NUM_DISK_WAITS:
            self._on_note(
                f"worker {worker} holds the others up: its process {pid} waits for a disk and gets "
                "no further. Does its machine swap, or does a file system not answer?"
            )


def _stopped(pid: int, seen: Look) -> str:
    if seen.status == psutil.STATUS_TRACING_STOP:
        return (
            f"its process {pid} is stopped by a debugger while others wait for it; it comes back "
            "once the debugger lets it go on"
        )
    return (
        f"its process {pid} is stopped (SIGSTOP) while others wait for it; `kill -CONT {pid}` lets "
        "it come back"
    )
