"""The agent of ``potluck run`` where no ``potluck up`` runs: one job on one machine.

``Lead`` decides and ``Crew`` has the workers; here they are in one process, so what was decided is
done at once, and a group that is announced counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from potluck.cluster.groups import events, membership
from potluck.cluster.home.runfile import RunFile
from potluck.cluster.jobs.crew import Crew, seat
from potluck.cluster.jobs.job import Chaos, Job, Launcher
from potluck.cluster.jobs.lead import Lead
from potluck.cluster.links.control import ControlLink
from potluck.errors import LinkError
from potluck.transport import aio
from potluck.transport.credentials import Credentials
from potluck.wire import control, jobs
from potluck.wire.messages import Hello, Refusal, Welcome


class Agent:
    """One job on one machine. ``on_note`` gets every line for people as it happens."""

    def __init__(
        self,
        job: Job,
        *,
        home: Path,
        credentials: Credentials,
        launcher: Launcher,
        chaos: Chaos,
        on_note: Callable[[str], None],
    ) -> None:
        self.job = job
        self.started = time.time()
        state, self._first_actions = membership.begin(job.workers, job.policy)
        self.lead = Lead(job, state, hands=self, chaos=chaos, on_note=on_note)
        self._crew = Crew(job.id, launcher, self)
        self._home = home
        self._credentials = credentials
        self._file: RunFile | None = None
        self._server: aio.Server | None = None

    async def run(self) -> int:
        """Run the job to its end; the exit code it ended with. Leaves nothing behind."""
        try:
            self._server = await aio.serve("127.0.0.1", 0, self._credentials, self._greeted)
            self._file = RunFile.create(
                self._home,
                job=self.job.id,
                node=self._credentials.node_id,
                host="127.0.0.1",
                port=self._server.port,
                script=self.job.script,
                started=self.started,
            )
            self.lead.begin(self._first_actions)
            await self.lead.over.wait()
            if self.lead.crash is not None:
                raise self.lead.crash
            return self.lead.state.exit_code
        finally:
            await self._crew.put_away()
            self.lead.close()
            if self._server is not None:
                await self._server.close()
            if self._file is not None:
                self._file.remove()

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers."""
        return self.job.workers

    def interrupt(self, number: int) -> None:
        """The operator wants the end: by ``number`` first, by SIGKILL the second time."""
        self.lead.handle(events.Interrupted(number))

    def status(self) -> control.StatusReply:
        """The job as it is now."""
        pid = self._file.record.pid if self._file is not None else 0
        return self.lead.status(node=self._credentials.node_id, pid=pid, started=self.started)

    # What was decided (Hands).

    def begin_world(self, world: events.BeginWorld) -> None:
        pass  # ``start`` reads the world from ``lead``

    def start(self, worker: str, attempt: int) -> None:
        assert self._server is not None
        world = self.lead.state.world
        index, size = world.members.index(worker), len(world.members)
        environment = {
            "POTLUCK_AGENT": f"127.0.0.1:{self._server.port}",
            "POTLUCK_WIRE": self.job.wire,
            "LOCAL_RANK": str(index),
            "LOCAL_WORLD_SIZE": str(size),
            **seat(index, size, world.number),
        }
        self._crew.start(worker, attempt, environment)

    def tell(self, workers: Sequence[str], message: control.FromAgent) -> None:
        self._crew.tell(workers, message)

    def stop(self, workers: Sequence[str], reason: str) -> None:
        self._crew.stop(workers, reason)

    def signal(self, workers: Sequence[str], number: int) -> None:
        self._crew.signal(workers, number)

    def pid(self, worker: str) -> int:
        return self._crew.pid(worker)

    def node(self, worker: str) -> str:
        return ""

    def agree(self, announced: events.Announce) -> None:
        assert self._file is not None
        self._file.persist_epoch(announced.epoch)
        names = tuple(member.worker for member in announced.members)
        self.lead.journal.announced(announced.epoch, names, announced.joined)
        for rank, name in enumerate(names):
            steps = self.lead.chaos_steps(rank)
            view = control.View(self.job.id, announced.epoch, announced.members, steps)
            self._crew.tell((name,), view)

    # What becomes of the workers (Boss).

    def happened(self, event: jobs.Event) -> None:
        if isinstance(event, control.Said) and not event.worker:
            self.lead.note(event.text)
            return
        if isinstance(event, control.Ready):
            host = event.host or "127.0.0.1"
            event = msgspec.structs.replace(event, node=self._credentials.node_id, host=host)
        self.lead.take(event)

    def asked(self, worker: str, request: control.StatusRequest) -> None:
        self._crew.tell((worker,), self.status())

    # Who calls.

    async def _greeted(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello: Hello,
        node: str,
    ) -> None:
        refusal = self._objection(hello)
        if refusal is not None:
            await aio.write_greeting(writer, refusal)
        elif hello.worker:
            await self._crew.greeted(reader, writer, hello)
        else:
            await aio.write_greeting(writer, Welcome())
            link = ControlLink(reader, writer, received=control.TO_AGENT, sent=control.FROM_AGENT)
            with contextlib.suppress(LinkError):
                while isinstance(await link.receive(), control.StatusRequest):
                    link.send(self.status())

    def _objection(self, hello: Hello) -> Refusal | None:
        if hello.kind != "control":
            return Refusal("kind", "this is an agent: it takes control links, no data")
        if hello.job != self.job.id:
            return Refusal("job", f"this agent runs job {self.job.id}, not {hello.job!r}")
        return None
