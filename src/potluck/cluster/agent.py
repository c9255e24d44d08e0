"""The agent: one asyncio loop that does all the I/O which ``membership`` decides on.

It starts a job's workers, sees their exits at once, talks to them over control links, announces
views, carries out ordered faults and tells its observer what happened. Everything it decides comes
out of ``membership.handle``; what a worker process is comes from the launcher it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from potluck.cluster import events, membership
from potluck.cluster.job import Chaos, Job, Launcher, Process
from potluck.cluster.journal import Journal
from potluck.cluster.links import ControlLink
from potluck.cluster.roster import EXPECTED, Phase
from potluck.cluster.runfile import RunFile
from potluck.errors import ConfigurationError, LinkError, PotluckError
from potluck.transport import aio
from potluck.transport.credentials import Credentials
from potluck.types import Member
from potluck.wire import control
from potluck.wire.messages import PLAIN, Hello, Refusal, Welcome

_log = logging.getLogger(__name__)

_LAST_MESSAGES_S = 1.0
_MAX_STATUS_EVENTS = 20
_PATIENCE_S = 20.0


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
        self.state, self._first_actions = membership.begin(job.workers, job.policy)
        self.journal = Journal(job.workers, time.monotonic())
        self.exit_codes: dict[str, int] = {}
        self.started = time.time()
        self._home = home
        self._credentials = credentials
        self._launcher = launcher
        self._chaos = chaos
        self._on_note = on_note
        self._processes: dict[str, Process] = {}
        self._links: dict[str, ControlLink[control.FromClient]] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self._events: deque[events.Event] = deque()
        self._is_handling = False
        self._crash: Exception | None = None
        self._over = asyncio.Event()
        self._wakeup: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
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
            if self.job.wire == PLAIN:
                self._note("links between workers are plain: whoever is on the wire reads along")
            self._act(self._first_actions)
            await self._over.wait()
            if self._crash is not None:
                raise self._crash
            return self.state.exit_code
        finally:
            await self._put_away()

    def interrupt(self, number: int) -> None:
        """The operator wants the end: by ``number`` first, by SIGKILL the second time."""
        self._handle(events.Interrupted(number))

    def status(self) -> control.StatusReply:
        """The job as it is now."""
        view = self.state.view
        ranks = {} if view is None else {name: rank for rank, name in enumerate(view.members)}
        workers = []
        for worker in self.state.workers:
            facts = self.journal.workers[worker.name]
            process = self._processes.get(worker.name)
            workers.append(
                control.WorkerStatus(
                    worker=worker.name,
                    rank=ranks.get(worker.name, -1) if worker.phase is Phase.MEMBER else -1,
                    phase=worker.phase.value,
                    pid=process.pid if process is not None and worker.alive else 0,
                    restarts=worker.restarts,
                    device=facts.device,
                    step=facts.step,
                    samples_per_s=facts.samples_per_s if worker.alive else None,
                )
            )
        notes = self.journal.notes[-_MAX_STATUS_EVENTS:]
        return control.StatusReply(
            job=self.job.id,
            node=self._credentials.node_id,
            pid=self._file.record.pid if self._file is not None else 0,
            script=control.clip(self.job.script),
            started=self.started,
            epoch=self.state.epoch,
            step=self.journal.step,
            loss=self.journal.loss,
            workers=tuple(workers),
            events=tuple(control.clip(note.text) for note in notes),
            wire=self.job.wire,
        )

    def rank_of(self, worker: str) -> int:
        """The rank of ``worker`` in the newest view, -1 if it is in none."""
        view = self.state.view
        return view.members.index(worker) if view and worker in view.members else -1

    # What happens.

    def _handle(self, event: events.Event) -> None:
        """Events are handled one after the other, also those that an action brings about."""
        self._events.append(event)
        if self._is_handling or self._crash is not None:
            return
        self._is_handling = True
        try:
            while self._events:
                event = self._events.popleft()
                self.state, actions = membership.handle(self.state, event, time.monotonic())
                self._act(actions)
        except Exception as error:  # whoever called can't help it: run() raises it
            self._crash = error
            self._over.set()
        finally:
            self._is_handling = False
        self._set_wakeup()
        if self.state.over:
            self._over.set()

    def _say_who_is_missing(self) -> None:
        ready = self.state.having(Phase.READY)
        missing = [worker.name for worker in self.state.having(*EXPECTED)]
        if ready and missing and not self.state.having(Phase.MEMBER):
            self._note(
                f"{len(ready)} workers are ready; still waiting for worker {', '.join(missing)} "
                "to call potluck.init()"
            )

    def _set_wakeup(self) -> None:
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        at = self.state.next_wakeup()
        if at is not None:
            delay = max(0.0, at - time.monotonic())
            loop = asyncio.get_running_loop()
            self._wakeup = loop.call_later(delay, self._handle, events.Tick())

    def _note(self, text: str) -> None:
        self.journal.note(text, time.monotonic())
        self._on_note(text)

    # What is done about it.

    def _act(self, actions: Sequence[events.Action]) -> None:
        for action in actions:
            _log.info("%s: %s", type(action).__name__, action.reason)
            match action:
                case events.Announce():
                    self._announce(action)
                case events.EndGroup():
                    self._end_group(action)
                case events.SendProbe(probe, to):
                    self._tell(to, control.Probe(probe))
                case events.Start(worker, attempt, reason):
                    self._start(worker, attempt, reason)
                case events.Kill(workers, reason):
                    self._note(reason)
                    self._signal(workers, signal.SIGKILL)
                case events.StopWorkers(workers, number, reason):
                    self._stop(workers, number, reason)
                case events.Log(reason):
                    self._note(reason)

    def _announce(self, action: events.Announce) -> None:
        assert self._file is not None
        self._file.persist_epoch(action.epoch)
        names = tuple(member.worker for member in action.members)
        self.journal.announced(action.epoch, names, action.joined)
        for rank, name in enumerate(names):
            steps = self._chaos.steps_of(rank)
            self._tell((name,), control.View(self.job.id, action.epoch, action.members, steps))

    def _end_group(self, action: events.EndGroup) -> None:
        if not self.state.stopping:
            self.journal.lost(action.worker, _lost_text(action), time.monotonic())
            self._note(action.reason)
        cause = control.clip(action.reason)
        self._tell(action.to, control.GroupOver(action.epoch, action.worker, action.certain, cause))

    def _tell(self, workers: Sequence[str], message: control.FromAgent) -> None:
        for worker in workers:
            link = self._links.get(worker)
            if link is not None:
                link.send(message)

    def _start(self, worker: str, attempt: int, reason: str) -> None:
        assert self._server is not None
        index = self.job.workers.index(worker)
        environment = {
            "POTLUCK_AGENT": f"127.0.0.1:{self._server.port}",
            "POTLUCK_JOB": self.job.id,
            "POTLUCK_WORKER": worker,
            "POTLUCK_WIRE": self.job.wire,
            "POTLUCK_RESTARTS": str(attempt),
            "RANK": str(index),
            "WORLD_SIZE": str(len(self.job.workers)),
            "LOCAL_RANK": str(index),
            "LOCAL_WORLD_SIZE": str(len(self.job.workers)),
        }
        if attempt:
            self._note(f"starting worker {worker} again ({reason})")
        ended = self._ended[worker] = asyncio.Event()
        ended.set()  # no link yet

        def on_exit(code: int) -> None:
            self._spawn(self._exited(worker, code))

        try:
            self._processes[worker] = self._launcher.start(worker, attempt, environment, on_exit)
        except ConfigurationError as error:
            self._note(str(error))
            self._handle(events.Exited(worker, 127))

    async def _exited(self, worker: str, code: int) -> None:
        """A death by signal counts at once; an exit may have been explained just before it."""
        process = self._processes[worker]
        if code >= 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_MESSAGES_S):
                    await self._ended[worker].wait()
        self.exit_codes[worker] = code
        link = self._links.pop(worker, None)
        if link is not None:
            link.abort()
        self._handle(events.Exited(worker, code))
        await process.release()

    def _signal(self, workers: Sequence[str], number: int) -> None:
        for worker in workers:
            process = self._processes.get(worker)
            if process is not None:
                process.signal(number)

    def _stop(self, workers: tuple[str, ...], number: int, reason: str) -> None:
        self._note(f"stopping worker {', '.join(workers)}: {_first_line(reason)}")
        if number:
            self._signal(workers, number)
            self._spawn(self._kill_later(workers, self.job.interrupt_grace_s, signal.SIGKILL))
            return
        unreachable = tuple(worker for worker in workers if worker not in self._links)
        self._signal(unreachable, signal.SIGTERM)
        self._tell(workers, control.Stop(control.clip(reason)))
        self._spawn(self._kill_later(workers, self.job.stop_grace_s, signal.SIGTERM))
        self._spawn(self._kill_later(workers, 2 * self.job.stop_grace_s, signal.SIGKILL))

    async def _kill_later(self, workers: tuple[str, ...], delay_s: float, number: int) -> None:
        await asyncio.sleep(delay_s)
        alive = [name for name in workers if self.state.worker(name).alive]
        if alive:
            word = signal.Signals(number).name
            self._note(f"worker {', '.join(alive)} did not end in {delay_s:g} s: {word}")
            self._signal(alive, number)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Who calls.

    async def _greeted(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello: Hello,
        node: str,
    ) -> None:
        refusal = self._objection(hello)
        await aio.write_greeting(writer, refusal or Welcome())
        if refusal is not None:
            return
        link = ControlLink(reader, writer, control.decode_from_client)
        if not hello.worker:
            await self._serve_client(link)
            return
        ended = self._ended[hello.worker]
        ended.clear()
        self._links[hello.worker] = link
        try:
            host = writer.get_extra_info("peername")[0]
            await self._listen(hello.worker, link, Member(hello.worker, node, host))
        finally:
            ended.set()
            if self._links.get(hello.worker) is link:
                del self._links[hello.worker]
                self._spawn(self._hung_up(hello.worker, self._processes[hello.worker]))

    def _objection(self, hello: Hello) -> Refusal | None:
        if hello.kind != "control":
            return Refusal("kind", "this is an agent: it takes control links, no data")
        if hello.job != self.job.id:
            return Refusal("job", f"this agent runs job {self.job.id}, not {hello.job!r}")
        if hello.worker in self._links:
            return Refusal("duplicate", f"worker {hello.worker} is connected already")
        if hello.worker and hello.worker not in self.job.workers:
            return Refusal("worker", f"job {self.job.id} has no worker {hello.worker!r}")
        return None

    async def _serve_client(self, link: ControlLink[control.FromClient]) -> None:
        with contextlib.suppress(LinkError):
            while isinstance(await link.receive(), control.StatusRequest):
                link.send(self.status())

    async def _listen(
        self, worker: str, link: ControlLink[control.FromClient], member: Member
    ) -> None:
        with contextlib.suppress(LinkError):
            try:
                while not isinstance(message := await link.receive(), control.Finished):
                    self._hear(worker, message, member)
                self._handle(events.Finished(worker))
            except PotluckError as error:
                if not isinstance(error, LinkError):
                    self._note(f"worker {worker} was cut off: {error}")
                raise

    async def _hung_up(self, worker: str, process: Process) -> None:
        """The link ended. Mostly the process has, too, and its exit tells more."""
        await asyncio.sleep(_LAST_MESSAGES_S)
        if self._processes[worker] is process and worker not in self._links:
            self._handle(events.Disconnected(worker))

    def _hear(self, worker: str, message: control.FromClient, member: Member) -> None:
        now = time.monotonic()
        match message:
            case control.Ready(after_epoch=after, port=port, local_rank=local_rank):
                place = Member(worker, member.node, message.host or member.host, port, local_rank)
                self._handle(events.Ready(worker, place, after))
                if not self.state.having(Phase.MEMBER):
                    asyncio.get_running_loop().call_later(_PATIENCE_S, self._say_who_is_missing)
            case control.Installed(epoch):
                self.journal.installed(worker, epoch, now)
                self._handle(events.Installed(worker, epoch))
            case control.Lost(epoch, rank, certain, cause, step):
                self.journal.reported(epoch, step, now)
                self._handle(events.Lost(worker, epoch, rank, certain, cause))
            case control.ProbeReply(probe, _, blocked):
                self._handle(events.ProbeReply(worker, probe, blocked))
            case control.Failed(_, text, secondary):
                self._handle(events.Failed(worker, text, secondary))
            case control.Progress():
                known = len(self.journal.notes)
                self.journal.progress(worker, message, now)
                for note in self.journal.notes[known:]:
                    self._on_note(note.text)
            case control.Said(text):
                self._note(f"worker {worker}: {text}")
            case control.ChaosDue(epoch, step):
                self._chaos_due(worker, epoch, step)
            case control.StatusRequest():
                self._tell((worker,), self.status())

    # Ordered faults.

    def _chaos_due(self, worker: str, epoch: int, step: int) -> None:
        group = self.state.group(epoch)
        rank = group.members.index(worker) if group and worker in group.members else -1
        for fault in self._chaos.due(rank, step):
            self._note(f"chaos: {fault}")
            hit = (worker,) if fault.rank is not None else self.job.workers
            if not fault.seconds:
                self._signal(hit, signal.SIGKILL)
                continue
            self._signal(hit, signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            for name in hit:
                process = self._processes[name]
                loop.call_later(fault.seconds, process.signal, signal.SIGCONT)
        self._tell((worker,), control.ChaosDone(step))

    # The end.

    async def _put_away(self) -> None:
        """Whatever happened: no process, socket, task or file stays."""
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._signal(self.job.workers, signal.SIGKILL)
        for process in self._processes.values():
            await process.release()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
        if self._file is not None:
            self._file.remove()


def _lost_text(action: events.EndGroup) -> str:
    """``worker 2 lost (killed by SIGKILL (9))``, from the reason that begins with the worker."""
    why = _first_line(action.reason).split(";")[0]
    if not action.worker:
        return f"epoch {action.epoch} ended ({why})"
    return f"worker {action.worker} lost ({why.removeprefix(f'worker {action.worker} ')})"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
