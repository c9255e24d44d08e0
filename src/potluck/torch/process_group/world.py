"""A world: the links and threads that a group and all groups split from it share."""

from __future__ import annotations

import atexit
import weakref
from typing import Any, Protocol

import numpy as np
import torch

from potluck.collectives.plan import Operation
from potluck.engine.communicator import Communicator
from potluck.engine.request import Request
from potluck.torch.process_group.work import Completions


class Closable(Protocol):
    def close(self) -> None: ...


class World:
    """The communicator of all ranks, and what must be closed with it."""

    def __init__(self, name: str, communicator: Communicator, owner: Closable) -> None:
        """``name`` is that of the group that made it: the world ends when that group leaves."""
        self.name = name
        self.communicator = communicator
        self.completions = Completions()
        self.has_devices = False
        """Whether any rank has an accelerator; then all cut large tensors into equal pieces."""
        self.store: Any = None
        """The Store made for this world, if it was formed without one."""
        self._owner = owner
        self._is_closed = False
        _close_at_exit(self)

    def meet(self, timeout_s: float) -> None:
        """Make the first links, and learn what kinds of rank there are. Every rank calls it."""
        mine = np.array([torch.accelerator.is_available()], dtype=np.uint8)
        all_of_them = np.zeros(self.communicator.world_size, dtype=np.uint8)
        request = Request(Operation.ALL_GATHER, mine, all_of_them, timeout_s=timeout_s)
        self.communicator.run(request).wait()
        self.has_devices = bool(all_of_them.any())

    def leave(self, name: str) -> None:
        """The group ``name`` needs the world no longer."""
        if name == self.name:
            self.close()

    def close(self) -> None:
        """Leave in order: what was sent arrives. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.communicator.close()
        self._owner.close()
        self.completions.close()


def _close_at_exit(world: World) -> None:
    reference = weakref.ref(world)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    # Not at exit: finalizers run before ``close`` then, and this one would cancel it.
    weakref.finalize(world, atexit.unregister, close).atexit = False
