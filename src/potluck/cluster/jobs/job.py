"""What an agent is given: the job, how its processes are started, the faults ordered for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from potluck.cluster.groups.roster import Policy
from potluck.wire.messages import SEALED


class Process(Protocol):
    """A worker's process, as the launcher gives it."""

    pid: int

    def signal(self, number: int) -> None:
        """Send a signal to it and whatever it started; nothing once it has ended."""

    async def release(self) -> None:
        """After its exit: take in its last output and give everything back."""


class Launcher(Protocol):
    def start(
        self, worker: str, attempt: int, environment: dict[str, str], on_exit: Callable[[int], None]
    ) -> Process:
        """Start ``worker`` with these variables added; ConfigurationError if that can't be."""


class OrderedFault(Protocol):
    """``rank`` None: every worker. ``seconds`` 0: SIGKILL, else SIGSTOP for so long."""

    @property
    def rank(self) -> int | None: ...
    @property
    def seconds(self) -> float: ...


class Chaos(Protocol):
    """The ordered faults that have not happened yet."""

    @property
    def waiting(self) -> Sequence[OrderedFault]: ...
    def steps_of(self, rank: int) -> tuple[int, ...]: ...
    def due(self, rank: int, step: int) -> Sequence[OrderedFault]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run. ``id`` is unique; ``script`` is only shown; ``wire``: sealed or plain."""

    id: str
    script: str
    workers: tuple[str, ...]
    policy: Policy = field(default_factory=Policy)
    stop_grace_s: float = 3.0
    interrupt_grace_s: float = 15.0
    wire: str = SEALED
