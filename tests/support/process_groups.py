"""Process groups of torch over the contexts of a test's world, all in one process."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

from potluck._core.context import DistributedContext
from potluck._core.engine.communicator import Communicator
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.torch.process_group.world import World


class _Nobody:
    def close(self) -> None:
        """The context closes its links itself."""


@contextlib.contextmanager
def process_group(
    ctx: DistributedContext,
    *,
    timeout: datetime.timedelta = datetime.timedelta(minutes=1),
    has_devices: bool = False,
) -> Iterator[PotluckProcessGroup]:
    """The group of all ranks over the links of ``ctx``, which it closes at the end."""
    communicator = ctx.communicator
    assert isinstance(communicator, Communicator), "torch's libraries have process groups of theirs"
    world = World(communicator, _Nobody())
    world.has_devices = has_devices
    group = PotluckProcessGroup(world, communicator, name="0", timeout=timeout)
    try:
        yield group
    finally:
        ctx.close()
        world.close()
