"""``LocalWorkers``: the workers of one job on one node, their processes and their control links.

Decides nothing: messages of the workers and the ends of their processes are reported in the order
in which they happened; the job's controller orders what is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence

from potluck.background import Tasks
from potluck.cluster.jobs.process import Launch, WorkerProcess
from potluck.cluster.jobs.pulse import Pulse
from potluck.errors import ConfigurationError, LinkError, PotluckError, ProtocolError
from potluck.system import SIGKILL
from potluck.transport import aio
from potluck.wire import control, jobs
from potluck.wire.messages import Hello, Refusal, Welcome

_LAST_MESSAGES_S = 1.0


def world_variables(rank: int, world_size: int, number: int) -> dict[str, str]:
    """The variables of a worker's place in world ``number``. Scripts don't change
    POTLUCK_WORLD_RANK: by it the worker knows that a world which torch forms is this one."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "POTLUCK_WORLD_RANK": f"{rank}/{world_size}",
        "TORCHELASTIC_RESTART_COUNT": str(number),
    }


class LocalWorkers:
    """Starts and ends the workers of ``job`` on this machine, and passes messages to and from them.
    ``report(event)`` gets each event."""

    def __init__(self, job: str, launch: Launch, report: Callable[[jobs.Event], None]) -> None:
        self.job = job
        self._launch = launch
        self._report = report
        self._processes: dict[str, WorkerProcess] = {}
        self._alive: set[str] = set()
        self._links: dict[str, aio.MessageLink[control.FromWorker, control.FromAgent]] = {}
        self._unlinked: dict[str, asyncio.Event] = {}
        self._tasks = Tasks()
        self._pulse = Pulse(
            lambda worker, reason: report(jobs.Stalled(worker, control.clip(reason))),
            self._say,
        )

    @property
    def alive(self) -> tuple[str, ...]:
        """The workers whose processes run."""
        return tuple(sorted(self._alive))

    def pid(self, worker: str) -> int:
        """The process of ``worker``, 0 if none runs."""
        return self._processes[worker].pid if worker in self._alive else 0

    # What the controller orders.

    def start(self, worker: str, attempt: int, environment: dict[str, str]) -> None:
        """Start ``worker`` with these variables. If it can't be started, its exit code is 127."""
        unlinked = self._unlinked[worker] = asyncio.Event()
        unlinked.set()
        variables = environment | {
            "POTLUCK_JOB": self.job,
            "POTLUCK_WORKER": worker,
            "POTLUCK_RESTARTS": str(attempt),
        }

        def on_exit(code: int) -> None:
            self._tasks.start(self._exited(worker, code, attempt))

        try:
            process = self._launch(worker, variables, on_exit)
        except ConfigurationError as error:
            self._say(str(error))
            self._report(jobs.Exited(worker, 127, attempt))
            self._report(jobs.OutputEnded(worker, attempt))
            return
        self._processes[worker] = process
        self._alive.add(worker)
        self._report(jobs.Started(worker, attempt, process.pid))

    def tell(self, workers: Sequence[str], message: control.FromAgent) -> None:
        """Send ``message`` to those of ``workers`` that have a link here; those that have none
        are asked to stop by SIGTERM."""
        for worker in workers:
            link = self._links.get(worker)
            if link is not None:
                link.send(message)
                if isinstance(message, control.Probe):
                    self._pulse.probed(worker, self.pid(worker))
            elif isinstance(message, control.Stop):
                self.signal((worker,), signal.SIGTERM)

    def signal(self, workers: Sequence[str], number: int) -> None:
        """Send a signal to the processes of ``workers``."""
        for worker in workers:
            if worker in self._alive:
                self._processes[worker].signal(number)

    async def put_away(self) -> None:
        """End all processes, links and tasks. Nothing more is reported."""
        self._pulse.close()
        await self._tasks.close()
        for process in self._processes.values():
            process.signal(SIGKILL)
        for process in self._processes.values():
            await process.release()
        for link in list(self._links.values()):
            link.abort()

    # Connections of workers.

    async def greeted(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello: Hello,
    ) -> None:
        """A worker of this job has connected: answer, and take its messages until the link ends."""
        refusal = self._objection(hello)
        await aio.write_greeting(writer, refusal or Welcome())
        if refusal is not None:
            return
        worker = hello.worker
        link = aio.MessageLink(reader, writer, received=control.TO_AGENT, sent=control.FROM_AGENT)
        ended = self._unlinked[worker]
        ended.clear()
        self._links[worker] = link
        try:
            await self._listen(worker, link)
        finally:
            ended.set()
            if self._links.get(worker) is link:
                del self._links[worker]
                self._tasks.start(self._hung_up(worker, self._processes.get(worker)))

    def _objection(self, hello: Hello) -> Refusal | None:
        if hello.worker in self._links:
            return Refusal("duplicate", f"worker {hello.worker} is connected already")
        if hello.worker not in self._unlinked:
            return Refusal("worker", f"job {self.job} has no worker {hello.worker!r}")
        return None

    async def _listen(
        self, worker: str, link: aio.MessageLink[control.FromWorker, control.FromAgent]
    ) -> None:
        is_done = False
        with contextlib.suppress(LinkError):
            try:
                while not is_done:
                    message = await link.receive()
                    if message.worker != worker:
                        raise ProtocolError(f"it spoke for worker {message.worker!r}")
                    self._pulse.answered(worker)
                    self._report(message)
                    is_done = isinstance(message, control.Finished)
            except PotluckError as error:
                if not isinstance(error, LinkError):
                    self._say(f"worker {worker} was cut off: {error}")
                raise

    async def _hung_up(self, worker: str, process: WorkerProcess | None) -> None:
        """The link ended. Mostly the process has ended as well, and its exit code says more: wait
        for that a moment."""
        await asyncio.sleep(_LAST_MESSAGES_S)
        if self._processes.get(worker) is process and worker not in self._links:
            self._report(jobs.Disconnected(worker))

    async def _exited(self, worker: str, code: int, attempt: int) -> None:
        """The process ended. A death by signal is reported at once; before an exit the worker may
        have sent its reason, which is read first."""
        process = self._processes[worker]
        if code >= 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_MESSAGES_S):
                    await self._unlinked[worker].wait()
        self._alive.discard(worker)
        self._pulse.answered(worker)
        link = self._links.pop(worker, None)
        if link is not None:
            link.abort()
        self._report(jobs.Exited(worker, code, attempt))
        await process.release()
        self._report(jobs.OutputEnded(worker, attempt))

    def _say(self, text: str) -> None:
        """Something to tell a person."""
        self._report(control.Said("", control.clip(text)))
