"""``WorkQueue``: tasks of unlike cost for workers that may be lost."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from potluck._core.background import start_thread
from potluck._core.checks import Duration, checked_seconds, checked_whole
from potluck._core.forks import Owner, Uncopied
from potluck._core.waiting import Reminder
from potluck._core.wire.payload import MAX_VALUES, pack
from potluck.errors import ConfigurationError, HandlerError, ServiceError
from potluck.services import Call, Remote, service
from potluck.services.definition import check_unused, note_used
from potluck.services.presence import Presence
from potluck.services.waits import SLICE_S, WaitingCalls, await_reply, raise_local
from potluck.training.work_ledger import WorkLedger

if TYPE_CHECKING:
    from potluck._core.context import DistributedContext

_MAX_WAIT_S = 10.0
_PART_HEADER_BYTES = MAX_VALUES
"""Of results that are sent in one payload: a header of so many bytes has no more values."""
_PART_BYTES = 32 << 20


class Task(NamedTuple):
    """A task: its number in the list of tasks, and what that list has there."""

    number: int
    payload: Any


class WorkQueue(Uncopied):
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
    can't be meant. A mistake of the worker with the list (in ``tasks``, ``backups``,
    ``max_attempts`` or ``silence_s``) is raised on all workers, at once, and each may make the
    queue again.
    """

    take_instead = "make one on each worker, with the same name"

    def __init__(
        self,
        ctx: DistributedContext,
        tasks: Iterable[Any] | None = None,
        *,
        server: int = 0,
        backups: int = 2,
        max_attempts: int = 3,
        silence_s: Duration = 10.0,
        name: str = "work",
    ) -> None:
        if not hasattr(ctx, "connect"):
            raise TypeError(f"WorkQueue takes a context, potluck.init(), not {ctx!r}")
        service(name)  # checks it on the workers that only connect, too
        check_unused(ctx, "WorkQueue", name)
        self._ctx = ctx
        self._name = name
        rank = ctx.group.rank_of(str(server))
        if rank < 0:
            there = ", ".join(member.worker for member in ctx.members)
            raise ValueError(f"server={server!r}: there is no such worker; there are: {there}")
        failed = _failed.setdefault(ctx, Counter())
        # Each attempt is a service of its own, so that an error is raised once on each worker.
        served = f"{name} ({failed[name] + 1})" if failed[name] else name
        self._queue: _QueueService | None = None
        try:
            silence_s = checked_seconds(silence_s, "silence_s")
            backups = checked_whole("backups", backups, at_least=0)
            max_attempts = checked_whole("max_attempts", max_attempts, at_least=1)
            if ctx.rank == rank:
                listed = _listed(tasks, server)
                ledger = WorkLedger(len(listed), backups, max_attempts)
                self._queue = _QueueService(Presence(lambda: ctx.group, silence_s), listed, ledger)
        except Exception as error:
            if ctx.rank == rank:
                refusal = _Refusal(ctx, served, _error_for_others(name, error, server))
                with contextlib.suppress(
                    ConfigurationError, ValueError
                ):  # other workers fail alike
                    ctx.serve(service(served)(refusal))
                    failed[name] += 1
            raise
        if self._queue is not None:
            ctx.serve(service(served, concurrent=True, before=self._queue._note_call)(self._queue))
        self._remote: Remote = ctx.connect(served, rank=rank)
        if self._queue is None:
            try:
                self._remote.enter()
            except HandlerError as error:
                failed[name] += 1
                raise_local(error, _ERRORS)
        note_used(ctx, name)
        self._is_closed = threading.Event()
        self._owner = Owner("this WorkQueue")
        remote, is_closed = self._remote, self._is_closed
        # The thread does not keep this object: a queue that is never closed ends with it.
        weakref.finalize(self, is_closed.set)
        start_thread(
            lambda: _send_alive(remote, is_closed, silence_s / 4),
            name=f"potluck-queue-{name}"[:60],
            on_broken=lambda error: None,
        )

    def __iter__(self) -> Iterator[Task]:
        """Tasks for this worker, until all are done. A task that was not finished before the next
        one is handed out again."""
        while "over" not in (reply := self._await("take", "a task")):
            yield Task(int(reply["task"]), reply["payload"])

    def finish(self, task: Task | int, result: Any = None) -> bool:
        """Send the result of a task. Returns whether it counts: False if another worker was first.
        TypeError or ValueError for a result that can't be sent: of another type, or with more than
        about a million values or 16 MiB of texts; arrays of any size can."""
        given = task.number if isinstance(task, Task) else task
        number = checked_whole("task", given, at_least=0)
        try:
            return bool(self._ask("finish", number, result))
        except (TypeError, ValueError) as error:
            raise _misfit(number, result) or error from error.__cause__

    def results(self, *, timeout: Duration | None = None) -> list[Any]:
        """The results in the order of the tasks, on every worker that asks. Waits until all are
        done; ServiceTimeout after ``timeout`` seconds if one is given. RuntimeError if a task was
        begun too often. They come in parts, so their number has no bound but memory."""
        self._await("end", "the results", timeout)
        if self._queue is not None:
            return copy.deepcopy(self._queue._results)
        found: list[Any] = []
        while (part := self._ask("results", len(found)))["results"]:
            found += part["results"]
        return found

    def stats(self) -> dict[str, int]:
        """``tasks``, ``done``, ``copies`` that were handed out, results ``refused`` since another
        was first, tasks handed out ``again`` since their workers were lost."""
        found: dict[str, int] = self._ask("stats")
        return found

    def close(self) -> None:
        """Take no more tasks. On the worker with the list: wait until the other live workers have
        closed, too. Idempotent; does nothing in a forked child."""
        if self._is_closed.is_set() or not self._owner.is_here:
            return
        self._is_closed.set()
        if self._queue is not None:
            self._queue._await_others(self._ctx.group.me.worker)
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
        elif self._owner.is_here:
            self._is_closed.set()

    # -- inside

    def _await(self, method: str, what: str, timeout: Duration | None = None) -> dict[str, Any]:
        seconds = None if timeout is None else checked_seconds(timeout)
        return await_reply(lambda wait_s: self._ask(method, wait_s), what, seconds)

    def _ask(self, method: str, *args: Any) -> Any:
        self._owner.check()
        try:
            return getattr(self._remote, method)(*args)
        except HandlerError as error:
            raise_local(error, _ERRORS)


_ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
    "TaskLost": RuntimeError,
}

_failed: WeakKeyDictionary[DistributedContext, Counter[str]] = WeakKeyDictionary()
"""By context and name: the number of attempts that ended with an error of the worker with the list;
the same on all workers."""


def _listed(tasks: Any, server: object) -> list[Any]:
    """The tasks as a list; TypeError or ValueError for what the other workers can't be sent."""
    if tasks is None:
        raise ValueError(f"worker {server} has the list: pass it tasks=[...]")
    if not isinstance(tasks, Iterable):
        raise TypeError(f"tasks is {tasks!r:.100}; it must be a list, or another iterable")
    listed = list(tasks)
    for number, payload in enumerate(listed):
        pack({number: payload}, "tasks")  # as deep as in a reply; errors name tasks[number]
    return listed


def _part(results: list[Any]) -> dict[str, Any]:
    return {"results": results}


def _misfit(number: int, result: Any) -> Exception | None:
    """Why ``result`` can't be sent, with the number of its task; None if it can."""
    try:
        pack(result, f"the result of task {number}")
    except (TypeError, ValueError) as error:
        return error
    return None


def _error_for_others(name: str, error: Exception, server: object) -> Exception:
    """The error of the worker with the list, as the other workers raise it."""
    kinds: tuple[type[Exception], ...] = (TypeError, ValueError)
    kind = next((each for each in kinds if isinstance(error, each)), RuntimeError)
    return kind(f"worker {server} can't make the list of queue {name!r}: {error}")


