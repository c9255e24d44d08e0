"""Which worker does which task of a queue, and whose result counts. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field


class TaskLost(RuntimeError):
    """A task was begun too often and never finished."""


@dataclass(slots=True)
class WorkLedger:
    """The tasks ``0`` to ``num_tasks - 1``, in the order in which they are handed out.

    A task is *waiting*, or *running* on one or more workers, or *done*. When none waits, and at
    most ``num_backups`` run, an idle worker gets a copy of the task that runs longest (backup
    tasks: Dean and Ghemawat, "MapReduce", 2004, section 3.6).
    """

    num_tasks: int
    num_backups: int
    max_attempts: int
    waiting: deque[int] = field(init=False)
    running: dict[int, list[str]] = field(default_factory=dict)
    """By task, in the order of their start: the workers that compute it."""
    done: set[int] = field(default_factory=set)
    attempts: Counter[int] = field(default_factory=Counter)
    num_copies: int = 0
    num_refused: int = 0
    num_again: int = 0
    """Tasks that all their workers gave up: a worker was lost, or asked for another task, as does a
    worker that was started again."""

    def __post_init__(self) -> None:
        self.waiting = deque(range(self.num_tasks))

    @property
    def is_over(self) -> bool:
        """Whether every task is done."""
        return len(self.done) == self.num_tasks

    def take(self, worker: str) -> int | None:
        """A task for ``worker``, which computes no other; None if it must wait, or all are done.
        TaskLost for a task that was begun ``max_attempts`` times."""
        self.give_up([worker])
        if self.waiting:
            task = self.waiting.popleft()
            self.attempts[task] += 1
            if self.attempts[task] > self.max_attempts:
                self.waiting.appendleft(task)
                raise TaskLost(
                    f"task {task} was begun {self.max_attempts} times, and each time its worker "
                    "was lost or went on to another one"
                )
            self.running[task] = [worker]
            return task
        if len(self.running) <= self.num_backups:
            for task, workers in self.running.items():
                if len(workers) == 1:
                    workers.append(worker)
                    self.num_copies += 1
                    return task
        return None

    def finish(self, worker: str, task: int) -> bool:
        """Whether this result of ``task`` counts: the first one does. ValueError for no task."""
        if not 0 <= task < self.num_tasks:
            raise ValueError(f"there is no task {task}; there are {self.num_tasks}")
        if task in self.done:
            self.num_refused += 1
            return False
        self.done.add(task)
        self.running.pop(task, None)
        if task in self.waiting:  # its worker was given up, and has finished all the same
            self.waiting.remove(task)
        return True

    def give_up(self, workers: Iterable[str]) -> list[int]:
        """``workers`` compute nothing any more. Returns their tasks, which are handed out next."""
        lost = set(workers)
        again = []
        for task, names in list(self.running.items()):
            names[:] = [name for name in names if name not in lost]
            if not names:
                del self.running[task]
                again.append(task)
        self.num_again += len(again)
        self.waiting.extendleft(reversed(again))
        return again
