"""A world: the links and threads that are shared by a group and its sub-groups, how its ranks meet,
and the communicators of one group."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch

from potluck._core.backends import store_rendezvous
from potluck._core.backends.serial_executor import BoundedWork
from potluck._core.backends.tcp import TcpBase
from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.coding import Encoding
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.request import Request
from potluck._core.engine.work import Work, finished
from potluck._core.forks import Owner, close_at_exit
from potluck._core.settings import load_settings
from potluck._core.types import ReduceOp
from potluck.errors import Desync
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


class SelfMessages:
    """Messages of a rank to itself: queues of unreceived messages and of receives without a
    message, by tag. Thread-safe.

    torch's V-shaped pipeline schedules send such messages, since a rank has two neighbouring
    stages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[int, deque[Array]] = defaultdict(deque)
        self._wanted: defaultdict[int, deque[tuple[BoundedWork, Array]]] = defaultdict(deque)

    def send(self, array: Array, tag: int) -> Work:
        """Send a copy of ``array``; the work is complete when this returns."""
        with self._lock:
            receive = self._wanted[tag].popleft() if self._wanted[tag] else None
            if receive is None:
                self._sent[tag].append(array.copy())
        if receive is not None:
            _deliver(array, *receive)
        return finished("send to oneself", array)

    def recv(self, array: Array, rank: int, tag: int, *, timeout_s: float) -> Work:
        """Receive into ``array``. OperationTimeout if there is no message within ``timeout_s``
        seconds; Desync if its dtype or shape differs."""
        call = f"recv({array.dtype}, shape {array.shape}, from rank {rank} itself, tag {tag})"
        work: BoundedWork = BoundedWork(
            call, array, time.monotonic() + timeout_s, lambda error: work.finish(error)
        )
        work.source = rank
        with self._lock:
            message = self._sent[tag].popleft() if self._sent[tag] else None
            if message is None:
                self._wanted[tag].append((work, array))
        if message is not None:
            _deliver(message, work, array)
        return work


def _deliver(message: Array, work: Work, array: Array) -> None:
    if message.dtype != array.dtype or message.shape != array.shape:
        found = f"{work.call} met a message of {message.dtype}, shape {message.shape}"
        work.finish(Desync(found, operation=work.call))
        return
    array[...] = message
    work.finish()


@dataclass(slots=True)
class Comms:
    """The communicators of one rank in one group.

    ``messages`` carries the point-to-point messages inside collectives, apart from the user's
    messages. ``timeout_s`` is the default deadline of operations. ``has_devices``: a rank of the
    world has an accelerator.
    """

    communicator: Communicator
    completions: Completions
    timeout_s: float
    has_devices: bool = False
    self_messages: SelfMessages = field(default_factory=SelfMessages)

    @property
    def messages(self) -> Communicator:
        return self.communicator.aside()

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    def run(
        self,
        operation: Operation,
        opts: Any,
        *arrays: Any,
        op: ReduceOp | None = None,
        root: int = 0,
        encoding: Encoding | None = None,
    ) -> Work:
        """Start a collective, with the deadline in ``opts``. ``arrays``: source and result."""
        how: Any = {"op": op, "encoding": encoding, "timeout_s": self.seconds(opts)}
        return self.communicator.run(Request(operation, *arrays, root=root, **how))

    def seconds(self, opts: Any) -> float:
        """The timeout in ``opts``, or the default without one (torch marks that as below 0)."""
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
        if timeout is None or timeout.days < 0:
            return self.timeout_s
        return timeout.total_seconds() or self.timeout_s
