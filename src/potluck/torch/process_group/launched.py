"""torch's own rendezvous (``env://``, ``tcp://``) in workers of ``potluck run``.

The ranks first meet at their agent, which can name missing ranks and ends the world when a rank is
lost; then torch makes its store. Worlds of other processes than the agent's workers (for example of
processes that a worker spawns) are left to torch.
"""

from __future__ import annotations

import os
from datetime import timedelta

from potluck._core.backends.fixed import is_our_world, join_world
from potluck.torch.process_group.options import given

_DEFAULT = timedelta(minutes=30)
"""torch's default timeout of a rendezvous."""


def is_our(url: str) -> bool:
    """Whether ``url`` describes the world of this worker's job."""
    rank, world_size = given(url, "rank", "RANK"), given(url, "world_size", "WORLD_SIZE")
    return is_our_world(os.environ, rank, world_size)


def meet(url: str, timeout: timedelta | None) -> None:
    """If ``url`` describes the world of this worker's job, wait for all its ranks, and set
    MASTER_ADDR and MASTER_PORT to the address of the store that rank 0 will serve."""
    if is_our(url):
        host, port = join_world((timeout or _DEFAULT).total_seconds())
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
