"""``Faults``: injects the faults that ``potluck run --chaos`` orders, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from potluck._core.cluster.jobs.chaos import ChaosPlan
from potluck._core.cluster.jobs.groups.roster import State
from potluck._core.cluster.jobs.orders import Orders
from potluck._core.system import SIGCONT, SIGKILL, SIGSTOP
from potluck._core.wire.worker_link import ChaosDone, ChaosDue


class Faults:
    """The faults of ``plan``, injected by ``orders``; ``note`` tells people of each."""

    def __init__(self, plan: ChaosPlan, orders: Orders, note: Callable[[str], None]) -> None:
        self._plan = plan
        self._orders = orders
        self._note = note

    @property
    def unfired(self) -> Sequence[str]:
        """The faults that did not happen."""
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
        self._orders.tell((event.worker,), ChaosDone(event.step))
