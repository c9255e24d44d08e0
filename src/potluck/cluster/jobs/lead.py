"""Leading one job: what ``membership`` decides about its workers, carried out by hands.

The hands may be on this machine (``standalone.py``) or on all nodes of a cluster
(``coordinator.py``). How an announced group comes to count is theirs, too: on one machine at once,
else by a vote.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from potluck.cluster.groups import events, membership
from potluck.cluster.groups.roster import EXPECTED, Phase, State, Worker
from potluck.cluster.jobs.job import Chaos, Job
from potluck.cluster.jobs.journal import Journal
from potluck.cluster.jobs.roll_call import RollCall
from potluck.system import SIGCONT, SIGKILL, SIGPIPE, SIGSTOP
from potluck.wire import control, jobs
from potluck.wire.messages import PLAIN

_log = logging.getLogger(__name__)

_MAX_STATUS_EVENTS = 20
_A_LOOK = 0
"""The number of probes that belong to no inquiry of ``membership``, which counts from 1."""
_LOOK_AGAIN_S = 1.0


class Hands(Protocol):
    """Who does to workers what was decided, wherever they are."""

    def begin_world(self, world: events.BeginWorld) -> None:
        """From now on workers are started for this world."""

    def start(self, worker: str, attempt: int) -> None:
        """Start its process."""

    def tell(self, workers: Sequence[str], message: control.FromAgent) -> None:
        """Send them ``message``, if they have a link."""

    def stop(self, workers: Sequence[str], reason: str) -> None:
        """Ask them to end."""

    def signal(self, workers: Sequence[str], number: int) -> None:
        """Send their processes a signal."""

    def agree(self, announced: events.Announce) -> None:
        """Have the announced group agreed on, and its members told."""

    def pid(self, worker: str) -> int:
        """Its process, 0 if none is known."""

    def node(self, worker: str) -> str:
        """What people call the node that it is on; empty where there is only one."""


class Lead:
    """One job's leader. ``on_note`` gets every line for people as it happens.

    Set ``hands`` before the first event. ``over`` is set when the job has ended, or ``crash`` is
    what ended it.
    """

    def __init__(
        self,
        job: Job,
        state: State,
        *,
        hands: Hands,
        chaos: Chaos,
        on_note: Callable[[str], None],
    ) -> None:
        self.job = job
        self.state = state
        self.journal = Journal([worker.name for worker in state.workers], time.monotonic())
        self.exit_codes: dict[str, int] = {}
        self.over = asyncio.Event()
        self.crash: Exception | None = None
        self._hands = hands
        self._chaos = chaos
        self._on_note = on_note
        self._events: deque[events.Event] = deque()
        self._is_handling = False
        self._is_closed = False
        self._roll_call = RollCall(self._missing, self.note)
        self._looked_at = float("-inf")
        self._wakeup: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, event: events.Event) -> None:
        """Events are handled one after the other, also those that an action brings about."""
        self._events.append(event)
        if self._is_handling or self._is_closed or self.crash is not None:
            return
        self._is_handling = True
        try:
            while self._events:
                event = self._events.popleft()
                self.state, actions = membership.handle(self.state, event, time.monotonic())
                self._act(actions)
        except Exception as error:  # whoever called can't help it: who waits for the end raises it
            self.crash = error
            self.over.set()
        finally:
            self._is_handling = False
        self._set_wakeup()
        if self.state.over:
            self.over.set()

    def follow(self, ring: tuple[str, ...]) -> None:
        """From the next group on, ranks follow this ring of nodes (``topology.graph.in_ring``)."""
        self.state = replace(self.state, ring=ring)

    def status(self, *, node: str, pid: int, started: float) -> control.StatusReply:
        """The job as it is now, as the agent of ``node`` tells it."""
        view = self.state.view
        ranks = {} if view is None else {name: rank for rank, name in enumerate(view.members)}
        workers = []
        for worker in self.state.workers:
            facts = self.journal.facts_of(worker.name)
            workers.append(
                control.WorkerStatus(
                    worker=worker.name,
                    rank=ranks.get(worker.name, -1) if worker.phase is Phase.MEMBER else -1,
                    phase=worker.phase.value,
                    pid=self._hands.pid(worker.name) if worker.alive else 0,
                    restarts=worker.attempt,
                    device=facts.device,
                    step=facts.step,
                    samples_per_s=facts.samples_per_s if worker.alive else None,
                    node=self._hands.node(worker.name),
                )
            )
        notes = self.journal.notes[-_MAX_STATUS_EVENTS:]
        return control.StatusReply(
            job=self.job.id,
            node=node,
            pid=pid,
            script=control.clip(self.job.script),
            started=started,
            epoch=self.state.epoch,
            step=self.journal.step,
            loss=self.journal.loss,
            workers=tuple(workers),
            events=tuple(control.clip(note.text) for note in notes),
            wire=self.job.wire,
            samples=self.journal.course.samples(time.monotonic()),
            world_restarts=self.state.world.number,
        )

    def note(self, text: str) -> None:
        """Something happened that people want to know."""
        self.journal.note(text, time.monotonic())
        self._on_note(text)

    def close(self) -> None:
        """Nothing is decided any more; no timer and no task stays."""
        self._is_closed = True
        self._roll_call.close()
        if self._wakeup is not None:
            self._wakeup.cancel()
        for task in self._tasks:
            task.cancel()

    # What becomes of the workers.

    def take(self, event: jobs.Event) -> None:
        """A worker said this, or its node's agent saw it."""
        now = time.monotonic()
        match event:
            case control.Waiting(_, epoch):
                self._look_at_members(epoch)
            case control.Progress():
                known = len(self.journal.notes)
                self.journal.progress(event, now)
                for note in self.journal.notes[known:]:
                    self._on_note(note.text)
            case control.Said(worker, text):
                self.note(f"worker {worker}: {text}")
            case control.ChaosDue(worker, epoch, step):
                self._chaos_due(worker, epoch, step)
            case control.Ready():
                self.handle(event)
                if not self.state.having(Phase.MEMBER):
                    self._roll_call.begin()
            case control.Installed(worker, epoch):
                if self.journal.installed(worker, epoch, now) and self.state.world.is_fixed:
                    self._on_note(self.journal.world_formed(now))
                self.handle(event)
            case control.Lost():
                self.journal.reported(event.epoch, event.step, now)
                self.handle(event)
            case jobs.Exited(worker, code):
                self.exit_codes[worker] = code
                self.handle(event)
            case jobs.Stalled(worker, reason):
                node = self._hands.node(worker)
                where = f" on {node}" if node else ""
                text = f"worker {worker}{where} stands still: {reason}"
                self.handle(jobs.Stalled(worker, text))
            case _:
                self.handle(event)

    def chaos_steps(self, rank: int) -> tuple[int, ...]:
        """The steps before which ``rank`` has to ask."""
        return self._chaos.steps_of(rank)

    def unfired(self) -> list[str]:
        """The ordered faults that have not happened."""
        return [str(fault) for fault in self._chaos.waiting]

    # Time.

    def _set_wakeup(self) -> None:
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        at = self.state.next_wakeup()
        if at is not None and not self._is_closed:
            delay = max(0.0, at - time.monotonic())
            loop = asyncio.get_running_loop()
            self._wakeup = loop.call_later(delay, self.handle, events.Tick())

    def _look_at_members(self, epoch: int) -> None:
        """A member waits for long: have the agents of all members look whether they run."""
        group, now = self.state.group(epoch), time.monotonic()
        if group is not None and now - self._looked_at >= _LOOK_AGAIN_S:
            self._looked_at = now
            self._hands.tell(group.members, control.Probe(_A_LOOK))

    def _missing(self) -> str:
        """Whom the first group waits for; empty if it has formed, or nobody is ready."""
        ready = self.state.having(Phase.READY)
        missing = self.state.having(*EXPECTED)
        if not ready or not missing or self.state.having(Phase.MEMBER) or self.state.stopping:
            return ""
        return (
            f"ready: {len(ready)} of {len(ready) + len(missing)} workers; still waiting for "
            f"{', '.join(self._whereabouts(worker) for worker in missing)}"
        )

    def _whereabouts(self, worker: Worker) -> str:
        node, pid = self._hands.node(worker.name), self._hands.pid(worker.name)
        where = f" on {node}" if node else ""
        if worker.phase is Phase.WAITING:
            return f"worker {worker.name}{where} (it ended, and is started again)"
        process = f"its process {pid} runs and" if pid else "it"
        call = "init_process_group" if self.state.world.is_fixed else "potluck.init()"
        return f"worker {worker.name}{where} ({process} has not called {call} yet)"

    # What is done about it.

    def begin(self, actions: Sequence[events.Action]) -> None:
        """Do what a new job begins with."""
        if self.job.wire == PLAIN:
            self.note("links between workers are plain: whoever is on the wire reads along")
        self._act(actions)

    def _act(self, actions: Sequence[events.Action]) -> None:
        for action in actions:
            _log.info("%s: %s", type(action).__name__, action.reason)
            match action:
                case events.Announce():
                    self._hands.agree(action)
                case events.EndGroup():
                    self._end_group(action)
                case events.SendProbe(probe, to):
                    self._hands.tell(to, control.Probe(probe))
                case events.BeginWorld():
                    self._hands.begin_world(action)
                case events.EndWorld():
                    self._end_world(action)
                case events.Start(worker, attempt, reason, alone):
                    if attempt and alone:
                        self.note(f"starting worker {worker} again ({reason})")
                    self._hands.start(worker, attempt)
                case events.Kill(workers, reason):
                    self.note(reason)
                    self._hands.signal(workers, SIGKILL)
                case events.StopWorkers(workers, number, reason):
                    self._stop(workers, number, reason)
                case events.Log(reason):
                    self.note(reason)

    def _end_group(self, action: events.EndGroup) -> None:
        if not self.state.stopping:
            why = _first_line(action.reason).split(";")[0]
            text = f"epoch {action.epoch} ended ({why})"
            if action.worker:
                text = _lost_text(action.worker, why)
            self.journal.lost(action.worker, text, time.monotonic())
            self.note(action.reason)
        cause = control.clip(action.reason)
        over = control.GroupOver(action.epoch, action.worker, action.certain, cause)
        self._hands.tell(action.to, over)

    def _end_world(self, action: events.EndWorld) -> None:
        for worker in action.lost:
            text = _lost_text(worker, _first_line(action.cause))
            self.journal.lost(worker, text, time.monotonic())
        self.note(_first_line(action.reason))
        self._hands.signal(action.workers, signal.SIGTERM)
        self._spawn(self._kill_later(action.workers, self.job.stop_grace_s, SIGKILL))

    def _stop(self, workers: tuple[str, ...], number: int, reason: str) -> None:
        self.note(f"stopping worker {', '.join(workers)}: {_first_line(reason)}")
        if number:
            # Python ignores SIGPIPE: that nobody reads the output is news to the command alone.
            sent = signal.SIGTERM if number == SIGPIPE else number
            self._hands.signal(workers, sent)
            self._spawn(self._kill_later(workers, self.job.interrupt_grace_s, SIGKILL))
            return
        self._hands.stop(workers, reason)
        self._spawn(self._kill_later(workers, self.job.stop_grace_s, signal.SIGTERM))
        self._spawn(self._kill_later(workers, 2 * self.job.stop_grace_s, SIGKILL))

    async def _kill_later(self, workers: tuple[str, ...], delay_s: float, number: int) -> None:
        attempts = {name: self.state.worker(name).attempt for name in workers}
        await asyncio.sleep(delay_s)
        stopped = (self.state.worker(name) for name in workers)
        alive = [w.name for w in stopped if w.alive and w.attempt == attempts[w.name]]
        if alive:
            word = signal.Signals(number).name
            self.note(f"worker {', '.join(alive)} did not end in {delay_s:g} s: {word}")
            self._hands.signal(alive, number)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Ordered faults.

    def _chaos_due(self, worker: str, epoch: int, step: int) -> None:
        group = self.state.group(epoch)
        rank = group.members.index(worker) if group and worker in group.members else -1
        for fault in self._chaos.due(rank, step):
            self.note(f"chaos: {fault}")
            names = tuple(each.name for each in self.state.workers)
            hit = (worker,) if fault.rank is not None else names
            if not fault.seconds:
                self._hands.signal(hit, SIGKILL)
                continue
            self._hands.signal(hit, SIGSTOP)
            loop = asyncio.get_running_loop()
            loop.call_later(fault.seconds, self._hands.signal, hit, SIGCONT)
        self._hands.tell((worker,), control.ChaosDone(step))


def _lost_text(worker: str, why: str) -> str:
    """``worker 2 lost (killed by SIGKILL (9))``, from a reason that may begin with the worker."""
    return f"worker {worker} lost ({why.removeprefix(f'worker {worker} ')})"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
