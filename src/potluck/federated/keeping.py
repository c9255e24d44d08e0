"""A context whose group is re-formed in the background, for workers that only serve and call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from potluck._core.background import start_thread
from potluck._core.context import DistributedContext
from potluck.errors import AgentLost, Evicted, OperationTimeout, PotluckError, RemoteError

_EVERY_S = 0.1


@contextlib.contextmanager
def kept(ctx: DistributedContext) -> Iterator[threading.Event]:
    """Enter each next group of ``ctx`` as soon as there is one, so that clients come in and go
    while no collective call is made. The event is set when the job is over for this worker."""
    is_over, ended = threading.Event(), threading.Event()

    def keep() -> None:
        while not (is_over.is_set() or ended.wait(_EVERY_S)):
            error = ctx.communicator.error
            if isinstance(error, RemoteError | AgentLost):
                ended.set()
            elif ctx.has_next_group or isinstance(error, Evicted):
                try:
                    ctx.reform(error if isinstance(error, Evicted) else None)
                except OperationTimeout:
                    continue
                except PotluckError:
                    ended.set()

    thread = start_thread(
        keep, name="potluck-federated-groups", on_broken=lambda error: ended.set()
    )
    try:
        yield ended
    finally:
        is_over.set()
        thread.join(2 * _EVERY_S)
