"""How a context gets its group and its communicator.

Implementations: ``ring.py`` (a list of peers, no agent), ``environment.py`` (MASTER_ADDR and kin),
``inprocess.py`` (threads of one process), ``agent.py`` (the agent that started this worker),
``local.py`` (one worker, no network).
"""

from __future__ import annotations

from typing import Any, Protocol

from potluck.engine.communicator import Communicator
from potluck.errors import GroupError


class Backend(Protocol):
    @property
    def elastic(self) -> bool:
        """Whether ``form`` can give another group after the first."""

    def form(self, after_epoch: int, cause: GroupError | None, timeout_s: float) -> Communicator:
        """The communicator of the next group with an epoch above ``after_epoch``.

        Blocks until every member can be expected to come, at most ``timeout_s``. ``cause`` is why
        the last group ended, None if it was left in agreement. Raises PotluckError if there will
        be no such group.
        """

    def next_epoch(self) -> int:
        """The highest epoch announced so far; above the current one, a new group waits."""

    def begin_step(self, step: int) -> None:
        """Training step ``step`` begins (where a launcher may inject a fault)."""

    def report(self, facts: dict[str, Any]) -> None:
        """Progress for whoever watches; never blocks, never fails."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class StaticBackend:
    """What backends with one unchanging group have in common."""

    elastic = False

    def next_epoch(self) -> int:
        return 0

    def begin_step(self, step: int) -> None:
        return None

    def report(self, facts: dict[str, Any]) -> None:
        return None
