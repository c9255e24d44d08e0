"""What the leader of a job sends to the nodes of the job's workers: starts, messages, signals.

``Endings`` ends workers in steps, ``Faults`` injects the faults of ``potluck run --chaos``."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from potluck._core.background import Tasks
from potluck._core.cluster.jobs.chaos import ChaosPlan
from potluck._core.cluster.jobs.groups.roster import State, WorkerState
from potluck._core.cluster.jobs.placement import Placement
from potluck._core.cluster.links.peers import PeerLinks
from potluck._core.system import SIGCONT, SIGKILL, SIGPIPE, SIGSTOP
from potluck._core.wire import jobs, worker_link
from potluck._core.wire.worker_link import ChaosDone, ChaosDue

_STOP_GRACE_S = 3.0
_INTERRUPT_GRACE_S = 15.0

Names = tuple[str, ...]


class Orders:
    """The orders about workers of ``job``, each to the node of the worker."""

    def __init__(self, job: str, placement: Placement, links: PeerLinks) -> None:
        self._job = job
        self._placement = placement
        self._links = links

    def start(self, worker: str, attempt: int) -> None:
        """Start the process of ``worker``."""
        for node in self._placement.by_node((worker,)):
            self._links.send(node, jobs.StartWorker(self._job, worker, attempt))

    def send(self, names: Sequence[str], message: worker_link.FromAgent) -> None:
        """Give ``message`` to the workers ``names``."""
        for node, here in self._placement.by_node(names).items():
            self._links.send(node, jobs.SendToWorkers(self._job, here, message))

    def signal(self, workers: Sequence[str], number: int) -> None:
        """Send signal ``number`` to ``workers``."""
        for node, names in self._placement.by_node(workers).items():
            self._links.send(node, jobs.SignalWorkers(self._job, names, number))


@dataclass(eq=False, repr=False)
class Endings:
    """Ends workers of one job by ``orders``. ``state_of`` is the state of a worker in membership;
    ``note`` shows a line to people."""

    orders: Orders
    state_of: Callable[[str], WorkerState]
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._tasks = Tasks()

    def terminate(self, workers: Names) -> None:
        """End ``workers`` by SIGTERM, then by SIGKILL."""
        self.orders.signal(workers, signal.SIGTERM)
        self._later(workers, _STOP_GRACE_S, SIGKILL)

    def interrupt(self, workers: Names, number: int) -> None:
        """Pass on the operator's signal, then end ``workers`` by SIGKILL."""
        # The command got SIGPIPE because its output is not read. Python workers ignore that signal.
        self.orders.signal(workers, signal.SIGTERM if number == SIGPIPE else number)
        self._later(workers, _INTERRUPT_GRACE_S, SIGKILL)

    def stop(self, names: Names, reason: str) -> None:
        """Ask the workers ``names`` to end, then end them by SIGTERM, then by SIGKILL."""
        self.orders.send(names, worker_link.Stop(worker_link.clip(reason)))
        self._later(names, _STOP_GRACE_S, signal.SIGTERM)
        self._later(names, 2 * _STOP_GRACE_S, SIGKILL)

    def close(self) -> None:
        """End all tasks."""
        self._tasks.cancel()

    def _later(self, workers: Names, delay_s: float, number: int) -> None:
        self._tasks.start(self._signal_later(workers, delay_s, number))

    async def _signal_later(self, workers: Names, delay_s: float, number: int) -> None:
        attempts = {name: self.state_of(name).attempt for name in workers}
        await asyncio.sleep(delay_s)
        states = map(self.state_of, workers)
        alive = tuple(w.name for w in states if w.alive and w.attempt == attempts[w.name])
        if alive:
            word = signal.Signals(number).name
            self.note(f"worker {', '.join(alive)} did not end in {delay_s:g} s: {word}")
            self.orders.signal(alive, number)


class Faults:
    """The faults of ``plan``, injected by ``orders``; ``note`` shows each to people."""

    def __init__(self, plan: ChaosPlan, orders: Orders, note: Callable[[str], None]) -> None:
        self._plan = plan
        self._orders = orders
        self._note = note

    @property
    def unfired(self) -> Sequence[str]:
        """The faults that were not injected."""
        return [str(fault) for fault in self._plan.waiting]

    def due(self, event: ChaosDue, state: State) -> None:
        """A worker has come to a step for which a fault may be ordered."""
        group = state.group(event.epoch)
        members = () if group is None else group.members
        rank = members.index(event.worker) if event.worker in members else -1
        for fault in self._plan.due(rank, event.step):
            self._note(f"chaos: {fault}")
            everybody = tuple(each.name for each in state.workers)
            hit = everybody if fault.rank is None else (event.worker,)
            self._orders.signal(hit, SIGSTOP if fault.seconds else SIGKILL)
            if fault.seconds:
                loop = asyncio.get_running_loop()
                loop.call_later(fault.seconds, self._orders.signal, hit, SIGCONT)
        self._orders.send((event.worker,), ChaosDone(event.step))
