"""``Debuggers``: the commands (``potluck attach --rank``) that debug workers of a job on this node.

A worker has one at a time, its *holder*, which asks to stay so every few seconds. If that leaves,
or is silent for ``LEASE_S``, the script goes on from its breakpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from potluck._core.cluster.jobs.process import WorkerProcess
from potluck._core.wire import jobs
from potluck._core.wire.worker_link import EOT
from potluck.errors import LinkError

LEASE_S = 15.0


class Debuggers:
    """Runs in the event loop. ``processes`` are the newest of each worker."""

    def __init__(self, processes: Mapping[str, WorkerProcess]) -> None:
        self._processes = processes
        self._holders: dict[str, tuple[str, str, asyncio.TimerHandle]] = {}

    def asked(self, worker: str, machine: str, request: jobs.DebugRequest) -> None:
        """A command on ``machine`` asks for ``worker``. LinkError if another one holds it."""
        session, other, lease = self._holders.get(worker, (request.session, "", None))
        if session != request.session:
            raise LinkError(
                f"a command on {other} debugs this rank; when that command ends, it is free"
            )
        if lease is not None:
            lease.cancel()
        if request.leaves:
            self._let_go(worker)
            return
        lease = asyncio.get_running_loop().call_later(LEASE_S, self._let_go, worker)
        self._holders[worker] = session, machine, lease
        self._processes[worker].type(request.typed)

    def _let_go(self, worker: str) -> None:
        if self._holders.pop(worker, None):
            self._processes[worker].type(EOT)

    def close(self) -> None:
        """Forget them."""
        for _, _, lease in self._holders.values():
            lease.cancel()
