"""Reports of one node about a job's workers, kept for a new leader. Pure.

The reports to a lost leader are lost with it. So each node repeats to the next leader how
far each worker is, with all its facts; and for its newest process the exit code if it has exited;
else that the worker has finished, asks for a group, or is a member of one.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from potluck._core.wire import jobs, worker_link


class WorkerReports:
    """The reports of one job on one node."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}
        self._worlds: dict[str, int] = {}
        self._ready: dict[str, worker_link.Ready] = {}
        self._asking: dict[str, int] = {}
        self._given: dict[str, int] = {}
        self._entered: dict[str, int] = {}
        self._finished: set[str] = set()
        self._progress: dict[str, worker_link.WorkerProgress] = {}
        self._exited: dict[str, jobs.Exited] = {}
        self._read: dict[str, jobs.OutputEnded] = {}

    def world_of(self, worker: str) -> int | None:
        """The world that the newest process of ``worker`` was started for; None if none was."""
        return self._worlds.get(worker)

    def has_run(self, worker: str) -> bool:
        """Whether a process of ``worker`` was started here."""
        return worker in self._attempts

    def has_finished(self, worker: str) -> bool:
        """Whether the newest process of ``worker`` has reported that it is done."""
        return worker in self._finished

    def is_new(self, worker: str, attempt: int) -> bool:
        """Whether no process of ``worker`` was started here in this ``attempt`` or a later one."""
        return attempt > self._attempts.get(worker, -1)

    def starting(self, worker: str, attempt: int, world: int) -> None:
        """A process of ``worker`` is about to be started; what was reported before is outdated."""
        self._attempts[worker], self._worlds[worker] = attempt, world
        for known in (self._ready, self._asking, self._given, self._entered, self._exited):
            known.pop(worker, None)
        self._finished.discard(worker)

    def given(self, worker: str, epoch: int) -> None:
        """``worker`` was given the group of ``epoch``, which it may enter."""
        self._given[worker] = epoch

    def ended_here(self) -> None:
        """The groups that workers were given were ended on this node: a worker that had not entered
        its group yet needs a later one. The leader knows nothing of that end."""
        for worker, after in self._asking.items():
            self._asking[worker] = max(after, self._given.get(worker, 0))

    def take(self, event: jobs.Event) -> jobs.Event:
        """``event`` happened; what to report."""
        match event:
            case worker_link.Ready(worker=worker, after_epoch=after):
                if worker in self._finished:  # and forms its fixed world once more
                    self._finished.discard(worker)
                    after = self._entered.get(worker, after)
                    event = msgspec.structs.replace(event, after_epoch=after)
                self._ready[worker] = event
                self._asking[worker] = after
            case worker_link.Lost(worker, epoch):
                self._asking[worker] = epoch
            case worker_link.Entered(worker, epoch):
                self._entered[worker] = epoch
                self._asking.pop(worker, None)
            case worker_link.Finished(worker):
                self._finished.add(worker)
            case worker_link.WorkerProgress(worker=worker, facts=facts):
                known = self._progress.get(worker, event).facts
                all_facts = dict(list((known | facts).items())[: worker_link.MAX_FACTS])
                self._progress[worker] = msgspec.structs.replace(event, facts=all_facts)
            case jobs.Exited(worker):
                self._exited[worker] = event
            case jobs.OutputEnded(worker):
                self._read[worker] = event
            case _:
                pass
        return event

    def progress(self) -> list[jobs.Event]:
        """How far each worker is."""
        return list(self._progress.values())

    def ended(self) -> list[jobs.Event]:
        """How the processes that ended did, and whether all of their output was sent."""
        found: list[jobs.Event] = []
        for worker, exited in self._exited.items():
            found.append(exited)
            read = self._read.get(worker)
            if read is not None and read.attempt == exited.attempt:
                found.append(read)
        return found

    def seen(self, alive: Collection[str]) -> tuple[jobs.ProcessState, ...]:
        """The newest process of each worker."""
        return tuple(
            jobs.ProcessState(worker, attempt, self._worlds[worker], worker in alive)
            for worker, attempt in self._attempts.items()
        )

    def standing(self, alive: Collection[str]) -> list[jobs.Event]:
        """The last reports of the running workers about themselves."""
        found: list[jobs.Event] = []
        for worker in alive:
            if worker in self._finished:
                found.append(worker_link.Finished(worker))
            elif worker in self._asking:
                after = self._asking[worker]
                ready = self._ready[worker]
                found.append(msgspec.structs.replace(ready, after_epoch=after, cause=""))
            elif worker in self._entered:
                found.append(self._ready[worker])
                found.append(worker_link.Entered(worker, self._entered[worker]))
        return found
