"""The process group for torchft's ``Manager``: ``ProcessGroupPotluck``.

torchft forms a new group ("quorum") when a replica is lost or returns, and configures its process
group with the members of the quorum. Each quorum is a new potluck world.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from potluck._core.optional import require
from potluck.torch.process_group.group import PotluckProcessGroup
from potluck.torch.process_group.world import meet

_torchft: Any = require("torchft.process_group", "torchft")

_NAME = "torchft"


class ProcessGroupPotluck(_torchft.ProcessGroupWrapper):  # type: ignore[misc]
    """torchft's reconfigurable process group over potluck: ``Manager(pg=ProcessGroupPotluck())``.

    ``timeout`` is the deadline of a reconfiguration and of every operation. In ``configure`` the
    members of the next quorum meet through torchft's store; their links are mutual TLS under the
    cluster secret. A failed operation, or ``abort``, ends the group on all its ranks; ``errored``
    returns the cause until the next ``configure``.
    """

    _pg: PotluckProcessGroup | None

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._aborted: Exception | None = None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> PotluckProcessGroup:
        self._aborted = None
        seconds = self._timeout.total_seconds()
        world = meet(store, rank, world_size, timeout_s=seconds)
        return PotluckProcessGroup(
            world, world.communicator, name=_NAME, timeout=self._timeout, store=store
        )

    def errored(self) -> Exception | None:
        """The cause that ended this group, as a RuntimeError; None while the group is intact."""
        group = self._pg
        if group is None:
            return self._aborted
        cause = group.communicator.error
        if cause is None:
            return None
        error = RuntimeError(f"the process group was aborted: {cause}")
        error.__cause__ = cause
        return error

    def abort(self, errored: bool = True) -> None:
        """End the group on all its ranks. ``errored``: torchft must configure the next group."""
        if errored:
            self._aborted = self.errored() or RuntimeError("the process group was aborted")
        super().abort(errored=errored)

    def shutdown(self) -> None:
        """Leave the group and close its links. Idempotent."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later operations and of the next ``configure``."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def getBackendName(self) -> str:
        return "torchft-potluck"
