"""A simulated worker: it enters groups, compares where it stands, votes and commits, with the real
``commit.reconcile``. What it "learns" is the epoch in which each step was committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from potluck._core.context.commit import Resolution, Standing, reconcile
from potluck._core.wire.nodes import JobGroup

STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a worker stands, told to the members of the group of ``epoch``."""

    epoch: int
    worker: str
    standing: Standing


@dataclass(frozen=True, slots=True)
class State:
    """The state of the source, for a receiver."""

    epoch: int
    branch: str
    log: tuple[int, ...]
    history: int


@dataclass(frozen=True, slots=True)
class Vote:
    """Yes to ``step`` in the group of ``epoch``."""

    epoch: int
    worker: str
    step: int


WorkerMessage = Stand | State | Vote


class Worker:
    """One worker process. ``tell(worker, message)`` reaches another member; ``committed(branch,
    step, epoch)`` hears of each commit."""

    def __init__(
        self,
        name: str,
        tell: Callable[[str, str, WorkerMessage], None],
        on_commit: Callable[[str, int, int], None],
    ) -> None:
        self.name = name
        self._tell = tell
        self._on_commit = on_commit
        self.branch = ""
        self.log: list[int] | None = None
        self.history = 0
        self.pending = 0
        self.group: JobGroup | None = None
        self.epoch = 0
        self.stopped = False
        self._standings: dict[str, Standing] = {}
        self._mine: Standing | None = None
        self._resolution: Resolution | None = None
        self._ready = False
        self._votes: dict[int, set[str]] = {}
        self._voted = -1
        self._fork = ""
        self.settled = 0
        self._early: list[WorkerMessage] = []

    def enter(self, group: JobGroup, fork: str = "") -> None:
        """Leave the group I am in and enter ``group``."""
        if self.log is not None:
            self.branch = f"origin {group.origin}{fork}"
        self._fork = fork
        self.group, self.epoch, self.stopped = group, group.epoch, False
        committed = -1 if self.log is None else len(self.log)
        self._mine = Standing(committed, self.history, self.pending)
        self._standings = {self.name: self._mine}
        self._resolution, self._ready = None, False
        self._votes, self._voted = {}, -1
        early, self._early = self._early, []
        for message in early:
            self.hear(message)
        self._stand()

    def leave(self) -> None:
        """Be in no group; the state stays."""
        self.group = None

    def tick(self) -> None:
        """Say again what may have been lost, and go one step on."""
        if self.group is None or self.stopped:
            return
        if not self._ready or not self._voted_by_all():
            self._stand()
        if self._ready:
            if self._voted == self._step and self._step > 0:
                self._say(Vote(self.epoch, self.name, self._step - 1))
            self._vote()

    def hear(self, message: WorkerMessage) -> None:
        """A message of another member; one of a group I am not in yet is kept."""
        if message.epoch > self.epoch:
            self._early = [*self._early[-200:], message]
            return
        if self.group is None or self.stopped or message.epoch != self.epoch:
            return
        match message:
            case Stand(_, worker, standing):
                self._standings.setdefault(worker, standing)
                self._resolve()
            case State(_, branch, log, history):
                if self._resolution is not None and not self._ready:
                    self.branch, self.log, self.history = branch, list(log), history
                    self.pending = 0
                    self._begin()
            case Vote(_, worker, step):
                self._votes.setdefault(step, set()).add(worker)
                self._count()

    @property
    def _step(self) -> int:
        return -1 if self.log is None else len(self.log)

    def _voted_by_all(self) -> bool:
        return any(len(names) == len(self._names) for names in self._votes.values())

    @property
    def _names(self) -> list[str]:
        assert self.group is not None
        return [member.worker for member in self.group.members]

    def _say(self, message: WorkerMessage) -> None:
        assert self.group is not None
        for member in self.group.members:
            if member.worker != self.name:
                self._tell(member.node, member.worker, message)

    def _stand(self) -> None:
        assert self._mine is not None
        self._say(Stand(self.epoch, self.name, self._mine))
        self._resolve()
        self._give()

    def _resolve(self) -> None:
        assert self.group is not None
        names = self._names
        if self._resolution is not None or not set(names) <= self._standings.keys():
            return
        self._resolution = told = reconcile([self._standings[name] for name in names])
        rank = names.index(self.name)
        if rank in told.receivers:
            if told.source < 0:
                self.branch, self.log = f"origin {self.group.origin}{self._fork}", []
                self.history, self.pending = 0, 0
                self._begin()
            return
        if rank in told.apply:
            self._commit(told.history)
        self.history, self.pending = told.history, 0
        self._begin()
        self._give()

    def _give(self) -> None:
        told = self._resolution
        if told is None or not self._ready or self.log is None or self.group is None:
            return
        names = self._names
        if told.source >= 0 and names[told.source] == self.name:
            state = State(self.epoch, self.branch, tuple(self.log[: told.committed]), told.history)
            for rank in told.receivers:
                member = self.group.members[rank]
                if not any(member.worker in votes for votes in self._votes.values()):
                    self._tell(member.node, member.worker, state)

    def _begin(self) -> None:
        self._ready = True
        self.settled = self.epoch
        self._count()

    def _vote(self) -> None:
        self.pending = self.epoch
        self._voted = self._step
        self._votes.setdefault(self._step, set()).add(self.name)
        self._say(Vote(self.epoch, self.name, self._step))
        self._count()

    def _count(self) -> None:
        if not self._ready or self._voted != self._step or self.group is None:
            return
        if len(self._votes.get(self._step, ())) == len(self._names):
            self._commit(self.epoch)
            self.pending = 0

    def _commit(self, epoch: int) -> None:
        assert self.log is not None
        self.history = epoch
        self._on_commit(self.branch, len(self.log), epoch)
        self.log.append(epoch)
