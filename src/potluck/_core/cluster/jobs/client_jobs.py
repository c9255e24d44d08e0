"""The jobs that commands of this machine started, as this machine's dispatcher remembers them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from potluck._core.cluster.links.local import Client
from potluck._core.system import SIGHUP
from potluck._core.wire import jobs, local, worker_link


class _Nobody:
    """The command of a job that outlives it has left."""

    is_behind = False

    def take(self, message: local.Reply) -> None:
        """Nobody reads it."""


@dataclass(slots=True, eq=False)
class ClientJob:
    """A job and ``client``, the command that waits for it. A job that ``outlives`` its command goes
    on when that leaves. ``is_taken``: a leader has had the job; ``asks``: the present one has not
    answered yet. ``number`` and ``times``: the last
    signal for the job, and how many came."""

    spec: jobs.JobSpec
    client: Client
    outlives: bool = False
    is_taken: bool = False
    asks: bool = True
    number: int = 0
    times: int = 0


@dataclass(eq=False, repr=False)
class ClientJobs:
    """Passes on requests of commands by ``to_leader(message)``, and messages for commands.

    ``is_over(spec)`` is called when the job of a command has ended, or did not begin.
    """

    to_leader: Callable[[jobs.Submit | jobs.InterruptJob], object]
    is_over: Callable[[jobs.JobSpec], None]

    def __post_init__(self) -> None:
        self._jobs: dict[str, ClientJob] = {}
        self._is_out = False

    @property
    def is_behind(self) -> bool:
        """Whether some command reads its job's output too slowly."""
        return any(each.client.is_behind for each in self._jobs.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The jobs for which commands wait."""
        return tuple(self._jobs)

    def spec(self, job: str) -> jobs.JobSpec | None:
        """What ``job``, for which a command waits, is; None if none does."""
        return self._jobs[job].spec if job in self._jobs else None

    # Requests of commands.

    def submit(self, spec: jobs.JobSpec, client: Client, *, outlives: bool = False) -> None:
        """``client`` waits for the job of ``spec``, which is the leader's to begin."""
        self._jobs[spec.job] = ClientJob(spec, client, outlives)
        self.to_leader(jobs.Submit(spec))

    def interrupt(self, client: Client, number: int) -> None:
        """The operator wants the job of ``client`` to end, by signal ``number``."""
        for job, each in self._jobs.items():
            if each.client is client:
                each.number = number
                each.times = min(each.times + 1, jobs.MAX_INTERRUPTS)
                self.to_leader(jobs.InterruptJob(job, number, each.times))

    def left(self, client: Client) -> None:
        """The command has gone: its job ends as if the terminal had closed, or outlives it."""
        for each in self._jobs.values():
            if each.client is client and each.outlives:
                each.client = _Nobody()
        self.interrupt(client, SIGHUP)

    def ask_again(self, waiting: Collection[jobs.JobSpec] = ()) -> None:
        """The leader may have changed: messages to the former leader may be lost, and the next one
        may not know of the jobs ``waiting``, which an earlier run of this agent may have
        submitted."""
        for spec in waiting:
            known = self._jobs.setdefault(spec.job, ClientJob(spec, _Nobody(), outlives=True))
            known.asks = True
        for job, each in self._jobs.items():
            if each.asks:
                self.to_leader(jobs.Submit(each.spec))
            if each.times:
                self.to_leader(jobs.InterruptJob(job, each.number, each.times))

    # Messages for commands.

    def received(self, message: jobs.ToStarter) -> None:
        """The leader sent ``message``."""
        each = self._jobs.get(message.job)
        if each is None:
            return
        if isinstance(message, jobs.Submitted):
            if not message.error:
                self._take(each)
            else:
                self._remove(message.job)
                each.client.take(local.CommandResult(False, message.error))
            return
        each.client.take(message)
        if isinstance(message, jobs.JobEnded):
            self._remove(message.job)

    def show(self, message: jobs.JobStatus) -> None:
        """The leader sent the status of a job, maybe of this machine."""
        if (each := self._jobs.get(message.status.job)) is not None:
            self._take(each)  # ``Submitted`` may be lost, with the leader that sent it
            each.client.take(message)

    def _take(self, each: ClientJob) -> None:
        each.asks = False
        if not each.is_taken:
            each.is_taken = True
            each.client.take(local.JobTaken(each.spec.job, each.spec.starter))

    def listed(self, running: Collection[str]) -> None:
        """The leader has these jobs; others that it had taken are over."""
        gone = [job for job, each in self._jobs.items() if not each.asks and job not in running]
        for job in gone:
            text = (
                "the cluster does not have it any more, since this node was away: "
                f"`potluck wait {job}` tells how it ended, if any machine knows"
            )
            self._remove(job).client.take(local.CommandResult(False, text))

    def out(self, reason: str) -> None:
        """This node is paused, or out of the view: what workers on other nodes write does not get
        here as long as it is."""
        self._is_out = True
        self._note(reason)

    def back(self, view: str) -> None:
        """This node uses the view that reads ``view``, maybe after a time without one."""
        if self._is_out:
            self._is_out = False
            self._note(f"goes on in {view}")

    def _remove(self, job: str) -> ClientJob:
        each = self._jobs.pop(job)
        self.is_over(each.spec)
        return each

    def _note(self, text: str) -> None:
        for job, each in self._jobs.items():
            each.client.take(jobs.JobNote(job, worker_link.clip(f"this machine: {text}")))
