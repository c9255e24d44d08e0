"""A world: the links and threads that are shared by a group and its sub-groups, and how its ranks
meet."""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

import numpy as np
import torch

from potluck._core.backends import store_rendezvous
from potluck._core.backends.tcp import TcpBase
from potluck._core.collectives.plan import Operation
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.request import Request
from potluck._core.forks import Owner, close_at_exit
from potluck._core.settings import load_settings
from potluck.torch.process_group.work import Completions


class Closable(Protocol):
    def close(self) -> None: ...


class World:
    """The communicator of all ranks, with the resources that are closed with it."""

    def __init__(self, communicator: Communicator, owner: Closable) -> None:
        """``owner`` is closed with the world, which is when the group of all ranks is left."""
        self.communicator = communicator
        self.completions = Completions()
        self.has_devices = False
        """Whether any rank has an accelerator; then all ranks split large tensors into pieces."""
        self.store: Any = None
        """The Store over potluck's links, for a world of ``potluck://``."""
        self._resources = owner
        self._is_closed = False
        self.owner = Owner("this process group")
        close_at_exit(self)

    def meet(self, timeout_s: float) -> None:
        """Make the first links, and set ``has_devices``. A collective call."""
        mine = np.array([torch.accelerator.is_available()], dtype=np.uint8)
        gathered = np.zeros(self.communicator.world_size, dtype=np.uint8)
        request = Request(Operation.ALL_GATHER, mine, gathered, timeout_s=timeout_s)
        self.communicator.run(request).wait()
        self.has_devices = bool(gathered.any())

    def close(self) -> None:
        """Close the links after all sent data has arrived. Idempotent. Nothing in a forked
        child."""
        if self._is_closed or not self.owner.is_here:
            return
        self._is_closed = True
        self.communicator.close()
        self._resources.close()
        self.completions.close()


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
