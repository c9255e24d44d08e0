"""Lines of a job for people, on their way from the leader to the command that started the job.

``OutputRelay`` passes on the output of the workers; ``RollCall`` names the machines and workers
that the first group waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from potluck._core.background import OnBroken, start_task
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.waiting import Reminder
from potluck._core.wire import jobs, worker_link

_MAX_UNSENT = 4 << 20
_OUTPUT_S = 30.0
"""How long the end of a cluster's job waits for the last output of workers on nodes in the view:
the agent of a busy machine may stand still for seconds."""


class OutputRelay:
    """Passes on the output of the job of ``spec``: to the starter while ``is_starter_here()``, else
    to a log."""

    def __init__(
        self, agent: AgentParts, spec: jobs.JobSpec, is_starter_here: Callable[[], bool]
    ) -> None:
        self._agent = agent
        self._spec = spec
        self._is_starter_here = is_starter_here
        self._num_dropped = 0
        # By worker, the newest attempt.
        self._exited: dict[str, int] = {}
        self._read: dict[str, int] = {}
        self._has_changed = asyncio.Event()

    def exited(self, worker: str, attempt: int) -> None:
        """A process ended; its last lines may still be under way."""
        self._exited[worker] = max(attempt, self._exited.get(worker, -1))

    def ended(self, worker: str, attempt: int) -> None:
        """All that this process wrote has been passed on."""
        self._read[worker] = max(attempt, self._read.get(worker, -1))
        self._has_changed.set()

    def nodes_changed(self) -> None:
        """There is a new view: nodes may have left."""
        self._has_changed.set()

    def line(self, line: jobs.Output, label: str) -> None:
        """A worker wrote ``line``; people know it by ``label``."""
        label = label[:256]
        if line.end == "\r" and not self._has_room():
            return  # the next state of the line replaces it
        if not self._is_starter_here():
            self._agent.log.write(self._spec.job, f"[{label}] {line.text}")
            return
        if not self._has_room():
            self._num_dropped += 1
            return
        if self._num_dropped:
            text = f"{self._num_dropped} lines of output were left out: they were not read in time"
            self._num_dropped = 0
            self.note(text)
        shown = jobs.LabelledOutput(line.job, label, line.stream, line.text, line.end)
        self._agent.links.send(self._spec.starter, shown)

    def _has_room(self) -> bool:
        """Whether the starter is here and reads fast enough."""
        unsent = self._agent.links.unsent(self._spec.starter)
        return self._is_starter_here() and unsent <= _MAX_UNSENT

    def note(self, text: str) -> None:
        """Show a line to people."""
        job, starter = self._spec.job, self._spec.starter
        if self._is_starter_here():
            self._agent.links.send(starter, jobs.JobNote(job, worker_link.clip(text)))
        else:
            self._agent.log.write(job, f"potluck: {text}")
        if starter != self._agent.me:
            self._agent.note(f"job {job}: {text}"[:4096])

    async def all_read(self, is_here: Callable[[str], bool]) -> list[str]:
        """Return when all output of ended workers was passed on, except that of nodes that have
        left. The workers whose output is still missing after ``_OUTPUT_S`` are returned; on one
        machine, where only a command that reads slowly delays it, the wait has no limit."""

        def unread() -> list[str]:
            return [
                worker
                for worker, attempt in self._exited.items()
                if self._read.get(worker, -1) < attempt and is_here(worker)
            ]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._spec.is_local else _OUTPUT_S):
                while unread():
                    self._has_changed.clear()
                    await self._has_changed.wait()
        return unread()


class RollCall:
    """Runs in the event loop. ``describe()`` names the missing machines or workers; an empty answer
    ends the roll call. ``note`` gets the lines. ``on_broken(error)``: the roll call broke."""

    def __init__(
        self, describe: Callable[[], str], note: Callable[[str], None], *, on_broken: OnBroken
    ) -> None:
        self._describe = describe
        self._note = note
        self._on_broken = on_broken
        self._calling: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin, unless it has begun: the job waits from now on."""
        if self._calling is None or self._calling.done():
            self._calling = start_task(self._call, name="roll call", on_broken=self._on_broken)

    def close(self) -> None:
        """Write no more lines."""
        if self._calling is not None:
            self._calling.cancel()

    async def _call(self) -> None:
        reminder = Reminder(self._describe, say=self._note)
        while True:
            await asyncio.sleep(reminder.patience())
            if not self._describe():
                return
            reminder.tick()
