"""The communicators of a process group, as its operations use them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from potluck._core.backends.serial_executor import BoundedWork
from potluck._core.collectives.plan import Operation
from potluck._core.engine.arrays.layout import Array
from potluck._core.engine.communicator import Communicator
from potluck._core.engine.work import Work, finished
from potluck._core.types import ReduceOp
from potluck.errors import Desync
from potluck.torch.process_group.options import seconds
from potluck.torch.process_group.work import Completions


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
        told = f"{work.call} met a message of {message.dtype}, shape {message.shape}"
        work.finish(Desync(told, operation=work.call))
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

    def fast_path(
        self,
        operation: Operation,
        opts: Any,
        source: Any,
        result: Any,
        op: ReduceOp | None = None,
        root: int = 0,
    ) -> bool:
        """Try the engine's fast path: True if the call is complete, False if nothing was done.

        Only for blocking calls (``async_op=False``, which torch puts into ``opts``).
        """
        fast = self.communicator.fast_path
        if fast is None or getattr(opts, "asyncOp", True):
            return False
        return fast(operation, source, result, op, root, seconds(opts, self.timeout_s), True)
