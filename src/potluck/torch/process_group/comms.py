"""The communicators of a process group, as its operations use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from potluck._core.collectives.plan import Operation
from potluck._core.engine.communicator import Communicator
from potluck._core.types import ReduceOp
from potluck.torch.process_group.options import seconds
from potluck.torch.process_group.self_messages import SelfMessages
from potluck.torch.process_group.work import Completions


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