def _send_alive(remote: Remote, is_closed: threading.Event, every_s: float) -> None:
    """Tell the queue that this worker lives, while it computes."""
    while not is_closed.wait(every_s):
        with contextlib.suppress(ServiceError):  # the calls of the script say what is wrong
            remote.alive(timeout=max(1.0, every_s))


class _Refusal:
    """The service of a queue that could not be made: tells each other worker why, once."""

    def __init__(self, ctx: DistributedContext, name: str, error: Exception) -> None:
        self._ctx = ctx
        self._name = name
        self._error = error
        self._rest = {each.worker for each in ctx.members} - {ctx.group.me.worker}

    def enter(self, call: Call) -> None:
        """Raises the mistake."""
        if call.worker in self._rest:
            self._rest.discard(call.worker)
            if not self._rest:
                self._ctx.withdraw(self._name)
        raise type(self._error)(str(self._error))


class _QueueService:
    """The service: each public method is one call."""

    def __init__(self, presence: Presence, tasks: list[Any], ledger: WorkLedger) -> None:
        self._tasks = tasks
        self._ledger = ledger
        self._presence = presence
        self._results: list[Any] = [None] * len(tasks)
        self._sizes = [(0, 0)] * len(tasks)
        """Of each result the bytes of its header and of its arrays, in a payload."""
        self._failure: Exception | None = None
        self._changed = threading.Condition(threading.RLock())
        self._waits = WaitingCalls(self._changed, self._look, thread="potluck-work-queue")

    def enter(self, call: Call) -> None:
        """A worker has made the queue."""

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
            return None if task is None else {"task": task, "payload": self._tasks[task]}

        return self._when(attempt, wait_s)

    def finish(self, call: Call, task: int, result: Any) -> bool:
        with self._changed:
            # As in a reply of ``results``, so that each result can be handed out.
            packed = pack(_part([result]), f"the result of task {int(task)}")
            counts = self._ledger.finish(call.worker, int(task))
            if counts:
                self._results[int(task)] = result
                self._sizes[int(task)] = len(packed.header), packed.nbytes
            self._look()
            return counts

    def end(self, call: Call, wait_s: float) -> Any:
        """Waits until all tasks are done."""

        def attempt() -> dict[str, Any] | None:
            self._check()
            return {} if self._ledger.is_over else None

        return self._when(attempt, wait_s)

    def results(self, call: Call, start: int) -> dict[str, Any]:
        """After ``end``: the results of the tasks from ``start`` on, as many as one payload takes;
        none behind the last one."""
        start = min(max(0, int(start)), len(self._results))
        stop, header, nbytes = start, 0, 0
        for stop in range(start, len(self._results)):
            header, nbytes = header + self._sizes[stop][0], nbytes + self._sizes[stop][1]
            if stop > start and (header > _PART_HEADER_BYTES or nbytes > _PART_BYTES):
                break
        else:
            stop = len(self._results)
        return _part(self._results[start:stop])

    def alive(self, call: Call) -> None:
        """The worker computes."""

    def leave(self, call: Call) -> None:
        with self._changed:
            self._presence.leave(call.worker)
            self._look()
            self._changed.notify_all()

    def stats(self, call: Call) -> dict[str, int]:
        with self._changed:
            return {
                "tasks": self._ledger.num_tasks,
                "done": len(self._ledger.done),
                "copies": self._ledger.num_copies,
                "refused": self._ledger.num_refused,
                "again": self._ledger.num_again,
            }

    # -- inside

    def _note_call(self, call: Call) -> None:
        self._presence.hear(call)

    def _check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _when(self, attempt: Any, wait_s: float) -> Any:
        with self._changed:
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
        lost = [name for name in running if not self._presence.is_there(name)]
        self._ledger.give_up(lost)

    def _await_others(self, me: str) -> None:
        rest: list[str] = []
        reminder = Reminder(lambda: f"the queue waits for worker {', '.join(rest)} to end")
        while True:
            with self._changed:
                rest = self._presence.others(me)
                if not rest:
                    return
                self._changed.wait(SLICE_S)
            reminder.tick()
