"""How the ranks of a torch process group meet, and the world that they then share."""

from __future__ import annotations

import os
import time
from typing import Any

from potluck._core.backends import store_rendezvous
from potluck._core.backends.tcp import TcpBase
from potluck._core.settings import load_settings
from potluck.torch.process_group.world import World


def meet(store: Any, rank: int, world_size: int, *, timeout_s: float) -> World:
    """The world of all ranks that call this with one store; see ``backends.store_rendezvous``."""
    deadline = time.monotonic() + timeout_s
    base = TcpBase("", 0, load_settings())
    try:
        group = store_rendezvous.meet(
            store,
            rank,
            world_size,
            base=base,
            local_rank=_local_rank(),
            timeout_s=timeout_s,
        )
        communicator = base.open(group)
    except BaseException:
        base.close()
        raise
    world = World(communicator, base)
    try:
        world.meet(max(1.0, deadline - time.monotonic()))
    except BaseException:
        world.close()
        raise
    return world


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else 0
