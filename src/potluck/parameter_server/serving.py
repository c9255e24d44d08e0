"""``Serving``: what a worker does that is one of the servers: it answers calls until all workers
have left, whether it is the first server, or becomes that."""

from __future__ import annotations

import time
from collections.abc import Callable

from potluck._core.context import DistributedContext
from potluck._core.waiting import Reminder
from potluck.checkpoint import CheckpointStore
from potluck.parameter_server.checkpoints import Checkpoints
from potluck.parameter_server.follower import Follower
from potluck.parameter_server.host import Host
from potluck.parameter_server.leader import Leader
from potluck.parameter_server.offer import Offer, SharedOffer
from potluck.parameter_server.remotes import Remotes
from potluck.parameter_server.replica import Replica
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
        """``name`` is that of the service. CheckpointError as for ``Host``."""
        self._ctx = ctx
        self._has_ended = False
        checkpoints = None if store is None else Checkpoints(store, replica)
        self._host = Host(
            replica,
            checkpoints=checkpoints,
            save_every=save_every,
            worker_timeout_s=ctx.timeout_s,
        )
        self._follower = Follower(replica, checkpoints)
        offer = Offer(self._host)
        if len(replica.servers) > 1:
            leader = Leader(
                replica,
                self._host,
                checkpoints,
                Remotes(ctx, name),
                lambda: ctx.group,
                self._is_over,
            )
            offer = SharedOffer(self._host, replica, self._follower, leader.ask)
            leader.start()
        ctx.serve(service(name, concurrent=True, before=replica.presence.hear)(offer))

    def save(self) -> None:
        """On the first server: write a checkpoint now. CheckpointError, ValueError."""
        if self._host.led is not None:
            self._host.save()

    def close(
        self,
        deadline: float | None,
        leave: Callable[[], bool],
        reform_if_due: Callable[[], bool],
    ) -> None:
        """Serve until all workers have left, or ``deadline``; on the first server write the last
        checkpoint then.

        ``leave()`` says to the first server that this worker calls no more, False if it has ended;
        ``reform_if_due()`` enters the next group. CheckpointError if a checkpoint can't be
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
            if self._host.led is not None:
                rest = self._host.await_others(me, until)
                if deadline is not None and time.monotonic() >= deadline:
                    break
                # A worker that comes back may be in the next group already, and calls then.
                if not rest and not reform_if_due():
                    break
                there_at = now
            else:
                if self._follower.await_closed(until - now):
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    break
                if leave():
                    there_at = now
                elif not self._ctx.elastic or now - there_at > self._ctx.timeout_s:
                    break  # the first server is away for long: nobody needs what lies here
            reform_if_due()  # a worker that was killed meanwhile comes back
            reminder.tick()
        try:
            if self._host.led is not None:
                self._host.close()
            else:
                self._follower.close()
        finally:
            self._has_ended = True

    def _is_over(self) -> bool:
        return self._ctx.is_closed or self._has_ended or self._follower.is_closed
