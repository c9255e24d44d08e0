"""``WorkerOrders``: sends orders for a job's workers to the nodes that they are on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from potluck.background import Tasks
from potluck.cluster.jobs.groups.roster import State
from potluck.cluster.jobs.host import JobHost
from potluck.system import SIGCONT, SIGKILL, SIGPIPE, SIGSTOP
from potluck.wire import control, jobs

_STOP_GRACE_S = 3.0
_INTERRUPT_GRACE_S = 15.0


class WorkerOrders:
    """Orders to the workers of ``job``. ``node_of`` tells the node of each, ``state`` what
    membership knows of them; ``note`` tells people."""

    def __init__(
        self,
        host: JobHost,
        job: str,
        *,
        node_of: Callable[[str], str],
        state: Callable[[], State],
        note: Callable[[str], None],
    ) -> None:
        self._host = host
        self._job = job
        self._node_of = node_of
        self._state = state
        self._note = note
        self._tasks = Tasks()

    def start(self, worker: str, attempt: int) -> None:
        """Start the process of ``worker``."""
        self._host.links.send(self._node_of(worker), jobs.StartWorker(self._job, worker, attempt))

    def tell(self, workers: Sequence[str], message: control.FromAgent) -> None:
        """Send ``message`` to ``workers``; see ``jobs.TellWorkers``."""
        for node, names in self._by_node(workers).items():
            self._host.links.send(node, jobs.TellWorkers(self._job, names, message))

    def signal(self, workers: Sequence[str], number: int) -> None:
        """Send the processes of ``workers`` a signal."""
        for node, names in self._by_node(workers).items():
            self._host.links.send(node, jobs.SignalWorkers(self._job, names, number))

    def terminate(self, workers: tuple[str, ...]) -> None:
        """End ``workers`` by SIGTERM, and by SIGKILL those that have not ended after a grace
        period."""
        self.signal(workers, signal.SIGTERM)
        self._later(workers, _STOP_GRACE_S, SIGKILL)

    def interrupt(self, workers: tuple[str, ...], number: int) -> None:
        """Pass on the operator's signal; SIGKILL to workers that have not ended after a grace
        period."""
        # The command got SIGPIPE because its output is not read. Python workers ignore that signal.
        self.signal(workers, signal.SIGTERM if number == SIGPIPE else number)
        self._later(workers, _INTERRUPT_GRACE_S, SIGKILL)

    def stop(self, workers: tuple[str, ...], reason: str) -> None:
        """Ask ``workers`` to end, then end them by SIGTERM, then by SIGKILL."""
        self.tell(workers, control.Stop(control.clip(reason)))
        self._later(workers, _STOP_GRACE_S, signal.SIGTERM)
        self._later(workers, 2 * _STOP_GRACE_S, SIGKILL)

    def suspend(self, workers: tuple[str, ...], seconds: float) -> None:
        """Stop ``workers`` for a while, as an ordered fault."""
        self.signal(workers, SIGSTOP)
        asyncio.get_running_loop().call_later(seconds, self.signal, workers, SIGCONT)

    def close(self) -> None:
        """End all tasks."""
        self._tasks.cancel()

    def _later(self, workers: tuple[str, ...], delay_s: float, number: int) -> None:
        self._tasks.start(self._signal_later(workers, delay_s, number))

    async def _signal_later(self, workers: tuple[str, ...], delay_s: float, number: int) -> None:
        attempts = {name: self._state().worker(name).attempt for name in workers}
        await asyncio.sleep(delay_s)
        stopped = (self._state().worker(name) for name in workers)
        alive = [w.name for w in stopped if w.alive and w.attempt == attempts[w.name]]
        if alive:
            word = signal.Signals(number).name
            self._note(f"worker {', '.join(alive)} did not end in {delay_s:g} s: {word}")
            self.signal(alive, number)

    def _by_node(self, workers: Sequence[str]) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for worker in workers:
            node = self._node_of(worker)
            found[node] = (*found.get(node, ()), worker)
        return found
