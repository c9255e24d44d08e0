"""Watches the network between this worker and members of its group that it can't reach.

A group spares the links of such pairs (``Group.cut``). As long as it lasts, a thread calls the
listeners of these members again and again. An answer shows that the network works; the call itself
makes no link, since a group never changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from potluck._core.background import start_thread
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.mesh import REACHED
from potluck._core.transport.credentials import Credentials
from potluck._core.transport.handshake import connect
from potluck._core.wire.greeting import Hello
from potluck.errors import PotluckError, Refused

_EVERY_S = 3.0
_CALL_S = 3.0
_LOOK_S = 0.1
"""How soon the thread sees that the group is over."""


def watch(
    communicator: Communicator, credentials: Credentials, on_mended: Callable[[int], None]
) -> None:
    """Call ``on_mended(rank)``, on a thread, once for each member whose link to this worker is cut
    and that answers again while the group lasts. Returns at once."""
    group = communicator.group
    ranks = [rank for rank in range(group.world_size) if group.is_cut(rank)]
    if not ranks:
        return

    def is_over() -> bool:
        return communicator.error is not None

    def call(rank: int) -> bool:
        member = group.members[rank]
        hello = Hello(kind=REACHED, job=group.job, epoch=group.epoch, worker=group.me.worker)
        try:
            deadline = time.monotonic() + _CALL_S
            connect(
                member.host, member.port, hello, credentials,
                deadline=deadline, max_retries=0, memory=None, cancelled=is_over,
            )  # fmt: skip
        except Refused as answer:
            return answer.code == REACHED
        except PotluckError:
            pass
        return False

    def run() -> None:
        waiting = set(ranks)
        while waiting:
            at = time.monotonic() + _EVERY_S
            while time.monotonic() < at:
                if is_over():
                    return
                time.sleep(_LOOK_S)
            for rank in sorted(waiting):
                if call(rank):
                    waiting.remove(rank)
                    on_mended(rank)

    # Without this thread the group goes on as it is.
    start_thread(run, name="potluck-cut-links", on_broken=lambda error: None)
