"""``Serving``: a worker that is one of the servers. It answers calls until all workers have left,
whether it is the primary, or becomes the primary."""

from __future__ import annotations

import time
from collections.abc import Callable

from potluck._core.context import DistributedContext
from potluck._core.waiting import Reminder
from potluck.checkpoint import CheckpointStore
from potluck.parameter_server.calls import Remotes
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.primary import Primary, Replication
from potluck.parameter_server.replica import Replica
from potluck.parameter_server.service import PrimaryService, ReplicaService
from potluck.services import service
from potluck.services.waits import SLICE_S


class Serving:
    """From its making until ``close``."""

    def __init__(
        self,
        ctx: DistributedContext,
        name: str,
        replica: Replica,
        store: CheckpointStore | None,
        save_every: int,
    ) -> None:
        """``name``: of the service. CheckpointError as for ``Primary``."""
        self._ctx = ctx
        self._replica = replica
        self._has_ended = False
        self._checkpoints = None if store is None else Checkpoints(store, replica)
        self._primary = Primary(
            replica,
            checkpoints=self._checkpoints,
            save_every=save_every,
            worker_timeout_s=ctx.timeout_s,
        )
        services: list[object] = [PrimaryService(self._primary)]
        if len(replica.servers) > 1:
            replication = Replication(
                self._primary,
                self._checkpoints,
                Remotes(ctx, name),
                lambda: ctx.group,
                self._is_over,
            )
            services.append(ReplicaService(replica, self._checkpoints))
            replication.start()
        mark = service(name, concurrent=True, before=replica.presence.hear)
        ctx.serve(*map(mark, services))

    def save(self) -> None:
        """On the primary: write a checkpoint now. CheckpointError, ValueError."""
        if self._primary.led is not None:
            self._primary.save()

    def close(
        self,
        deadline: float | None,
        leave: Callable[[], bool],
        reform_if_due: Callable[[], bool],
    ) -> None:
        """Serve until all workers have left, or ``deadline``; on the primary write the last
        checkpoint then.

        ``leave()`` says to the primary that this worker calls no more, False if the primary has
        ended; ``reform_if_due()`` enters the next group. CheckpointError if a checkpoint can't be
        written.
        """
        rest: list[str] = []

        def what() -> str:
            others = f"worker {', '.join(rest)}" if rest else "the other workers"
            return f"the parameter server waits for {others} to end"

        reminder = Reminder(what, deadline)
        there_at = time.monotonic()
        me = self._ctx.group.me.worker
        while True:
            now = time.monotonic()
            until = now + SLICE_S if deadline is None else min(now + SLICE_S, deadline)
            if self._primary.led is not None:
                rest = self._primary.await_others(me, until)
                if deadline is not None and time.monotonic() >= deadline:
                    break
                # A worker that comes back may be in the next group already, and calls then.
                if not rest and not reform_if_due():
                    break
                there_at = now
            else:
                if self._await_closed(until - now):
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    break
                if leave():
                    there_at = now
                elif not self._ctx.elastic or now - there_at > self._ctx.timeout_s:
                    break  # the primary is away for long: nobody needs the tensors here
            reform_if_due()  # a worker that was killed meanwhile comes back
            reminder.tick()
        try:
            if self._primary.led is not None:
                self._primary.close()
            elif self._checkpoints is not None:
                self._checkpoints.await_written()
        finally:
            self._has_ended = True

    def _await_closed(self, timeout_s: float) -> bool:
        with self._replica.changed:
            return self._replica.changed.wait_for(lambda: self._replica.is_closed, timeout_s)

    def _is_over(self) -> bool:
        return self._ctx.is_closed or self._has_ended or self._replica.is_closed
