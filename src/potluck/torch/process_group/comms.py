"""What every operation of a process group needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from potluck.collectives.plan import Operation
from potluck.engine.communicator import Communicator
from potluck.torch.process_group.options import seconds
from potluck.torch.process_group.own_mail import OwnMail
from potluck.torch.process_group.work import Completions
from potluck.types import ReduceOp


@dataclass(slots=True)
class Comms:
    """One rank's communicators of one group.

    ``messages`` carries point-to-point messages that belong to collectives, apart from the
    user's; ``timeout_s`` is the deadline of operations that name none; ``has_devices`` says that
    some rank of the world has an accelerator.
    """

    communicator: Communicator
    messages: Communicator
    completions: Completions
    timeout_s: float
    has_devices: bool = False
    own_mail: OwnMail = field(default_factory=OwnMail)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    def at_once(
        self,
        operation: Operation,
        opts: Any,
        source: Any,
        result: Any,
        op: ReduceOp | None = None,
        root: int = 0,
    ) -> bool:
        """Try the fast path: True if the call has ended well, False if nothing was done.

        For callers that wait anyway (``async_op=False``, which torch says in ``opts``).
        """
        fast = self.communicator.fast_path
        if fast is None or getattr(opts, "asyncOp", True):
            return False
        return fast(operation, source, result, op, root, seconds(opts, self.timeout_s), True)
