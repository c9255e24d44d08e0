"""``WorkQueue``: tasks of unlike cost for workers that may be lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from potluck.background import start_thread
from potluck.errors import HandlerError, ServiceError
from potluck.services import Call, Remote, service
from potluck.services.waits import WaitingCalls
from potluck.training.work_ledger import WorkLedger
from potluck.waiting import Reminder, checked_seconds

if TYPE_CHECKING:
    from potluck.context import DistributedContext

_SLICE_S = 1.0
_MAX_WAIT_S = 10.0


class Task(NamedTuple):
    """A task: its number in the list of tasks, and what that list has there."""

    number: int
    payload: Any


class WorkQueue:
    """A list of tasks that all workers take from, each whenever it is free.

        with potluck.WorkQueue(ctx, tasks) as queue:
            for task in queue:
                queue.finish(task, compute(task.payload))
            results = queue.results()

    Every worker makes one. The list, and the results, are on the worker whose number is ``server``;
    the others may pass None for ``tasks``. Put the costliest tasks first. Payloads and results are
    what services take: nested dicts, lists and tuples of arrays, numbers, str and bytes.

    The result of each task counts once, although workers are lost: the tasks of a worker that is
    silent for ``silence_s``, or has left the group, are handed out again. When no task waits, a
    free worker gets a copy of one of the last ``backups`` that still run, and the first result
    counts. So a task may run more than once, and must have no effect but its result. A task that
    was begun ``max_attempts`` times ends the queue for all. If the worker with the list is lost,
    the queue is lost. One thread of each worker takes tasks.

    ``name`` tells several queues of one job apart. TypeError or ValueError for arguments that
    can't be meant.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        tasks: Sequence[Any] | None = None,
        *,
        server: int = 0,
        backups: int = 2,
        max_attempts: int = 3,
        silence_s: float = 10.0,
        name: str = "work",
    ) -> None:
        silence_s = checked_seconds(silence_s)
        if backups < 0:
            raise ValueError(f"backups is {backups}; it must be at least 0")
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}; it must be at least 1")
        self._ctx = ctx
        self._name = name
        rank = ctx.group.rank_of(str(server))
        if rank < 0:
            there = ", ".join(member.worker for member in ctx.members)
            raise ValueError(f"server={server!r}: there is no such worker; there are: {there}")
        self._offer: _Offer | None = None
        if ctx.rank == rank:
            if tasks is None:
                raise ValueError(f"worker {server} has the list: pass it tasks=[...]")
            ledger = WorkLedger(len(tasks), backups, max_attempts)
            self._offer = _Offer(ctx, list(tasks), ledger, silence_s)
            ctx.serve(service(name, concurrent=True)(self._offer))
        self._remote: Remote = ctx.connect(name, rank=rank)
        self._is_closed = threading.Event()
        start_thread(
            lambda: self._keep_heard(silence_s / 4),
            name=f"potluck-queue-{name}"[:60],
            on_broken=lambda error: None,
        )

    def __iter__(self) -> Iterator[Task]:
        """Tasks for this worker, until all are done. A task that was not finished before the next
        one is handed out again."""
        while (taken := self._await("take", "a task")) is not _OVER:
            yield Task(int(taken[0]), taken[1])

    def finish(self, task: Task | int, result: Any = None) -> bool:
        """Give the result of a task. Whether it counts: False if another worker was first."""
        number = task.number if isinstance(task, Task) else int(task)
        return bool(self._ask("finish", number, result))

    def results(self, *, timeout: float | None = None) -> list[Any]:
        """The results in the order of the tasks, on every worker that asks. Waits until all are
        done; ServiceTimeout after ``timeout`` seconds if one is given. RuntimeError if a task was
        begun too often."""
        found = self._await("results", "the results", timeout)
        return list(found)

    def stats(self) -> dict[str, int]:
        """``tasks``, ``done``, ``copies`` that were handed out, results ``refused`` since another
        was first, tasks handed out ``again`` since their workers were lost."""
        found: dict[str, int] = self._ask("stats")
        return found

    def close(self) -> None:
        """Take no more tasks. On the worker with the list: wait until the others that are heard
        have closed, too. Idempotent."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._offer is not None:
            self._offer._await_others(self._ctx.group.me.worker)
            return
        try:
            self._ask("leave")
        except ServiceError:
            return  # it has ended

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._is_closed.set()

    # -- inside

    def _keep_heard(self, every_s: float) -> None:
        """Tell the queue that this worker lives, while it computes."""
        while not self._is_closed.wait(every_s):
            try:
                self._remote.alive(timeout=max(1.0, every_s))
            except ServiceError:
                continue  # the calls of the script say what is wrong

    def _await(self, method: str, what: str, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + checked_seconds(timeout)
        waits_for = ""
        reminder = Reminder(lambda: f"{what}: waiting for {waits_for}", deadline)
        while True:
            left = _SLICE_S if deadline is None else deadline - time.monotonic()
            reply = self._ask(method, min(_SLICE_S, max(0.0, left)))
            if "reply" in reply:
                return reply["reply"]
            if "over" in reply:
                return _OVER
            waits_for = str(reply["waits_for"])
            if left <= 0:
                raise TimeoutError(f"{what} did not come in time: it waits for {waits_for}")
            reminder.tick()

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._remote, method)(*args)
        except HandlerError as error:
            kinds = {"ValueError": ValueError, "TaskLost": RuntimeError}
            if error.type in kinds:
                raise kinds[error.type](error.text) from error
            raise


_OVER = object()


class _Offer:
    """The service: each public method is one call."""

    def __init__(
        self, ctx: DistributedContext, tasks: list[Any], ledger: WorkLedger, silence_s: float
    ) -> None:
        self._ctx = ctx
        self._tasks = tasks
        self._ledger = ledger
        self._silence_s = silence_s
        self._results: list[Any] = [None] * len(tasks)
        self._failure: Exception | None = None
        self._num_again = 0
        self._heard_at: dict[str, float] = {}
        self._began = time.monotonic()
        self._gone: set[str] = set()
        self._changed = threading.Condition(threading.RLock())
        self._waits = WaitingCalls(self._changed, self._look, thread="potluck-work-queue")

    def take(self, call: Call, wait_s: float) -> Any:
        worker = call.worker

        def attempt() -> dict[str, Any] | None:
            self._check()
            if self._ledger.is_over:
                return {"over": True}
            try:
                task = self._ledger.take(worker)
            except RuntimeError as error:
                self._failure = error
                raise
            return None if task is None else {"reply": [task, self._tasks[task]]}

        return self._when(call, attempt, wait_s)

    def finish(self, call: Call, task: int, result: Any) -> bool:
        with self._changed:
            self._hear(call)
            counts = self._ledger.finish(call.worker, int(task))
            if counts:
                self._results[int(task)] = result
            self._look()
            return counts

    def results(self, call: Call, wait_s: float) -> Any:
        def attempt() -> dict[str, Any] | None:
            self._check()
            return {"reply": self._results} if self._ledger.is_over else None

        return self._when(call, attempt, wait_s)

    def alive(self, call: Call) -> None:
        with self._changed:
            self._hear(call)

    def leave(self, call: Call) -> None:
        with self._changed:
            self._gone.add(call.worker)
            self._look()
            self._changed.notify_all()

    def stats(self, call: Call) -> dict[str, int]:
        with self._changed:
            return {
                "tasks": self._ledger.num_tasks,
                "done": len(self._ledger.done),
                "copies": self._ledger.num_copies,
                "refused": self._ledger.num_refused,
                "again": self._num_again,
            }

    # -- inside

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _hear(self, call: Call) -> None:
        self._heard_at[call.worker] = time.monotonic()
        self._gone.discard(call.worker)

    def _when(self, call: Call, attempt: Any, wait_s: float) -> Any:
        with self._changed:
            self._hear(call)
            self._give_up_lost()
            wait_s = min(max(0.0, float(wait_s)), _MAX_WAIT_S)
            return self._waits.add(attempt, self._otherwise, wait_s)

    def _otherwise(self) -> dict[str, Any]:
        running = ", ".join(
            f"{task} on worker {' and '.join(names)}"
            for task, names in list(self._ledger.running.items())[:4]
        )
        return {"waits_for": f"task {running}" if running else "tasks that no worker takes"}

    def _look(self) -> None:
        self._give_up_lost()
        self._waits.look()

    def _give_up_lost(self) -> None:
        running = {name for names in self._ledger.running.values() for name in names}
        lost = [name for name in running if not self._is_heard(name)]
        self._num_again += len(self._ledger.give_up(lost))

    def _is_heard(self, worker: str) -> bool:
        if worker in self._gone or self._ctx.group.rank_of(worker) < 0:
            return False
        since = time.monotonic() - self._silence_s
        return self._heard_at.get(worker, self._began) > since

    def _await_others(self, me: str) -> None:
        def left() -> list[str]:
            names = [member.worker for member in self._ctx.members]
            return [name for name in names if name != me and self._is_heard(name)]

        reminder = Reminder(lambda: f"the queue waits for worker {', '.join(left())} to end")
        while True:
            with self._changed:
                if not left():
                    return
                self._changed.wait(_SLICE_S)
            reminder.tick()
