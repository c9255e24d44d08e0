"""A rank's seat in one process group: what every operation needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from potluck.engine.communicator import Communicator
from potluck.torch.process_group.own_mail import OwnMail
from potluck.torch.process_group.work import Completions


@dataclass(slots=True)
class Seat:
    """``messages`` carries point-to-point messages that belong to collectives, apart from the
    user's; ``timeout_s`` is the deadline of operations that name none; ``has_devices`` says that
    some rank of the world has an accelerator."""

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
