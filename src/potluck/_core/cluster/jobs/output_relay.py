"""Lines of a job for people: on their way from its leader to the log, and to the command of a local
job.

``OutputRelay`` passes on the output of the workers; ``RollCall`` names the machines and workers
that the first group waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from potluck._core.background import OnBroken, start_task
from potluck._core.cluster.code_store.job_folders import key_of
from potluck._core.cluster.jobs.agent_parts import AgentParts
from potluck._core.cluster.jobs.log import LogPump
from potluck._core.waiting import Reminder
from potluck._core.wire import jobs, worker_link

_MAX_UNSENT = 1 << 20
COPY_S = 5.0
_OUTPUT_S = 30.0
"""How long the end of a cluster's job waits for the last output of workers on nodes in the view:
the agent of a busy machine may stand still for seconds."""


class OutputRelay:
    """Passes on the output of the job of ``spec``: a local job's to its command, that of other jobs
    to the log here and on another node."""

    def __init__(self, agent: AgentParts, spec: jobs.JobSpec) -> None:
        self._agent = agent
        self._spec = spec
        self._key = key_of(spec.job, spec.starter)
        self._copy_at = ""
        self._pump: LogPump | None = None
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
        if self._spec.is_local:
            shown = jobs.LabelledOutput(line.job, label, line.stream, line.text, line.end)
            self._agent.links.send(self._spec.starter, shown)
            return
        if not line.at:  # of a node of the first release, which counts no lines
            self._agent.log.add(
                self._key, line.worker, line.stream, label[:256], line.text, line.end
            )
            return
        kept = jobs.LogLine(
            line.at, line.number, line.worker, line.stream, label[:256], line.text, line.end
        )
        self._agent.log.write(self._key, kept)

    def note(self, text: str) -> None:
        """Show a line to people."""
        job, starter = self._spec.job, self._spec.starter
        if self._spec.is_local:
            self._agent.links.send(starter, jobs.JobNote(job, worker_link.clip(text)))
        else:
            source = f"@{self._agent.me[:12]}"
            self._agent.log.add(self._key, source, jobs.NOTE, "", worker_link.clip(text))
        if starter != self._agent.me:
            self._agent.note(f"job {job}: {text}"[:4096])

    def copies_to(self, node: str, is_wanted: Callable[[str], bool] = lambda source: True) -> None:
        """Another node has the log, too, from now on: ``node``; nobody, if it is empty."""
        if node == self._copy_at or self._spec.is_local:
            return
        self._copy_at = node
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        if node:
            self._pump = LogPump(self._agent.log, self._key, partial(self._send, node), is_wanted)

    def linked(self, node: str) -> None:
        """There is a new link to ``node``."""
        if node == self._copy_at and self._pump is not None:
            self._pump.again()

    def _send(self, node: str, line: jobs.LogLine) -> bool:
        shown = jobs.LabelledOutput(
            self._spec.job,
            line.label,
            line.stream,
            line.text,
            line.end,
            line.source,
            line.at,
            line.number,
        )
        links = self._agent.links
        return links.unsent(node) <= _MAX_UNSENT and links.send(node, shown)

    async def all_sent(self) -> None:
        """Return when the other node has the log, or has not got it for ``COPY_S``."""
        if self._pump is not None:
            await self._pump.sent(COPY_S)

    def close(self) -> None:
        """Send nothing more."""
        if self._pump is not None:
            self._pump.close()

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
